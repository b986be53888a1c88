"""Quotients and roots of float32 in few instructions of a TPU.

Mosaic's own handle zeros, infinities and NaNs case by case. These give the same numbers
with two exceptions: a quotient by 2^126 or more is zero, and the root of a subnormal
number is zero or subnormal.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# Of Pallas itself with JAX 0.10.
reciprocal = getattr(pltpu, "reciprocal", None) or pl.reciprocal

# Of one over the root of a positive float32 that is normal, and beyond.
_MIN_INVERSE, _MAX_INVERSE = 2.0**-65, 2.0**64


def quotient(x: jax.Array, y: jax.Array, inverse: jax.Array) -> jax.Array:
    """``x / y`` by one step of Newton's for ``1 / y``, as Mosaic has it for a v5e.

    Args:
      x, y: float32.
      inverse: of ``y``, approximately.

    >>> numbers = jnp.float32([3, 0, jnp.inf]), jnp.float32([0.333, jnp.inf, 0])
    >>> quotient(jnp.float32(3), *numbers).round(3).tolist()
    [1.0, inf, 0.0]
    """
    unity = y * inverse
    better = inverse + inverse * (jnp.float32(1) - unity)
    # NaN where one of the two is zero and the other infinite: there is nothing better.
    return x * jnp.where(unity == unity, better, inverse)


def root(x: jax.Array) -> jax.Array:
    """The square root as ``x`` times one over it, limited so that no product is NaN.

    >>> [float(root(jnp.float32(x))) for x in (0, 4, jnp.inf)]
    [0.0, 2.0, inf]
    """
    inverse = lax.rsqrt(x)
    inverse = jnp.minimum(inverse, jnp.float32(_MAX_INVERSE))
    return x * jnp.maximum(inverse, jnp.float32(_MIN_INVERSE))
