"""Codes whose values are fixed numbers times a unit, such as the linear code.

The ``unit`` of a block is exactly ``scale * 2^-q``. Measured in units, each field of a
code has a fixed value (an integer, for ``Linear``), and the largest is
``largest_value``. The scale is the smallest bfloat16 (or power of two) for which
``largest_value * unit`` is at least the largest magnitude in the block. ``prepare``
returns ``(unit, 1 / unit)``.

:mod:`lowbit_optax._numerics.codes` explains codes and their rounding.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit_optax._numerics import float_layouts
from lowbit_optax._numerics.codes import (
    RANDOM_BITS,
    Code,
    as_fields,
    bits_of,
    float_of,
    number_of,
    one_unless_zero,
    pattern_of,
    rounding_offset,
    rounding_thresholds,
    shift_and_round,
    with_sign_of_field,
)
from pallas_kernels.operations import multiply_add, power_of_five, smaller

# Because divisions round, a quotient that should be exactly a scale may be larger by
# this tolerance. Without it, the quotient would be rounded up to the next scale, and
# the scale of a constant moment would grow in every step.
_TOLERANCE = 4  # units in the last place
_LARGEST_BFLOAT16 = 0x7F7F0000


@dataclasses.dataclass(frozen=True)
class InUnits(Code):
    """Base class of codes whose values are fixed numbers times the unit of a block."""

    @property
    def largest_value(self) -> float:
        """Largest value of a field, in units."""
        return float(self.largest_field)

    @property
    def smallest_value(self) -> float:
        """Smallest positive value of a field, in units."""
        return 1.0

    @property
    def smallest_share(self):
        return self.smallest_value / self.largest_value

    @property
    def _least_factor(self) -> float:
        """Smallest factor that decoding applies to a unit."""
        return min(self.smallest_value, 1.0)

    @property
    def _exponent(self) -> int:
        """The exponent q in the module's docstring."""
        return math.ceil(math.log2(self.largest_value))

    def scale_of_key(self, key):
        factor = np.float32(2.0**self._exponent / self.largest_value)
        pattern = as_fields(self.magnitude_of(key) * factor)
        dropped = 16 if self.scale == "bfloat16" else 23
        pattern = pattern + jnp.uint32((1 << dropped) - 1 - _TOLERANCE)
        largest = _LARGEST_BFLOAT16 >> dropped << dropped
        pattern = pattern >> jnp.uint32(dropped) << jnp.uint32(dropped)
        pattern = jnp.minimum(pattern, jnp.uint32(largest))
        return float_layouts.from_bits(pattern >> jnp.uint32(16), jnp.bfloat16)

    def prepare(self, scale):
        # With a smaller scale, products with the unit would be subnormal, and XLA may
        # flush subnormal numbers to 0.
        least = 2.0 ** (-126 + self._exponent) / self._least_factor
        scale = jnp.maximum(scale, jnp.float32(least))
        unit = scale * jnp.float32(2.0**-self._exponent)
        if self.scale == "power_of_two":
            # The exponent field of 2^-e is 127 - e, so this is exact and needs no
            # division.
            return unit, float_of(jnp.uint32(0x7F000000) - as_fields(unit))
        return unit, jnp.float32(1) / unit

    def _infinite(self, fields: jax.Array, number: jax.Array) -> jax.Array:
        """Return ``number``, or infinity where the field is the field of infinity."""
        is_infinite = fields == jnp.uint32(self.infinity_field)
        return jnp.where(is_infinite, jnp.float32(jnp.inf), number)

    def _unsigned_fields(self, x: jax.Array, fields: jax.Array) -> jax.Array:
        """Correct the fields of x, so that no positive number gets the field of 0.

        Infinity and NaN get the field of infinity.
        """
        fields = jnp.maximum(fields, one_unless_zero(x))
        finite = x < jnp.float32(jnp.inf)
        return as_fields(jnp.where(finite, fields, jnp.int32(self.infinity_field)))

    def _signed_fields(self, x: jax.Array, pattern, dropped: int, words) -> jax.Array:
        """Return the fields of ``pattern / 2^dropped``, rounded, with the sign of x."""
        # Shift the magnitude up until it is directly below the sign bit.
        free = 32 - self.bits
        pattern = pattern << jnp.int32(free - dropped)
        pattern = as_fields(pattern + rounding_offset(free, words))
        sign = as_fields(x) & jnp.uint32(1 << 31)
        return (pattern | sign) >> jnp.uint32(free)


