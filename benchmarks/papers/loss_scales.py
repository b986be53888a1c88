"""float16 training that needs a loss scale: overflows by the rule that sets the scale.

    .venv/bin/python -m benchmarks loss_scales

OpenSeq2Seq's automatic loss scaling: Backoff finds its scale with overflows, one at the
end of each period. LogNormal uses statistics of the gradients to keep the probability
of an overflow under 0.001. A network learns the next byte of a text with weights,
activations and gradients in float16, and a float32 master. Its loss is divided by 8192,
as if its 128 examples were one device's part of a mean over a million. Without a scale,
gradients vanish or keep a bit or two. Adam's eps is 1e-16 because gradients are small.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.papers import next_byte

DEVICES, RATE, WIDTH, POINTS = 8192, 3e-3, 64, 60
BOUNDS = {"initial": 2.0**30, "largest": 2.0**40}
RULES = {
    "no scale": lowbit_optax.loss_scaling.static_scale(1.0),
    "Backoff, period 100": lowbit_optax.loss_scaling.backoff_scale(
        **BOUNDS, period=100
    ),
    "LogNormal": lowbit_optax.loss_scaling.log_normal_scale(**BOUNDS),
}


def loss_fn(params, windows):
    """Return the part of the mean loss that one of ``DEVICES`` computes."""
    return next_byte.loss_fn(params, windows) / DEVICES


@functools.partial(jax.jit, static_argnums=0)
def train(name: str, params, batches):
    """Return loss, scale, skips and vanished gradients. "float32" has no scale."""
    schedule = optax.cosine_decay_schedule(RATE, len(batches))
    inner = optax.adamw(schedule, eps=1e-16)
    if name != "float32":
        params = jax.tree.map(lambda x: x.astype(jnp.float16), params)
        master = lowbit_optax.master_copy()
        inner = lowbit_optax.lowbit(inner, weights=master, moments="float32")
    tx = lowbit_optax.with_loss_scale(inner, RULES.get(name, RULES["no scale"]))

    def body(carry, windows):
        params, state = carry
        differentiate = lowbit_optax.scaled_value_and_grad(loss_fn)
        loss, grads = differentiate(params, state, windows)
        vanished = jnp.mean(grads["hidden"] == 0, dtype=jnp.float32)
        scale, before = (
            lowbit_optax.loss_scaling.current_loss_scale(state),
            state.skipped,
        )
        params, state = lowbit_optax.step(tx, params, state, grads)
        return (params, state), (
            loss * DEVICES,
            scale,
            state.skipped > before,
            vanished,
        )

    return jax.lax.scan(body, (params, tx.init(params)), batches)[1]


def summary(runs: list, settled: int) -> dict:
    """Summarise a rule, given the steps of each seed."""
    loss, scale, skipped, vanished = (
        np.stack(parts) for parts in zip(*runs, strict=True)
    )
    parts = lambda x: x.reshape(len(runs), POINTS, -1)
    return {
        "overflows_first": records.spread(skipped[:, :settled].sum(1)),
        "overflow_rate_after": records.spread(skipped[:, settled:].mean(1)),
        "vanished": records.spread(vanished.mean(1)),
        "final_loss": records.spread(loss[:, -loss.shape[1] // 10 :].mean(1)),
        "loss": parts(loss).mean((0, 2)),
        "log2_scale": parts(np.log2(scale)).mean(2)[0],
    }


def measure(args) -> dict:
    runs: dict[str, list] = {name: [] for name in ("float32", *RULES)}
    for seed in range(args.seeds):
        batches = next_byte.batches(seed, args.steps)
        for name, kept in runs.items():
            steps = train(name, next_byte.init(seed, WIDTH), batches)
            kept.append(jax.device_get(steps))
            print(f"seed {seed}, {name}", flush=True)
    return {"rules": {name: summary(kept, args.settled) for name, kept in runs.items()}}


@pictures.panels(3.8, (1, 1), columns=2)
def draw(record: dict, losses, scales) -> str:
    x = (np.arange(POINTS) + 0.5) * record["options"]["steps"] / POINTS
    rules = record["rules"]
    colors = "black", *(color for color, _ in pictures.OTHERS[::-1])
    for i, (color, (name, found)) in enumerate(zip(colors, rules.items(), strict=True)):
        look = {"color": color, "ls": pictures.LINES[max(i - 1, 0)], "lw": 1.8}
        look["label"] = f"float16, {name}"
        if name == "float32":
            look |= {"lw": 4, "label": name}
        losses.plot(x, found["loss"], **look)
        if i > 1:
            scales.plot(x, found["log2_scale"], **look)
    losses.set(ylabel="training loss, nats per byte (lower is better)", ylim=(2, 5))
    scales.set(ylabel="log2 of the loss scale, one seed")
    for axes in (losses, scales):
        axes.set(xlabel="step")
    rate = rules["Backoff, period 100"]["overflow_rate_after"]["mean"]
    return (
        "float16 training fails without a loss scale; after step "
        f"{record['options']['settled']}, Backoff overflows in {rate:.2%} of the "
        "steps, and LogNormal in none"
    )


main = records.program(__name__, seeds=3, steps=1200, settled=200)
