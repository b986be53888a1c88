"""Least squares that the weights fit exactly, with rounded forward and backward passes.

Zamirai et al. 2020, theorem 2: if only the results of the passes are rounded to
nearest, and SGD has a rate a <= 1 / L, then

    E |w_t - w*|^2 <= exp(-a mu t (1 - 4 eps L / mu)) |w_0 - w*|^2.

Here w* fits all examples, mu is the smallest eigenvalue of the mean of x x^T, and L is
the largest |x|^2. The inputs have length 1, so L = 1, and w* is from [0, 100).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import records
from lowbit_optax.precision import FloatFormat

EXAMPLES, ORDERS, POINTS = 1000, 32, 20


class Problem(NamedTuple):
    """Inputs of length 1 [EXAMPLES, d], and the optimum [d]."""

    x: jax.Array
    optimum: jax.Array


def problem(key, dimensions: int) -> Problem:
    inputs, weights = jax.random.split(key)
    x = jax.random.normal(inputs, (EXAMPLES, dimensions))
    x /= jnp.linalg.norm(x, axis=1, keepdims=True)
    return Problem(x, jax.random.uniform(weights, (dimensions,), maxval=100.0))


def epsilon(bits: int) -> float:
    """Return the machine epsilon of numbers with ``bits - 9`` bits of mantissa."""
    return 2.0 ** -(bits - 8)


def steps_of(rate: float, dimensions: int) -> int:
    """Return the length of a run, in which exact SGD comes close to the optimum."""
    return round(POINTS * dimensions / rate)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def rounded_passes(bits: int, rate: float, dimensions: int, seed):
    """Train from zero with exact weights, and round activations and gradients.

    The state is e = w - w*, so that updates are exact however small they are. 32 bits
    round nothing.

    Returns:
      |e| / |e_0| at the end of each of ORDERS runs, and at POINTS steps the mean of
      |e|^2 over the runs, divided by the bound of theorem 2.
    """
    key, order = jax.random.split(jax.random.key(seed))
    x, optimum = problem(key, dimensions)
    q = FloatFormat(8, bits - 9).round

    def body(e, index):
        activations = q(jnp.sum(x[index] * e, 1))[:, None]
        return e - rate * q(activations * x[index]), None

    def part(e, indices):
        e, _ = jax.lax.scan(body, e, indices)
        return e, jnp.mean(jnp.sum(e**2, 1))

    every = steps_of(rate, dimensions) // POINTS
    indices = jax.random.randint(order, (POINTS, every, ORDERS), 0, EXAMPLES)
    e, squares = jax.lax.scan(part, jnp.tile(-optimum, (ORDERS, 1)), indices)
    mu = jnp.linalg.eigvalsh(x.T @ x / EXAMPLES)[0]
    t = every * jnp.arange(1, POINTS + 1)
    start = jnp.linalg.norm(optimum)
    bound = jnp.exp(-rate * t * (mu - 4 * epsilon(bits))) * start**2
    return jnp.linalg.norm(e, axis=1) / start, squares / bound


def of_passes(bits: int, rate: float, dimensions: int, seeds) -> dict:
    """Return the figures of theorem 2."""
    run = functools.partial(rounded_passes, bits, rate, dimensions)
    distance, ratios = jax.vmap(run)(seeds)
    return {"distance": records.spread(distance[:, 0]), "most": ratios.max()}
