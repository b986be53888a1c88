"""Elementwise operations for which kernels have shorter instructions.

The functions in this module are integer arithmetic for XLA. Each is an entry of
:data:`OPERATIONS`. A backend can have a rule for it, as for a primitive, with its own
instructions. The results must be equal bit for bit, except for the payloads of NaNs.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives as p

# From JAX 0.12 on, every jaxpr contains its constants, and the type has no separate
# name. The old name still exists, but is not exported for type checkers.
ClosedJaxpr = core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
"""The type of a jaxpr with its constants, in every version of JAX."""

PREFIX = "pallas_kernels_"
"""Prefix of the names of these operations in jaxprs."""

NAN = 0x7FC0
"""The bfloat16 pattern to which every NaN is rounded."""

LAST_NAN = 0x7FFF7FFF
"""The largest float32 pattern that is still a NaN after rounding to bfloat16."""

_FIRST_NAN = 0x7F808000
_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF


class Operation:
    """A jitted function for which backends may have rules.

    Args:
      function: elementwise function of arrays.
    """

    def __init__(self, function: Callable):
        functools.update_wrapper(self, function)
        named = functools.wraps(function)(lambda *args: function(*args))
        named.__name__ = named.__qualname__ = PREFIX + function.__name__
        self._jitted = jax.jit(named)
        OPERATIONS[named.__name__] = self

    def __call__(self, *args: jax.Array) -> jax.Array:
        return self._jitted(*args)


OPERATIONS: dict[str, Operation] = {}
"""All operations, by their names in jaxprs."""


def operation_of(eqn) -> Operation | core.Primitive:
    """Return the operation that an equation calls, or the equation's primitive."""
    if eqn.primitive is p.jit_p:
        return OPERATIONS.get(eqn.params["name"], p.jit_p)
    return eqn.primitive


@Operation
def round_to_bfloat16(x: jax.Array) -> jax.Array:
    """Round float32 to the nearest bfloat16, ties to even, with one pattern for NaNs.

    >>> round_to_bfloat16(jnp.float32(1 + 2**-8))
    Array(1, dtype=bfloat16)
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    # Done before the sum. Later, kernels with long blocks would need more registers.
    bits = jnp.where(jnp.isnan(x), jnp.uint32(NAN << 16), bits)
    odd = bits >> jnp.uint32(16) & jnp.uint32(1)
    bits = bits + jnp.uint32(0x7FFF) + odd >> jnp.uint32(16)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


@Operation
def unless_rounded(x: jax.Array, rounded: jax.Array) -> jax.Array:
    """Return float32 ``x`` if it rounds to ``rounded``, and ``rounded`` otherwise.

    >>> unless_rounded(jnp.float32(1 + 2**-8), jnp.bfloat16(1))
    Array(1.0039062, dtype=float32)
    """
    same = _bits(round_to_bfloat16(x)) == _bits(rounded)
    wide = lax.bitcast_convert_type(_bits(rounded) << jnp.uint32(16), jnp.float32)
    return jnp.where(same, x, wide)


@Operation
def keep_nan(x: jax.Array) -> jax.Array:
    """Return the float32's pattern; NaNs are moved so that adding 0x8000 keeps them.

    The upper 16 bits of such a pattern are a NaN in bfloat16. Together with the lower
    16 bits as a signed difference, they are a NaN again.

    >>> hex(keep_nan(jnp.float32(jnp.nan)))
    '0x7fc00000'
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = bits & jnp.uint32(_MAGNITUDE)
    kept = jnp.clip(magnitude, jnp.uint32(_FIRST_NAN), jnp.uint32(LAST_NAN))
    magnitude = jnp.where(magnitude > jnp.uint32(_INFINITY), kept, magnitude)
    return bits & jnp.uint32(~_MAGNITUDE & 0xFFFFFFFF) | magnitude


@Operation
def pattern_with_one_nan(x: jax.Array) -> jax.Array:
    """Return the float32's pattern as uint32; every NaN has the pattern 0x7FC00000.

    >>> hex(pattern_with_one_nan(-jnp.float32(jnp.nan)))
    '0x7fc00000'
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(jnp.isnan(x), jnp.uint32(NAN << 16), bits)


@Operation
def ordered_pattern(x: jax.Array) -> jax.Array:
    """Return the float32's pattern as int32; NaNs are above infinity.

    >>> hex(ordered_pattern(-jnp.float32(jnp.nan)))
    '0x7fc00000'
    """
    pattern = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(jnp.isnan(x), jnp.int32(NAN << 16), pattern)


@Operation
def pattern_above(x: jax.Array, base: jax.Array, most: jax.Array) -> jax.Array:
    """Return how far the float32's pattern is above ``base``, as int32.

    The result is clipped to the range from 0 to ``most``. A NaN gives ``most``.

    Args:
      x: float32 array.
      base: int32 pattern of 0 or of a normal number.
      most: int32, at most the distance from ``base`` to the pattern of infinity.

    >>> one = jnp.int32(0x3F800000)
    >>> pattern_above(jnp.float32([0.5, 1, jnp.nan]), one, jnp.int32(9))
    Array([0, 0, 9], dtype=int32)
    """
    above = jnp.maximum(ordered_pattern(x), base) - base
    return jnp.minimum(above, most)


@Operation
def smaller(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the smaller of two nonnegative float32 numbers that are not NaN.

    >>> smaller(jnp.float32(2), jnp.float32(1))
    Array(1., dtype=float32)
    """
    return jnp.minimum(x, y)


@Operation
def power_of_five(n: jax.Array) -> jax.Array:
    """Return ``5^((n & 7) - 1)`` as float32, and 0 if ``n & 7`` is 0.

    Args:
      n: uint32 below 256, a multiple of 128 plus 0 to 7.

    >>> power_of_five(jnp.uint32([128, 129, 130, 135])).tolist()
    [0.0, 1.0, 5.0, 15625.0]
    """
    digits = [n >> jnp.uint32(i) & jnp.uint32(1) for i in range(3)]
    power = jnp.where(digits[0] > 0, jnp.float32(1), jnp.float32(1 / 5))
    for digit, factor in zip(digits[1:], (25, 625), strict=True):
        power = jnp.where(digit > 0, power * jnp.float32(factor), power)
    return jnp.where(n & jnp.uint32(7) == 0, jnp.float32(0), power)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
