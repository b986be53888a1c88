"""A quadratic function, and LPMM's Algorithm 1 with fixed steps of the quantizers.

f is the mean of one function per example. Its second derivatives are at most L = 1, and
the gradient of one example has the same variance everywhere. The steps are fixed, as in
equation 6, while the optimizers of this package choose the step of each block.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

DIMENSIONS, EXAMPLES, SPREAD = 16, 1000, 0.2
CURVES = np.geomspace(1, 0.25, DIMENSIONS)
"""The second derivatives of f; the largest one is L."""
STATE_BITS, RANGE = 8, 4.0
"""The bits of momentum and accumulators; the range of parameters and gradients."""


class Case(NamedTuple):
    """A run: bits of the parameters, microbatches, momentum b, and rate a."""

    bits: int
    n: int
    momentum: float
    rate: float

    def steps(self) -> tuple[float, float, float]:
        """Return the steps of the parameters, the momentum, and the accumulators."""
        of_sum = RANGE * self.n * 2.0 ** (1 - STATE_BITS)
        of_params = RANGE * 2.0 ** (1 - self.bits)
        return of_params, of_sum / (1 - self.momentum), of_sum


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def train(n: int, rounding: str, updates: int, momenta, rates, steps, key):
    """Run Algorithm 1 from zero; each run has a row of ``momenta``, rates and steps.

    Returns:
      f - f* of the mean of the iterates, the mean of f - f* over the iterates, and the
      largest magnitudes of the parameters, the momentum and the accumulators.
    """
    params_step, momentum_step, sum_step = steps

    def body(carry, key):
        theta, m, total, mean, largest = carry
        total, mean = total + theta / updates, mean + excess(theta) / updates
        own, *draws = jax.random.split(key, 3)
        draws = draws if rounding == "stochastic" else (None, None)
        g = accumulated(theta, sum_step, n, rounding, own)
        m = quantized(momenta * m + g, momentum_step, draws[0])
        theta = quantized(theta - rates * m, params_step, draws[1])
        now = jnp.stack([jnp.abs(x).max(1) for x in (theta, m, g)])
        return (theta, m, total, mean, jnp.maximum(largest, now)), None

    zeros = jnp.zeros((len(rates), DIMENSIONS))
    carry = zeros, zeros, zeros, zeros[:, 0], jnp.zeros((3, len(rates)))
    keys = jax.random.split(key, updates)
    (_, _, total, mean, largest), _ = jax.lax.scan(body, carry, keys)
    return excess(total), mean, largest


def examples() -> np.ndarray:
    """Return the minima of the functions of the examples; their mean is theta*."""
    random = np.random.default_rng(0)
    optimum = random.choice([-1.0, 1.0], DIMENSIONS)
    spread = random.uniform(-1, 1, (EXAMPLES, DIMENSIONS)) * SPREAD
    return (optimum + spread - spread.mean(0)).astype(np.float32)


def excess(theta):
    """Return f - f*, half the sum of squares weighted by CURVES."""
    return jnp.sum(CURVES * (theta - examples().mean(0)) ** 2, -1) / 2


def variance() -> float:
    """Return s^2, the variance of the gradient of one example."""
    minima = examples()
    return float(np.sum((CURVES * (minima - minima.mean(0))) ** 2, 1).mean())


def quantized(x, step, key):
    """Round to multiples of a step: to nearest if ``key`` is None, else randomly."""
    offset = 0.5 if key is None else jax.random.uniform(key, x.shape)
    return step * jnp.floor(x / step + offset)


def accumulated(theta, step, n: int, rounding: str, key):
    """Return the quantized sum of ``n`` gradients of random examples.

    Args:
      theta: the parameters of several runs [runs, DIMENSIONS].
      step: the step of the accumulators.
      n: the number of microbatches, each of one example.
      rounding: "stochastic" or "nearest".
      key: a random key.
    """
    minima, curves = jnp.asarray(examples()), jnp.float32(CURVES)

    def body(total, key):
        which, draw = jax.random.split(key)
        chosen = minima[jax.random.randint(which, theta.shape[:1], 0, EXAMPLES)]
        total = total + curves * (theta - chosen)
        return quantized(total, step, draw if rounding == "stochastic" else None), None

    return jax.lax.scan(body, jnp.zeros_like(theta), jax.random.split(key, n))[0]
