"""Codes: a float32 value as a k-bit field, relative to the scale of its group.

A code is four elementwise functions, on arrays of any one shape, so that arrays on the
XLA path and rows in a kernel run the same operations (sums, products, shifts, integer
minima and maxima; only ``Sqrt`` takes a root and only ``Dynamic`` divides)::

    magnitude_key(x) --> maximum of the group --> largest --> scale_of --> scale (bfloat16)
    prepare(scale) --> (unit, 1 / unit)                    once a group
    encode_fields(x, prepared, words) --> field
    decode_fields(field, prepared) --> x'

``unit`` is ``scale * 2^-q``, exactly. In units, the fields of a code stand for fixed
numbers (``Linear``: integers), of which the largest is ``largest_value``; the scale is the
smallest that a bfloat16 (or a power of two) can be with ``largest_value * unit >= largest``.

**Rounding.** With ``a <= x <= b`` the neighbours of x, the result is b with probability
``(x - a) / (b - a)`` rounded to a multiple of 2^-12, however x lies between them: the
mean is x to 2^-13 of the step. With ``words`` None it is the nearest.

**Zero** is a field of its own: it decodes to 0, and nothing random happens to it. In
the unsigned codes, which are for second moments, no positive number rounds to zero,
because what is divided by its root would grow without bound: it becomes the smallest
code.

**Not finite.** Infinities and NaN do not enter the scale, so their neighbours keep
theirs. The unsigned codes have one field for them, which decodes to infinity: as in
float32, a second moment that has overflowed stays infinite, and its parameter stays
where it is. The signed codes store the largest value of the group: the moment recovers.
Negative numbers in an unsigned code become its smallest.
"""

import dataclasses
import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

RANDOM_BITS = 12
"""Leading bits of a random word that rounding reads."""

# A quotient that is a scale exactly may come out this much larger by its own rounding.
# Were it rounded up to the next scale, a constant moment's scale would creep upwards.
_TOLERANCE = 4  # units in the last place
_LARGEST_BFLOAT16 = 0x7F7F0000
_ONE_EXPONENT = 1 << 23  # of a float32's pattern

Scale = typing.Literal["bfloat16", "power_of_two"]
Prepared = tuple[jax.Array, jax.Array]
MultiplyAdd = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """``a * b + c``. A kernel gives codes its own, which is one instruction."""
    return a * b + c


