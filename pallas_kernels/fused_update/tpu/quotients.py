"""Roots and quotients in fewer instructions, which depend on the generation of TPUs.

Mosaic's handle zeros, infinities and NaNs case by case. These give the same numbers but
for two: a quotient by 2^126 is zero, as it is by all that is larger; and the root of a
subnormal number is zero or subnormal.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import primitives as p

# Of Pallas itself with JAX 0.10.
_reciprocal = getattr(pltpu, "reciprocal", None) or pl.reciprocal

# Of one over the root of a positive float32 that is normal, and beyond.
_LEAST_INVERSE, _MOST_INVERSE = 2.0**-65, 2.0**64


def generation_of_target() -> int | None:
    """The generation of the TPUs that are compiled for; None if it is not known."""
    try:
        return pltpu.get_tpu_info().generation
    except ValueError:
        return None


def rules_of(generation: int | None) -> Mapping:
    """From primitives to functions of their equations and arrays.

    Args:
      generation: None has no rules.
    """
    if generation is None:
        return {}
    # From v6e on, one over a number and over its root are one instruction each.
    return {p.div_p: _div} if generation <= 5 else {p.sqrt_p: _sqrt}


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
    inverse = jnp.minimum(inverse, jnp.float32(_MOST_INVERSE))
    return x * jnp.maximum(inverse, jnp.float32(_LEAST_INVERSE))


def _div(eqn, x, y):
    if not _is_array(eqn):
        return NotImplemented
    y = jnp.broadcast_to(y, eqn.outvars[0].aval.shape)
    return quotient(x, y, _reciprocal(y, approx=True))


def _sqrt(eqn, x):
    return root(x) if _is_array(eqn) else NotImplemented


def _is_array(eqn) -> bool:
    aval = eqn.outvars[0].aval
    return bool(aval.shape) and aval.dtype == jnp.float32