@dataclasses.dataclass(frozen=True)
class Linear(InUnits):
    """Symmetric integers without a zero point: -127 to 127 or 0 to 254 with 8 bits.

    A float32 near 2^11 has 12 fractional bits. Therefore, adding 2^11 to a number turns
    its pattern into a fixed-point number, which an integer sum and a shift can round.
    """

    @property
    def spare_field(self):
        return 0

    @property
    def _zero(self) -> int:
        return 2 ** (self.bits - 1) if self.signed else 0

    def encode_fields(self, x, prepared, words):
        _, inverse = prepared
        middle = 2.0 ** (23 - RANDOM_BITS) + self._zero
        fixed = bits_of(x * inverse + jnp.float32(middle))
        least = middle - self.largest_field if self.signed else middle
        fixed = jnp.maximum(fixed, jnp.int32(pattern_of(least)))
        fixed = jnp.minimum(fixed, jnp.int32(pattern_of(middle + self.largest_field)))
        first = pattern_of(2.0 ** (23 - RANDOM_BITS))
        fields = shift_and_round(fixed, first, RANDOM_BITS, words)
        return as_fields(fields) if self.signed else self._unsigned_fields(x, fields)

    def decode_fields(self, fields, prepared):
        unit, _ = prepared
        number = number_of(fields, self._zero)
        return (number if self.signed else self._infinite(fields, number)) * unit


@dataclasses.dataclass(frozen=True)
class Segments(InUnits):
    """Segments of equal steps. Each segment has steps twice as large as the one before.

    The magnitude field ``j 2^m + i``, with ``i < 2^m``, has the value, in units,

        2^j (1 + i 2^-m) - 1

    where j is the index of the segment, starting at 0. The leading bits of the float32
    pattern of ``1 + |x| / unit`` are j and i. Therefore, encoding is one multiplication
    and addition, and rounding is integer arithmetic. Between neighbors, the pattern is
    linear in x, so the mean of stochastic rounding is x. With a sign and 8 segments of
    16 steps, this would be the mu-law of telephony (ITU-T G.711).

    Args:
      segments: e, for 2^e segments. The other m bits of the magnitude count the steps
        of a segment.
    """

    segments: int = 3

    @property
    def _steps(self) -> int:
        return self.bits - self.signed - self.segments

    @property
    def largest_field(self):
        if self.signed:
            return super().largest_field
        # The last segment is reserved for infinity. The segment before it uses only its
        # first value, so that the scale of an unsigned code is a round number of units.
        return (2**self.segments - 2) << self._steps

    @property
    def infinity_field(self):
        return (2**self.segments - 1) << self._steps

    @property
    def largest_value(self):
        steps = 2**self._steps
        segment, step = divmod(self.largest_field, steps)
        return 2.0**segment * (1 + step / steps) - 1

    @property
    def smallest_value(self):
        return 2.0**-self._steps

    @property
    def _dropped(self) -> int:
        return 23 - self._steps

    def encode_fields(self, x, prepared, words):
        _, inverse = prepared
        size = jnp.abs(x) if self.signed else x
        # Signed codes use 2 + 2 |x| / unit. From 2 on, the low bits of the exponent
        # count the segments from 0.
        first = 2.0 if self.signed else 1.0
        inverse = jnp.broadcast_to(inverse * jnp.float32(first), size.shape)
        pattern = bits_of(multiply_add(size, inverse, jnp.full_like(size, first)))
        limit = self.largest_value + 1 if self.signed else 2.0 ** (2**self.segments - 1)
        most = jnp.int32(pattern_of(first * limit))
        pattern = jnp.minimum(pattern, most)
        if not self.signed:
            # Subtract the bias of the exponent last. Before rounding, it would overflow
            # for the negative patterns of negative x.
            fields = shift_and_round(pattern, 0, self._dropped, words)
            fields = fields - jnp.int32(127 << self._steps)
            return as_fields(jnp.maximum(fields, one_unless_zero(x)))
        return self._signed_fields(x, pattern, self._dropped, words)

    def decode_fields(self, fields, prepared):
        unit = jnp.broadcast_to(prepared[0], fields.shape)
        # Raise the exponents. In unsigned codes, the field of infinity then has the
        # exponent of float32's infinity; in signed codes, no carry is needed.
        lowest = 128 if self.signed else 256 - 2**self.segments
        lower = jnp.float32(2.0 ** (127 - lowest))
        shift = jnp.uint32(self._dropped)
        if not self.signed:
            pattern = (fields << shift) | jnp.uint32(lowest << 23)
            minus_one = jnp.full(fields.shape, -1, jnp.float32)
            lower = jnp.full(fields.shape, lower)
            return multiply_add(float_of(pattern), lower, minus_one) * unit
        magnitude = fields & jnp.uint32(2 ** (self.bits - 1) - 1)
        # Add the two instead of combining their bits with "or", because an addition
        # can share an instruction with the shift.
        pattern = (magnitude << shift) + jnp.uint32(lowest << 23)
        # The product is exact, so (2^j (1 + i 2^-m) - 1) unit is rounded only once,
        # with or without a fused multiply-add.
        value = multiply_add(float_of(pattern), lower * unit, -unit)
        return with_sign_of_field(value, fields, self.bits)


