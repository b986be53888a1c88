"""Elementwise operations for which kernels have shorter instructions.

Here they are integer arithmetic, for XLA. Each is an entry of :data:`OPERATIONS`, for
which a backend can have a rule, as it can for a primitive: instructions of its own,
which give the same numbers, bit for bit but for the payloads of NaNs.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives as p

# From JAX 0.12 on every jaxpr holds its constants, and the type has no name of its own
# any more. The old name is still there, but type checkers are told that it is not
# exported.
ClosedJaxpr = core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
"""The type of a jaxpr that holds its constants, in every version of JAX."""

PREFIX = "pallas_kernels_"
"""How the names of these operations begin."""

NAN = 0x7FC0
"""The pattern of every NaN that is rounded to bfloat16."""

LAST_NAN = 0x7FFF7FFF
"""The largest float32 pattern that bfloat16's rounding to nearest leaves a NaN."""

_FIRST_NAN = 0x7F808000
_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF


class Operation:
    """A jitted function that backends may have rules for.

    Args:
      function: of arrays, elementwise.
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
"""All operations, by the names that their calls have in jaxprs."""


def operation_of(eqn) -> Operation | core.Primitive:
    """What an equation of a jaxpr applies: an operation, or else its primitive."""
    if eqn.primitive is p.jit_p:
        return OPERATIONS.get(eqn.params["name"], p.jit_p)
    return eqn.primitive


@Operation
def round_to_bfloat16(x: jax.Array) -> jax.Array:
    """float32 rounded to bfloat16, to nearest even; every NaN becomes one.

    >>> round_to_bfloat16(jnp.float32(1 + 2**-8))
    Array(1, dtype=bfloat16)
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    # Before the sum: after it, a kernel of long blocks would need more registers.
    bits = jnp.where(jnp.isnan(x), jnp.uint32(NAN << 16), bits)
    odd = bits >> jnp.uint32(16) & jnp.uint32(1)
    bits = bits + jnp.uint32(0x7FFF) + odd >> jnp.uint32(16)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


@Operation
def unless_rounded(x: jax.Array, rounded: jax.Array) -> jax.Array:
    """float32 ``x`` where it rounds to this bfloat16, elsewhere the latter.

    >>> unless_rounded(jnp.float32(1 + 2**-8), jnp.bfloat16(1))
    Array(1.0039062, dtype=float32)
    """
    same = _bits(round_to_bfloat16(x)) == _bits(rounded)
    wide = lax.bitcast_convert_type(_bits(rounded) << jnp.uint32(16), jnp.float32)
    return jnp.where(same, x, wide)


@Operation
def keep_nan(x: jax.Array) -> jax.Array:
    """The float32's pattern; a NaN's is moved to where adding 0x8000 leaves it a NaN.

    Its leading 16 bits are then a NaN's of bfloat16, and with the 16 others as a signed
    difference it is a NaN again.

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
    """The float32's pattern, as uint32; that of every NaN is 0x7FC00000.

    >>> hex(pattern_with_one_nan(-jnp.float32(jnp.nan)))
    '0x7fc00000'
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(jnp.isnan(x), jnp.uint32(NAN << 16), bits)


@Operation
def ordered_pattern(x: jax.Array) -> jax.Array:
    """The float32's pattern as int32; every NaN's is above infinity's.

    >>> hex(ordered_pattern(-jnp.float32(jnp.nan)))
    '0x7fc00000'
    """
    pattern = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(jnp.isnan(x), jnp.int32(NAN << 16), pattern)


@Operation
def pattern_above(x: jax.Array, base: jax.Array, most: jax.Array) -> jax.Array:
    """How far the float32's pattern is above another, from 0 to ``most``, as int32.

    NaN's is ``most``.

    Args:
      x: float32.
      base: int32, the pattern of 0 or of a normal number.
      most: int32; no more above the base than infinity's pattern is.

    >>> one = jnp.int32(0x3F800000)
    >>> pattern_above(jnp.float32([0.5, 1, jnp.nan]), one, jnp.int32(9))
    Array([0, 0, 9], dtype=int32)
    """
    above = jnp.maximum(ordered_pattern(x), base) - base
    return jnp.minimum(above, most)


@Operation
def smaller(x: jax.Array, y: jax.Array) -> jax.Array:
    """The smaller of two float32 numbers that are not negative; neither is a NaN.

    >>> smaller(jnp.float32(2), jnp.float32(1))
    Array(1., dtype=float32)
    """
    return jnp.minimum(x, y)


@Operation
def power_of_five(n: jax.Array) -> jax.Array:
    """``5^(n - 1)`` as float32, and 0 for n = 0; of n, uint32, the last 3 bits count.

    Args:
      n: 0 to 7 more than a multiple of 128, and less than 256.

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
