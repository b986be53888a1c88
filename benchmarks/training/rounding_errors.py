"""Training with rounding errors that are lost, stored, or added to the momentum.

    .venv/bin/python -m benchmarks rounding_errors

A linear function of 64 inputs and 64 outputs learns noisy targets with Adam, at a
constant learning rate. All rows start from the same weights and use the same batches.
Except in the first row, moments have 8 bits. The excess loss, the loss minus its
minimum, is divided by the excess loss with float32 weights.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks import records
from lowbit_optax import extra_bits, stochastic_rounding

FED = stochastic_rounding(error_feedback="mu")
BFLOAT16, FLOAT8 = jnp.bfloat16, jnp.float8_e4m3fn
RATES = (1e-3, 1e-4, 1e-5)
ROWS = {
    "float32": (None, jnp.float32, "float32"),
    "bfloat16, stochastic": (stochastic_rounding(), BFLOAT16, None),
    "bfloat16, error into mu": (FED, BFLOAT16, None),
    "bfloat16, 8 extra bits": (extra_bits(8), BFLOAT16, None),
    "float8, stochastic": (stochastic_rounding(), FLOAT8, None),
    "float8, error into mu": (FED, FLOAT8, None),
    "float8, 8 extra bits": (extra_bits(8), FLOAT8, None),
    "mxfp8, stochastic": (stochastic_rounding(), "mxfp8", None),
    "mxfp8, 8 extra bits": (extra_bits(8), "mxfp8", None),
}


@functools.cache
def adam(name: str, rate: float):
    """Return the optimizer of a row, cached so that all seeds share a program."""
    weights, _, moments = ROWS[name]
    return lowbit_optax.lowbit(optax.adam(rate), weights=weights, moments=moments)


def excess(name: str, rate: float, seed: int, steps: int) -> float:
    """Return the mean excess loss of the linear function over the last 30 steps."""
    dtype, tx = ROWS[name][1], adam(name, rate)
    random = np.random.default_rng(seed)
    normal = lambda *shape: random.standard_normal(shape).astype(np.float32)
    x, w = normal(1024, 64), normal(64, 64)
    y = x @ w + normal(1024, 64)
    first = jnp.asarray(w + 0.3 * rate * steps * normal(64, 64))
    best = np.linalg.lstsq(x, y, rcond=None)[0]
    chosen = random.integers(0, 1024, (steps, 128))
    if dtype == "mxfp8":
        dtype = jax.eval_shape(lowbit_optax.block_scaling.block_scale, first)
    begun = lowbit_optax.from_master(tx, first, dtype)
    return float(_excess(tx, begun, *map(jnp.asarray, (x, y, best, chosen))))


@functools.partial(jax.jit, static_argnums=0)
def _excess(tx, begun, x, y, best, chosen):
    def step(carry, rows):
        params, state = carry
        wide = lowbit_optax.lpmm.dequantize(params).astype(jnp.float32)
        grads = x[rows].T @ (x[rows] @ wide - y[rows]) / len(rows)
        above = jnp.mean((x @ (wide - best)) ** 2)
        return lowbit_optax.step(tx, params, state, grads), above

    return jax.lax.scan(step, begun, chosen)[1][-30:].mean()


def linear(args) -> dict:
    """Return excess losses relative to float32, keyed by row and learning rate."""
    found = {
        rate: {
            name: [excess(name, rate, seed, args.steps) for seed in range(args.seeds)]
            for name in ROWS
        }
        for rate in RATES
    }
    return {
        name: {
            str(rate): records.spread(np.divide(each[name], each["float32"]))
            for rate, each in found.items()
        }
        for name in ROWS
    }


def measure(args) -> dict:
    return {"linear": linear(args)}


main = records.program(__name__, seeds=8, steps=600)
