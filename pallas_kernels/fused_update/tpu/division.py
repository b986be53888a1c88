"""Compute quotients and square roots of float32 with few TPU instructions.

Mosaic treats zeros, infinities and NaNs as separate cases. The functions in this module
return the same results with two exceptions: a quotient by 2^126 or more is zero, and
the root of a subnormal number is zero or subnormal.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# In JAX 0.10, Pallas itself defines it.
reciprocal = getattr(pltpu, "reciprocal", None) or pl.reciprocal

# Bounds of rsqrt for normal float32 numbers, rounded outwards.
_MIN_INVERSE, _MAX_INVERSE = 2.0**-65, 2.0**64


def quotient(x: jax.Array, y: jax.Array, inverse: jax.Array) -> jax.Array:
    """Return ``x / y`` with one Newton step for ``1 / y``, as Mosaic does on a v5e.

    Args:
      x, y: float32 arrays.
      inverse: approximation of ``1 / y``.

    >>> numbers = jnp.float32([3, 0, jnp.inf]), jnp.float32([0.333, jnp.inf, 0])
    >>> quotient(jnp.float32(3), *numbers).round(3).tolist()
    [1.0, inf, 0.0]
    """
    unity = y * inverse
    better = inverse + inverse * (jnp.float32(1) - unity)
    # If unity is NaN, y is zero or infinite, and the given inverse is exact.
    return x * jnp.where(unity == unity, better, inverse)


def root(x: jax.Array) -> jax.Array:
    """Return the square root as ``x * rsqrt(x)``, with bounds that prevent NaNs.

    >>> [float(root(jnp.float32(x))) for x in (0, 4, jnp.inf)]
    [0.0, 2.0, inf]
    """
    inverse = lax.rsqrt(x)
    inverse = jnp.minimum(inverse, jnp.float32(_MAX_INVERSE))
    return x * jnp.maximum(inverse, jnp.float32(_MIN_INVERSE))