@dataclasses.dataclass(frozen=True)
class Code:
    """What all codes share. Subclasses define the fields' values.

    Args:
      bits: k, of a field.
      signed: whether negative values have fields.
      scale: ``"bfloat16"`` or ``"power_of_two"``.
    """

    bits: int
    signed: bool
    scale: Scale = "bfloat16"

    @property
    def largest_value(self) -> float:
        """The largest number that a field stands for, in units."""
        raise NotImplementedError

    @property
    def smallest_value(self) -> float:
        """The smallest positive number that a field stands for, in units."""
        return 1.0

    @property
    def largest_field(self) -> int:
        """The field that stands for ``largest_value``; in signed codes, without its sign."""
        return 2 ** (self.bits - 1) - 1 if self.signed else 2**self.bits - 2

    @property
    def infinity_field(self) -> int:
        """The unsigned codes' field for what is not finite."""
        return self.largest_field + 1

    @property
    def _exponent(self) -> int:
        return math.ceil(math.log2(self.largest_value))

    def magnitude_key(self, x: jax.Array) -> jax.Array:
        """int32, in the order of finite magnitudes, and of those not below 0.

        The sum makes patterns of infinity and NaN negative, which takes fewer
        instructions than asking for them. Negative numbers in an unsigned code come
        before all others.
        """
        pattern = bits_of(x)
        if self.signed:
            pattern = pattern & jnp.int32(0x7FFFFFFF)
        return pattern + jnp.int32(_ONE_EXPONENT)

    def magnitude_of(self, key: jax.Array) -> jax.Array:
        """The magnitude of a group, float32, from its largest statistic or 0."""
        return float_of(jnp.maximum(key - jnp.int32(_ONE_EXPONENT), jnp.int32(0)))

    def scale_of(self, maximum: jax.Array) -> jax.Array:
        """The scale of groups, bfloat16, rounded up; 0 for groups of zeros."""
        factor = np.float32(2.0**self._exponent / self.largest_value)
        pattern = lax.bitcast_convert_type(maximum * factor, jnp.uint32)
        dropped = 16 if self.scale == "bfloat16" else 23
        pattern = pattern + jnp.uint32((1 << dropped) - 1 - _TOLERANCE)
        largest = _LARGEST_BFLOAT16 >> dropped << dropped
        pattern = pattern >> jnp.uint32(dropped) << jnp.uint32(dropped)
        pattern = jnp.minimum(pattern, jnp.uint32(largest))
        return lax.bitcast_convert_type(
            (pattern >> jnp.uint32(16)).astype(jnp.uint16), jnp.bfloat16
        )

    def prepare(self, scale: jax.Array) -> Prepared:
        """What encode and decode take in the scale's place.

        Args:
          scale: float32, of any shape.

        Returns:
          ``(unit, 1 / unit)``.
        """
        # No smaller, for the smallest code would be subnormal, which XLA takes for 0.
        least = 2.0 ** (-126 + self._exponent) / min(self.smallest_value, 1.0)
        scale = jnp.maximum(scale, jnp.float32(least))
        unit = scale * jnp.float32(2.0**-self._exponent)
        if self.scale == "power_of_two":
            # 2^-e has exponent field 127 - e: exact, and no division.
            pattern = lax.bitcast_convert_type(unit, jnp.uint32)
            inverse = jnp.uint32(0x7F000000) - pattern
            return unit, lax.bitcast_convert_type(inverse, jnp.float32)
        return unit, jnp.float32(1) / unit

    def encode_fields(
        self,
        x: jax.Array,
        prepared: Prepared,
        words: jax.Array | None,
        multiply_add: MultiplyAdd = multiply_add,
    ) -> jax.Array:
        """uint32 fields of ``bits`` bits.

        Args:
          x: float32.
          prepared: of its groups' scales, of x's shape or broadcasting to it.
          words: uint32, of which the leading :data:`RANDOM_BITS` are random and the
            others are not read; None to round to nearest.
          multiply_add: of three arrays.
        """
        raise NotImplementedError

    def decode_fields(
        self,
        fields: jax.Array,
        prepared: Prepared,
        multiply_add: MultiplyAdd = multiply_add,
    ) -> jax.Array:
        """The float32 values of uint32 fields."""
        raise NotImplementedError


def bits_of(x: jax.Array) -> jax.Array:
    """Patterns of float32, as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def float_of(pattern: jax.Array) -> jax.Array:
    """The float32 of 32-bit patterns."""
    return lax.bitcast_convert_type(pattern, jnp.float32)


def pattern_of(x: float) -> int:
    """A number's float32 pattern, as a Python int."""
    return int(np.float32(x).view(np.int32))


def one_unless_zero(x: jax.Array) -> jax.Array:
    """1 for a number that is not 0, else 0; by its pattern, so without a selection."""
    pattern = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(jnp.minimum(pattern, jnp.uint32(1)), jnp.int32)


def shift_and_round(
    pattern: jax.Array, first: int, dropped: int, words: jax.Array | None
) -> jax.Array:
    """``(pattern - first) / 2^dropped``, rounded; 2^dropped divides ``first``."""
    pattern = pattern + (rounding_offset(dropped, words) - jnp.int32(first))
    return pattern >> jnp.int32(dropped)


def rounding_offset(dropped: int, words: jax.Array | None) -> jax.Array:
    """What is added to integers before their low bits are dropped, to round them.

    Args:
      dropped: how many, at least RANDOM_BITS.
      words: as of :meth:`Code.encode_fields`.

    Returns:
      int32, below ``2^dropped``.
    """
    if words is None:
        return jnp.int32(1 << (dropped - 1))
    low = dropped - RANDOM_BITS
    more = words >> jnp.uint32(32 - RANDOM_BITS) << jnp.uint32(low)
    # In the middle of what the random bits leave open.
    half = 1 << (low - 1) if low else 0
    return lax.bitcast_convert_type(more | jnp.uint32(half), jnp.int32)


def rounding_thresholds(words: jax.Array | None) -> jax.Array:
    """Thresholds from 0 to 1, the middles of 2^12 intervals; or 1/2."""
    if words is None:
        return jnp.float32(0.5)
    number = (words >> jnp.uint32(32 - RANDOM_BITS)).astype(jnp.int32)
    number = number.astype(jnp.float32) + jnp.float32(0.5)
    return number * jnp.float32(2.0**-RANDOM_BITS)


def as_fields(numbers: jax.Array) -> jax.Array:
    """Non-negative int32 as uint32."""
    return lax.bitcast_convert_type(numbers, jnp.uint32)
