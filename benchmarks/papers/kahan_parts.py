"""Kahan summation for a part of the weights, stochastic rounding for the rest.

    .venv/bin/python -m benchmarks kahan_parts

Zamirai et al. 2020, figure 5: with Kahan summation instead of stochastic rounding for
more of the weights, a DLRM improves by up to 0.04% of AUC and needs more memory. This
benchmark measures the loss of a network of three bfloat16 matrices that learns the next
byte of a text, and compares runs with the same seed.
"""

import functools

import jax
import jax.numpy as jnp
import optax

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.papers import next_byte

RUNS = {
    "float32": None,
    "nearest": None,
    "stochastic": (),
    "Kahan: output": ("out",),
    "Kahan: output, hidden": ("out", "hidden"),
    "Kahan: all": ("out", "hidden", "embedding"),
}


def optimizer(name: str, rate) -> optax.GradientTransformation:
    """Return SGD with momentum, with the formats of a run."""
    inner = optax.sgd(rate, 0.9)
    if name == "float32":
        return inner
    held = functools.partial(lowbit_optax.lowbit, inner, moments="float32")
    if name == "nearest":
        return held(weights=lowbit_optax.nearest())
    kahan = RUNS[name]
    return optax.partition(
        {
            "Kahan": held(weights=lowbit_optax.kahan()),
            "stochastic": held(weights=lowbit_optax.stochastic_rounding()),
        },
        lambda params: {x: "Kahan" if x in kahan else "stochastic" for x in params},
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def train(name: str, rate: float, params, batches):
    """Train once, and return the parameters."""
    tx = optimizer(name, optax.cosine_decay_schedule(rate, len(batches)))
    dtype = jnp.float32 if name == "float32" else jnp.bfloat16
    params = jax.tree.map(lambda x: x.astype(dtype), params)

    def body(carry, windows):
        params, state = carry
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        grads = jax.grad(next_byte.loss_fn)(wide, windows)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        updates, state = tx.update(grads, state, params)
        return (lowbit_optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(body, (params, tx.init(params)), batches)
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def weight_bytes(name: str) -> float:
    """Return the bytes per parameter of weights and compensations."""
    sizes = {path: x.size for path, x in next_byte.init(0).items()}
    total = sum(sizes.values())
    if name in ("float32", "nearest"):
        return 4.0 if name == "float32" else 2.0
    return 2 + 2 * sum(sizes[path] for path in RUNS[name]) / total


def measure(args) -> dict:
    found = next_byte.held_out_losses(RUNS, train, args)
    return {
        "held_out": records.spreads(found),
        "gaps_to_stochastic": records.gaps(found, "stochastic"),
        "weight_bytes": {name: weight_bytes(name) for name in RUNS},
    }


@pictures.panels(3.5)
def draw(record: dict, axes) -> str:
    label, sizes = "held-out loss, nats per byte", record["weight_bytes"]
    pictures.each_seed(axes, record["held_out"], label, sizes=sizes)
    gap = record["gaps_to_stochastic"]["nearest"]["mean"]
    return (
        f"Nearest rounding ends {gap:.2f} above stochastic rounding; Kahan summation "
        "ends within the spread of stochastic rounding"
    )


main = records.program(__name__, seeds=24, **next_byte.NUMBERS)