@dataclasses.dataclass(frozen=True)
class Log(Segments):
    """Segments whose scales are powers of two, so that encoding needs no division."""

    scale = "power_of_two"


@dataclasses.dataclass(frozen=True)
class Sqrt(InUnits):
    """Squares of integers, from 0 to 254^2 with 8 bits: linear in the square root."""

    @property
    def largest_value(self):
        return float(self.largest_field) ** 2

    def encode_fields(self, x, prepared, words):
        _, inverse = prepared
        one = jnp.float32(1)
        finite = (x < jnp.float32(jnp.inf)) & (x > jnp.float32(0))
        number = jnp.where(finite, x, jnp.float32(0)) * inverse
        root = lax.sqrt(number).astype(jnp.int32)
        low = root.astype(jnp.float32)
        # The step is (low + 1)^2 - low^2, because rounding must keep the mean of x, not
        # the mean of its root.
        up = number - low * low > rounding_thresholds(words) * (low + low + one)
        fields = jnp.where(up, root + jnp.int32(1), root)
        fields = jnp.minimum(fields, jnp.int32(self.largest_field))
        return self._unsigned_fields(x, fields)

    def decode_fields(self, fields, prepared):
        unit, _ = prepared
        number = self._infinite(fields, number_of(fields))
        return number * number * unit


