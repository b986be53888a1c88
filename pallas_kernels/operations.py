"""Elementwise operations that kernels can compute with fewer instructions.

For XLA, the functions in this module are ordinary arithmetic. Each function is an entry
of :data:`OPERATIONS`. As for a primitive, a kernel backend can define a rule for it
that uses the backend's own instructions. The rule must return the same results bit for
bit, except for the payloads of NaNs and the rounding of :func:`multiply_add`.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives as p

# In JAX 0.12 and newer, every jaxpr contains its constants, so this type is not needed.
# Its name still exists, but is not exported for type checkers.
ClosedJaxpr = core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
"""The type of a jaxpr with its constants, in every version of JAX."""

NAN = 0x7FC0
"""The bit pattern of the bfloat16 to which every NaN is rounded."""

LAST_NAN = 0x7FFF7FFF
"""The largest float32 bit pattern that is still a NaN after rounding to bfloat16."""

_PREFIX = "pallas_kernels_"  # of the names of operations in jaxprs
_FIRST_NAN = 0x7F808000
_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF


OPERATIONS: dict[str, Callable] = {}
"""All operations, keyed by their names in jaxprs."""


def operation(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Jit an elementwise function, for which kernel backends may define rules."""
    name = _PREFIX + function.__name__
    function.__name__ = function.__qualname__ = name
    OPERATIONS[name] = jax.jit(function)
    return OPERATIONS[name]


def operation_of(eqn) -> Callable | core.Primitive:
    """Return the operation that an equation calls, or the equation's primitive."""
    if eqn.primitive is p.jit_p:
        return OPERATIONS.get(eqn.params["name"], p.jit_p)
    return eqn.primitive


class Values:
    """The values of a jaxpr's variables while its equations are evaluated."""

    def __init__(self, closed: ClosedJaxpr, args: Sequence):
        jaxpr = closed.jaxpr
        self._known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self.set(jaxpr.invars, args)

    def set(self, variables: Sequence, values: Sequence) -> None:
        """Set the values of variables, such as the results of an equation."""
        self._known |= zip(variables, values, strict=True)

    def of(self, atoms: Sequence) -> list:
        """Return the values of variables and literals."""
        return [x.val if isinstance(x, core.Literal) else self._known[x] for x in atoms]


@operation
def multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """Return ``a * b + c`` of float32 arrays, rounded once or twice.

    >>> multiply_add(jnp.float32(2), jnp.float32(3), jnp.float32(1))
    Array(7., dtype=float32)
    """
    return a * b + c


@operation
def round_to_bfloat16(x: jax.Array) -> jax.Array:
    """Round float32 to the nearest bfloat16, ties to even, and NaNs to one bit pattern.

    >>> round_to_bfloat16(jnp.float32(1 + 2**-8))
    Array(1, dtype=bfloat16)
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    # If NaNs were replaced later, kernels with long blocks would need more registers.
    bits = jnp.where(jnp.isnan(x), jnp.uint32(NAN << 16), bits)
    odd = bits >> jnp.uint32(16) & jnp.uint32(1)
    bits = bits + jnp.uint32(0x7FFF) + odd >> jnp.uint32(16)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


@operation
def unless_rounded(x: jax.Array, rounded: jax.Array) -> jax.Array:
    """Return float32 ``x`` if it rounds to ``rounded``, and ``rounded`` otherwise.

    >>> unless_rounded(jnp.float32(1 + 2**-8), jnp.bfloat16(1))
    Array(1.0039062, dtype=float32)
    """
    same = _bits(round_to_bfloat16(x)) == _bits(rounded)
    wide = lax.bitcast_convert_type(_bits(rounded) << jnp.uint32(16), jnp.float32)
    return jnp.where(same, x, wide)


@operation
def differing(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return 1 where two arrays with elements of 16 bits differ in any bit, else 0.

    >>> differing(jnp.bfloat16([0, 0, 1]), jnp.bfloat16([0, -0.0, 1]))
    Array([0, 1, 0], dtype=uint32)
    """
    return jnp.minimum(_bits(old) ^ _bits(new), jnp.uint32(1))


@operation
def keep_nan(x: jax.Array) -> jax.Array:
    """Return the bit pattern of a float32. NaNs are changed to survive adding 0x8000.

    The upper 16 bits of the sum are then a NaN in bfloat16. Adding the lower 16 bits of
    the pattern to that NaN, as a signed difference, gives a float32 NaN again.

    >>> hex(keep_nan(jnp.float32(jnp.nan)))
    '0x7fc00000'
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = bits & jnp.uint32(_MAGNITUDE)
    kept = jnp.clip(magnitude, jnp.uint32(_FIRST_NAN), jnp.uint32(LAST_NAN))
    magnitude = jnp.where(magnitude > jnp.uint32(_INFINITY), kept, magnitude)
    return bits & jnp.uint32(~_MAGNITUDE & 0xFFFFFFFF) | magnitude


@operation
def pattern_with_one_nan(x: jax.Array) -> jax.Array:
    """Return the bit pattern of a float32 as uint32, which is 0x7FC00000 for every NaN.

    >>> hex(pattern_with_one_nan(-jnp.float32(jnp.nan)))
    '0x7fc00000'
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(jnp.isnan(x), jnp.uint32(NAN << 16), bits)


@operation
def ordered_pattern(x: jax.Array) -> jax.Array:
    """Return the bit pattern of a float32 as int32, with all NaNs above infinity.

    >>> hex(ordered_pattern(-jnp.float32(jnp.nan)))
    '0x7fc00000'
    """
    pattern = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(jnp.isnan(x), jnp.int32(NAN << 16), pattern)


@operation
def pattern_above(x: jax.Array, base: jax.Array, most: jax.Array) -> jax.Array:
    """Return how far the bit pattern of a float32 exceeds ``base``, as int32.

    The result is clipped to the range from 0 to ``most``. A NaN gives ``most``.

    Args:
      x: float32 array.
      base: int32 bit pattern of 0 or of a normal number.
      most: int32 limit, no larger than the bit pattern of infinity minus ``base``.

    >>> one = jnp.int32(0x3F800000)
    >>> pattern_above(jnp.float32([0.5, 1, jnp.nan]), one, jnp.int32(9))
    Array([0, 0, 9], dtype=int32)
    """
    above = jnp.maximum(ordered_pattern(x), base) - base
    return jnp.minimum(above, most)


@operation
def smaller(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the smaller of two nonnegative float32 numbers that are not NaN.

    >>> smaller(jnp.float32(2), jnp.float32(1))
    Array(1., dtype=float32)
    """
    return jnp.minimum(x, y)


@operation
def power_of_five(n: jax.Array) -> jax.Array:
    """Return ``5^((n & 7) - 1)`` as float32, and 0 if ``n & 7`` is 0.

    Args:
      n: uint32 from 0 to 7 or from 128 to 135.

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
