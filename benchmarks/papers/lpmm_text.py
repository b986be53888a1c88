"""LPMM's Adam on a small encoder of text, by bits of the weights.

    .venv/bin/python -m benchmarks lpmm_text

LPMM, table 4: RoBERTa-Large on GLUE, trained with Adam, 8-bit moments, and weights
of 12, 10 or 8 bits. In this benchmark, a small transformer encoder distinguishes
modules of Python's standard library. Weights are rounded stochastically or to nearest.
"""

import functools

import jax
import optax

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.papers import small_text_models as models
from lowbit_optax import lpmm

BITS = (12, 10, 8)
ROUNDINGS = ("stochastic", "nearest")
RUNS = {"float32": None} | {
    f"{bits} bits, {rounding}": (bits, rounding)
    for rounding in ROUNDINGS
    for bits in BITS
}
TASK = models.ENCODER


@functools.partial(jax.jit, static_argnums=(0, 1))
def train(rate: float, name: str, params, rows):
    """Train once, and return float32 parameters."""
    schedule = optax.linear_schedule(rate, 0.0, len(rows.labels))
    if RUNS[name] is None:
        tx = optax.adam(schedule)
    else:
        bits, rounding = RUNS[name]
        tx = lowbit_optax.lpmm_adam(schedule, rounding=rounding, min_size=0)
        params = lowbit_optax.lpmm.quantize_params(params, bits=bits, min_size=0)
    differentiate = lpmm.value_and_grad(TASK.loss)

    def body(carry, batch):
        params, state = carry
        _, grads = differentiate(params, batch)
        return lowbit_optax.step(tx, params, state, grads), None

    (params, _), _ = jax.lax.scan(body, (params, tx.init(params)), rows)
    return lowbit_optax.lpmm.dequantize(params)


def measure(args) -> dict:
    run = functools.partial(train, args.learning_rate)
    spreads, gaps = records.compared(TASK.ends(run, RUNS, args), "float32")
    return {**spreads, "gaps_to_float32": gaps}


@pictures.panels(3.6)
def draw(record: dict, axes) -> str:
    full = lambda name: name if name == "float32" else f"LPMM, {name}"
    found = {full(name): each for name, each in record["loss"].items()}
    pictures.each_seed(axes, found, "held-out loss, nats")
    return (
        "LPMM with stochastic rounding trains a text encoder like float32 down to 8 "
        "bits; with nearest rounding, it does not"
    )


main = records.program(__name__, **models.NUMBERS, learning_rate=2e-3)