@dataclasses.dataclass(frozen=True)
class Dynamic(InUnits):
    """Dettmers' dynamic exponent map, computed with arithmetic instead of a table.

    The position i of the leading one bit of a magnitude k selects a decade. The bits
    below it divide the decade linearly:

        10^(i - I) (0.1 + 0.9 (k + 1/2 - 2^i) / 2^i)

    where I is the largest i. Unsigned magnitudes start at 1 instead of 0, and k = 1 is
    zero. This is the published map (``create_dynamic_map`` in bitsandbytes) without its
    value +1, which has no negative counterpart.
    """

    @property
    def largest_value(self):
        return float(self._published(self.largest_field + (not self.signed)))

    @property
    def smallest_value(self):
        return float(self._published(self._lowest))

    @property
    def _least_factor(self):
        return 1 / self._steps_of_one

    @property
    def _decades(self) -> int:
        """The index I of the highest decade, as in the docstring of the class."""
        return self.bits - 1 - self.signed

    def _published(self, k: int) -> float:
        """Return the value of magnitude k in the published map."""
        i = k.bit_length() - 1
        return 10.0 ** (i - self._decades) * (0.1 + 0.9 * ((k + 0.5) / 2**i - 1))

    @property
    def _lowest(self) -> int:
        """Magnitude of the smallest positive value."""
        return 2 - self.signed

    def _values(self, fields: jax.Array) -> jax.Array:
        """Return the values of unsigned fields times :attr:`_steps_of_one`."""
        # The number is a power of two times k + 1/2. The last bits of its exponent are
        # i, or i + 1 in unsigned codes, where k = 1 is zero.
        double = 1 + self.signed
        pattern = fields | jnp.uint32(0x4B000000 + (double << 23))
        half = 2.0 ** (double - 1)
        first = half * (2.0**24 - 1) - 2 * half * (not self.signed)
        number = float_of(pattern) - jnp.float32(first)
        pattern = as_fields(number)
        power = float_of(pattern & jnp.uint32(0x7F800000))
        # In units of 1 / (10 2^i) of a decade, the value is 9 (k + 1/2) - 8 2^i, which
        # is exact.
        minus_eight = jnp.full_like(power, -8)
        parts = multiply_add(power, minus_eight, number * jnp.float32(9))
        return parts * power_of_five(pattern >> jnp.uint32(23))

    @property
    def _steps_of_one(self) -> float:
        """The factor that :meth:`_values` applies to the values."""
        scale = 2.0 ** (1 + self.signed)
        return 10.0 ** (self._decades + 1) * scale / (1 if self.signed else 5)

    def _place(self, number: jax.Array) -> jax.Array:
        """Return 2^11 + k for the value of magnitude k, with interpolation.

        The interpolation is linear. Within a decade, it solves the formula of the class
        for k + 1/2, which is 2^i at the start of the decade. The result is the minimum
        over the lines of all decades, because their slopes decrease. The two values
        next to a power of ten have 1/6 of their distance below the power and 5/6 above
        it, but the formula alone would count each part as one half.
        """
        lines = []
        for i in range(self._lowest - 1, self._decades + 1):
            slope = 10.0 ** (self._decades - i) * 2.0**i / 0.9
            line = jnp.full_like(number, slope), jnp.full_like(number, 2.0**i * 8 / 9)
            lines.append(multiply_add(number, *line))
        place = functools.reduce(smaller, lines)
        start = float_of(as_fields(place) & jnp.uint32(0x7F800000))
        above = place - start
        half = jnp.full_like(number, 0.5)
        edge = smaller(smaller(above, start - above), half)
        share = jnp.full_like(number, 2 / 3)
        # Near 2^11, a float32 has 12 fractional bits, as in Linear.
        zero = 2.0 ** (23 - RANDOM_BITS)
        place = multiply_add(edge - half, share, place) + jnp.float32(zero - 0.5)
        # The interpolation is also linear from zero to the smallest value.
        smallest = jnp.float32(self.smallest_value)
        from_zero = multiply_add(
            number,
            jnp.full_like(number, 1 / self.smallest_value),
            jnp.full_like(number, zero + self._lowest - 1),
        )
        return jnp.where(number < smallest, from_zero, place)

    def encode_fields(self, x, prepared, words):
        _, inverse = prepared
        size = jnp.abs(x) if self.signed else x
        # As an integer, the bit pattern of NaN is larger than the pattern of infinity.
        largest = jnp.int32(pattern_of(self.largest_value))
        pattern = jnp.minimum(bits_of(size * inverse), largest)
        if not self.signed:
            pattern = jnp.maximum(pattern, jnp.int32(0))
        fixed = bits_of(self._place(float_of(pattern)))
        if not self.signed:
            first = pattern_of(2.0 ** (23 - RANDOM_BITS))
            k = shift_and_round(fixed, first, RANDOM_BITS, words) - jnp.int32(1)
            return self._unsigned_fields(x, k)
        return self._signed_fields(x, fixed, RANDOM_BITS, words)

    def decode_fields(self, fields, prepared):
        unit = prepared[0] * jnp.float32(1 / self._steps_of_one)
        if not self.signed:
            values = self._values(fields)
            return self._infinite(fields, values) * unit
        magnitude = fields & jnp.uint32(2 ** (self.bits - 1) - 1)
        values = self._values(magnitude)
        return with_sign_of_field(values * unit, fields, self.bits)
