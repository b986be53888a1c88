"""A penalty on the weights in float16, in the loss, or at the float32 master.

    .venv/bin/python -m benchmarks regularizers

OpenSeq2Seq: the gradient of weight decay, 2 lambda w with lambda from 1e-5 to 1e-3,
underflows in float16, so regularisers belong to the float32 master. A network learns
noisy digits, one per step, with float16 weights and gradients. Half of its inputs are
always off, so only the penalty moves their weights, which are small at first. If the
penalty is in the loss, its gradient is rounded to float16 and added to the gradient of
the loss, and the sum is rounded again; ``scaled`` does this under a loss scale.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.papers import noisy_digits
from lowbit_optax import precision

RATE, SMALL, SCALE = 1e-3, 1e-3, 2.0**10
STRENGTHS = (1e-5, 1e-4, 1e-3)
KINDS = {
    "no penalty": "no penalty",
    "float32": "float32, in the loss",
    "master": "float16, at the float32 master",
    "in the loss": "float16, in the loss",
    "in the loss, scaled": "float16, in the scaled loss",
}
"""The kinds of runs, and their labels."""
PARTS = ("loss", "off", "lost")
HALF = precision.FloatFormat.of(jnp.float16)


def penalty(strength: float, params) -> jax.Array:
    return strength * sum(jnp.sum(w * w) for w in jax.tree.leaves(params))


def optimizer(kind: str, strength: float, steps: int) -> optax.GradientTransformation:
    adam = optax.adam(optax.cosine_decay_schedule(RATE, steps))
    regularizer = lowbit_optax.transformations.regularize(
        functools.partial(penalty, strength)
    )
    inner = optax.chain(regularizer, adam) if kind in ("float32", "master") else adam
    if kind in ("no penalty", "float32"):
        return inner
    master = lowbit_optax.master_copy()
    return lowbit_optax.lowbit(inner, weights=master, moments="float32", min_size=0)


def in_float16(grads, params, strength: float, scale: float):
    """Return gradients of the loss plus its penalty, and the lost share of the penalty.

    An element of the penalty's gradient is lost if adding it does not change the sum.
    """
    # XLA for CPUs may skip the rounding between float16 operations.
    first = jax.tree.map(lambda g: HALF.round(scale * g), grads)
    wide = jax.tree.map(lambda w: w.astype(jnp.float32), params)
    second = jax.grad(functools.partial(penalty, scale * strength))(wide)
    both = jax.tree.map(lambda a, b: HALF.round(a + HALF.round(b)), first, second)
    lost = jnp.mean(both["off"] == first["off"], dtype=jnp.float32)
    return jax.tree.map(lambda g: g / scale, both), lost


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def train(kind: str, strength: float, steps: int, width: int, seeds, given):
    """Return ``PARTS`` for each seed.

    ``off`` is the final norm of the weights of inputs that are off, divided by their
    first norm. ``lost`` is the share of the penalty's gradients that step 1 loses.
    """
    tx = optimizer(kind, strength, steps)
    is_float16 = kind not in ("no penalty", "float32")
    scale = SCALE if kind == "in the loss, scaled" else 1.0

    def loss_fn(params, images, labels):
        wide = jax.tree.map(lambda w: w.astype(jnp.float32), params)
        # Multiplying ``off`` by zero gives it a gradient of 0.
        hidden = jax.nn.relu(images @ wide["hidden"] + 0 * wide["off"].sum(0))
        logits = (hidden @ wide["out"])[:, : noisy_digits.CLASSES]
        labels = jax.nn.one_hot(labels, noisy_digits.CLASSES)
        return optax.softmax_cross_entropy(logits, labels).mean()

    def run(seed):
        key = jax.random.key(seed)
        off = SMALL * jax.random.normal(
            jax.random.fold_in(key, 2**31), (noisy_digits.PIXELS, width)
        )
        params = {**noisy_digits.init(key, width), "off": off}
        if is_float16:
            params = jax.tree.map(lambda w: w.astype(jnp.float16), params)

        def body(carry, i):
            params, state = carry
            which, noise = jax.random.split(jax.random.fold_in(key, i))
            chosen = jax.random.randint(which, (1,), 0, noisy_digits.TRAINING)
            images = noisy_digits.with_noise(noise, given.images[chosen])
            grads = jax.grad(loss_fn)(params, images, given.labels[chosen])
            lost = jnp.float32(0)
            if kind.startswith("in the loss"):
                grads, lost = in_float16(grads, params, strength, scale)
            return lowbit_optax.step(tx, params, state, grads), lost

        start = params, tx.init(params)
        (params, _), lost = jax.lax.scan(body, start, jnp.arange(steps))
        left = jnp.linalg.norm(params["off"].astype(jnp.float32))
        loss = loss_fn(params, given.held_out_images, given.held_out_labels)
        return loss, left / jnp.linalg.norm(off), lost[0]

    return jax.vmap(run)(seeds)


def measure(args) -> dict:
    given, seeds = noisy_digits.data(), jnp.arange(args.seeds)
    found: dict[str, dict] = {}
    for strength in STRENGTHS:
        runs = {}
        for kind in KINDS:
            end = train(kind, strength, args.steps, args.width, seeds, given)
            runs[kind] = dict(zip(PARTS, jax.device_get(end), strict=True))
            print(f"lambda {strength:g}, {kind}", flush=True)
        gaps = records.gaps({k: each["loss"] for k, each in runs.items()}, "float32")
        found[f"{strength:g}"] = {
            kind: records.spreads(each)
            | ({"gap_to_float32": gaps[kind]} if kind in gaps else {})
            for kind, each in runs.items()
        }
    return {"strengths": found}


@pictures.panels(4.2, (1, 1), columns=2)
def draw(record: dict, norms, losses) -> str:
    strengths, x = record["strengths"], np.arange(len(STRENGTHS))
    formats = map(pictures.FORMATS.get, ("float32", "float32 master", "nearest"))
    looks = pictures.OTHERS[2], *formats, pictures.OTHERS[0]
    for i, (kind, (color, mark)) in enumerate(zip(KINDS, looks, strict=True)):
        look = {"color": color, "marker": mark, "ls": "", "label": KINDS[kind]}
        parts = ((norms, "off", 100), (losses, "gap_to_float32", 1))
        for axes, part, factor in parts[: 1 if kind == "float32" else 2]:
            found = [each[kind][part] for each in strengths.values()]
            means, bars = ([factor * y[key] for y in found] for key in ("mean", "std"))
            axes.errorbar(x + 0.14 * (i - 2), means, bars, **look)
    for axes in (norms, losses):
        axes.set_xticks(x, [f"{strength:g}" for strength in STRENGTHS])
        axes.set(xlabel="strength of the penalty, lambda")
    norms.set(ylabel="norm left of weights that only the penalty moves, %")
    losses.set(ylabel="held-out loss minus float32's (lower is better)")
    losses.axhline(0, color="black", lw=1)
    left = strengths["1e-05"]["in the loss"]["off"]["mean"]
    return (
        f"At lambda = 1e-5, a penalty in a float16 loss leaves {left:.0%} of the norm; "
        "at the float32 master, it leaves less than 0.1%"
    )


main = records.program(__name__, **noisy_digits.numbers(4000))
