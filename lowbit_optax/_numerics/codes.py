"""Codes store a float32 value as a k-bit field, relative to the scale of its block.

A code is a set of elementwise functions on arrays of one common shape. XLA applies them
to whole arrays and kernels to rows, so both run the same operations (sums, products,
shifts, comparisons, integer minima and maxima; only ``Sqrt`` needs a square root)::

    magnitude_key(x) --> maximum over the block --> scale_of_key --> scale, in bfloat16
    prepare(scale) --> prepared, once per block
    encode_fields(x, prepared, words) --> fields
    decode_fields(fields, prepared) --> x'

The values of most codes are fixed numbers times a unit (:class:`InUnits`). The ``unit``
of a block is exactly ``scale * 2^-q``. Measured in units, each field of a code has a
fixed value (an integer, for ``Linear``), and the largest is ``largest_value``. The
scale is the smallest bfloat16 (or power of two) for which ``largest_value * unit`` is
at least the largest magnitude in the block. ``prepare`` returns ``(unit, 1 / unit)``.

**Rounding.** Let ``a <= x <= b`` be the neighbors of x among the values of the code.
The result is b with probability ``(x - a) / (b - a)``, rounded to a multiple of 2^-12
or of a smaller power of two. Therefore, the mean is x to within 2^-12 of a step. If
``words`` is None, the result is the nearer neighbor.

**Zero** has its own field, which decodes to exactly 0, and is never rounded randomly.
(In ``"float"``, zero becomes the smallest positive value unless the whole block is 0.)
Unsigned codes store second moments, and updates are divided by their square roots. If a
positive second moment became 0, its update could grow without bound. Therefore,
unsigned codes round small positive numbers up to the smallest positive value.

**Non-finite values.** Infinities and NaNs do not affect the scale, so the other values
of the block keep their precision. Unsigned codes have one field for both, which decodes
to infinity. As in float32, a second moment that has overflowed stays infinite, and its
parameter stops changing. Signed codes store the largest value of the block instead, so
that the moment can recover. In signed codes, magnitudes of 2^50 and more do not affect
the scale either. For example, a gradient g of 2^64 overflows the second moment, and
adds ``(1 - b1) g``, or 2^57 for b1 = 0.99, to the first moment. With a scale for such a
value, the block would lose all smaller moments. A negative number in an unsigned code
becomes the smallest positive value.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit_optax._numerics import float_layouts
from pallas_kernels import operations
from pallas_kernels.operations import multiply_add, power_of_five, smaller

RANDOM_BITS = 12
"""Number of leading bits of a random word that every rounding reads. Some read more."""

ONE_EXPONENT = 1 << 23  # adds 1 to the exponent of a float32 pattern
_LARGEST_SCALED = 2.0**50  # in signed codes

Prepared = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class Code:
    """Base class of all codes. Subclasses define the values of the fields.

    The scale of a block is computed from the largest :meth:`magnitude_key` of the
    block.

    Args:
      bits: k, number of bits of a field.
      signed: whether the code can store negative values.
      limit: magnitudes at or above this number do not affect the scale. None means 2^50
        in signed codes and infinity in unsigned codes.
    """

    bits: int
    signed: bool
    limit: float | None = dataclasses.field(default=None, kw_only=True)

    scale: typing.ClassVar[str] = "bfloat16"
    """The allowed scales: any bfloat16 number, or only each ``"power_of_two"``."""

    @property
    def largest_field(self) -> int:
        """Field of ``largest_value``, without the sign bit in signed codes."""
        return 2 ** (self.bits - 1) - 1 if self.signed else 2**self.bits - 2

    @property
    def smallest_share(self) -> float:
        """Smallest positive value of a field, relative to the largest value."""
        raise NotImplementedError

    @property
    def infinity_field(self) -> int:
        """Field of infinities and NaNs in unsigned codes."""
        return self.largest_field + 1

    @property
    def spare_field(self) -> int:
        """Field of negative zero, which no number needs in a signed code."""
        return 2 ** (self.bits - 1)

    @property
    def _above(self) -> int:
        """2^31 minus the smallest pattern that does not affect the scale."""
        limit = _LARGEST_SCALED if self.signed else math.inf
        return 2**31 - pattern_of(limit if self.limit is None else self.limit)

    def magnitude_key(self, x: jax.Array) -> jax.Array:
        """Return int32 keys that sort like the finite magnitudes.

        :meth:`magnitude_of` converts the largest key of a block to the block's largest
        finite magnitude. Infinities, NaNs and magnitudes at or above the limit have
        negative keys, because the addition to their exponents overflows. This needs
        fewer instructions than a comparison. In unsigned codes, the keys of negative
        numbers are also below the key of 0.
        """
        pattern = bits_of(x)
        if self.signed:
            pattern = pattern & jnp.int32(0x7FFFFFFF)
        return pattern + jnp.int32(self._above)

    def magnitude_of(self, key: jax.Array) -> jax.Array:
        """Return the float32 magnitude for a magnitude key, or 0 for a negative key."""
        return float_of(jnp.maximum(key - jnp.int32(self._above), jnp.int32(0)))

    def scale_of_key(self, key: jax.Array) -> jax.Array:
        """Return the bfloat16 scales of blocks from their largest magnitude keys.

        Scales are rounded up. The scale of a block of zeros is 0.
        """
        raise NotImplementedError

    def prepare(self, scale: jax.Array) -> Prepared:
        """Return the values that encoding and decoding need for a scale."""
        raise NotImplementedError

    def encode_fields(
        self, x: jax.Array, prepared: Prepared, words: jax.Array | None
    ) -> jax.Array:
        """Round values, and return their fields.

        Args:
          x: float32.
          prepared: result of :meth:`prepare`, which must broadcast to the shape of x.
          words: uniformly random uint32 words with the shape of x. Nothing else may
            use their leading :data:`RANDOM_BITS` bits. If None, values are rounded to
            nearest.

        Returns:
          uint32 fields of ``bits`` bits, with the shape of x.
        """
        raise NotImplementedError

    def decode_fields(self, fields: jax.Array, prepared: Prepared) -> jax.Array:
        """Return the float32 values of uint32 fields; inverts :meth:`encode_fields`."""
        raise NotImplementedError


def bits_of(x: jax.Array) -> jax.Array:
    """Return the bit patterns of float32 numbers as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def float_of(pattern: jax.Array) -> jax.Array:
    """Return the float32 numbers that have these int32 or uint32 bit patterns.

    >>> import jax.numpy as jnp
    >>> float(float_of(jnp.uint32(0x3F800000)))
    1.0
    """
    return lax.bitcast_convert_type(pattern, jnp.float32)


def pattern_of(x: float) -> int:
    """Return the float32 bit pattern of a number as a Python int."""
    return int(np.float32(x).view(np.int32))


def one_unless_zero(x: jax.Array) -> jax.Array:
    """Return int32 0 for +0 and 1 for all other numbers, without a selection."""
    pattern = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(jnp.minimum(pattern, jnp.uint32(1)), jnp.int32)


def shift_and_round(
    pattern: jax.Array, first: int, dropped: int, words: jax.Array | None
) -> jax.Array:
    """Return ``(pattern - first) / 2^dropped`` rounded to an integer, as int32.

    ``first`` must be a multiple of ``2^dropped``; see :func:`rounding_offset`.
    """
    pattern = pattern + (rounding_offset(dropped, words) - jnp.int32(first))
    return pattern >> jnp.int32(dropped)


def rounding_offset(dropped: int, words: jax.Array | None) -> jax.Array:
    """Return the offset to add, so that dropping the last ``dropped`` bits rounds.

    ``dropped`` must be at least RANDOM_BITS. ``words`` is as in
    :meth:`Code.encode_fields`. The result is int32 and less than ``2^dropped``.
    """
    if words is None:
        return jnp.int32(1 << (dropped - 1))
    return lax.bitcast_convert_type(words >> jnp.uint32(32 - dropped), jnp.int32)


def rounding_thresholds(words: jax.Array | None) -> jax.Array:
    """Return ``(n + 1/2) / 2^12`` for random n below 2^12, or 1/2 without ``words``."""
    if words is None:
        return jnp.float32(0.5)
    number = (words >> jnp.uint32(32 - RANDOM_BITS)).astype(jnp.int32)
    number = number.astype(jnp.float32) + jnp.float32(0.5)
    return number * jnp.float32(2.0**-RANDOM_BITS)


def number_of(fields: jax.Array, zero: int = 0) -> jax.Array:
    """Return ``fields - zero`` as float32, without a conversion, for fields below 2^23.

    The field becomes the mantissa of the float 2^23 + field.
    """
    return float_of(fields | jnp.uint32(0x4B000000)) - jnp.float32(2.0**23 + zero)


def with_sign_of_field(magnitude: jax.Array, fields: jax.Array, bits: int) -> jax.Array:
    """Return float32 magnitudes with the signs in the leading bits of k-bit fields."""
    sign = (fields >> jnp.uint32(bits - 1)) << jnp.uint32(31)
    return float_of(as_fields(magnitude) | sign)


def as_fields(numbers: jax.Array) -> jax.Array:
    """Return the bit patterns of 32-bit numbers as uint32.

    >>> import jax.numpy as jnp
    >>> as_fields(jnp.int32(7)).dtype
    dtype('uint32')
    """
    return lax.bitcast_convert_type(numbers, jnp.uint32)


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


# A compiler may compute a moment twice, for the scale and for the fields, with
# different rounding. A number slightly above the largest must not become infinity.
_MARGIN = 16  # units in the last place


@dataclasses.dataclass(frozen=True)
class Float(Code):
    """Floats with m mantissa bits, whose exponents are relative to the block.

    The float32 patterns of non-negative numbers are integers in the order of the
    numbers, and between two numbers of m bits the pattern is linear in x. A field is

        (pattern of x - pattern of the base) / 2^(23 - m)

    rounded to an integer, so encoding and decoding need only integer sums and shifts.
    The scale is the base: the largest number of m bits for which the whole block is in
    range.

    Field 0 decodes to the base and not to 0, unless the whole block is 0. With 8 bits,
    the base is about 2^-32 of the largest value. Numbers in the last steps below
    float32's infinity may become infinity.
    """

    @property
    def smallest_share(self):
        # Rounding the scale up can add a step of m bits.
        steps = 1 << (23 - self._dropped)
        return (1 + 1 / steps) * 2.0 ** -(self.largest_field // steps)

    @property
    def _dropped(self) -> int:
        """The number 23 - m, with m as in the docstring of the class."""
        mantissa = {8: 3, 4: 1}[self.bits]
        return 23 - mantissa

    def scale_of_key(self, key):
        pattern = bits_of(self.magnitude_of(key))
        span = self.largest_field << self._dropped
        largest = _rounded_up(pattern + jnp.int32(_MARGIN), self._dropped)
        # Unless the whole block is 0, field 0 must decode to a normal number.
        largest = jnp.maximum(largest, jnp.int32(ONE_EXPONENT + span))
        first = largest - jnp.int32(span)
        # Only the field of infinity may decode to float32's infinity.
        last = pattern_of(math.inf) - (self.infinity_field << self._dropped)
        first = jnp.minimum(first, jnp.int32(last >> self._dropped << self._dropped))
        first = jnp.where(pattern == jnp.int32(0), jnp.int32(0), first)
        return float_layouts.from_bits(as_fields(first) >> jnp.uint32(16), jnp.bfloat16)

    def prepare(self, scale):
        """Return the int32 patterns of the base and of the field of infinity."""
        base = bits_of(scale)
        return base, base + jnp.int32(self.infinity_field << self._dropped)

    def encode_fields(self, x, prepared, words):
        base, _ = prepared
        infinity = jnp.int32(self.infinity_field << self._dropped)
        above = operations.pattern_above(x, base, infinity)
        free = 32 - self.bits
        above = as_fields(above) << jnp.uint32(free - self._dropped)
        offset = lax.bitcast_convert_type(rounding_offset(free, words), jnp.uint32)
        return (above + offset) >> jnp.uint32(free)

    def decode_fields(self, fields, prepared):
        base, infinity = prepared
        above = fields << jnp.uint32(self._dropped)
        pattern = lax.bitcast_convert_type(above, jnp.int32) + base
        # A comparison of the fields for equality would need another shift.
        infinite = pattern >= infinity
        return jnp.where(infinite, jnp.float32(jnp.inf), float_of(pattern))


def _rounded_up(pattern: jax.Array, dropped: int) -> jax.Array:
    """Round int32 patterns up to multiples of ``2^dropped``."""
    pattern = pattern + jnp.int32((1 << dropped) - 1)
    return pattern & jnp.int32(-1 << dropped)


@dataclasses.dataclass(frozen=True)
class Sum(Code):
    """A code for sums of gradients, which keeps non-finite values visible.

    Codes of moments store non-finite values, and values of 2^50 or more, as smaller
    numbers, so that the moment recovers. The reader of a sum must see such values.
    Therefore, all finite values affect the scale, and all other values become NaN,
    which is stored in the field that ``code`` does not need.

    Args:
      bits, signed, scale: as in ``code``.
      code: the code of the finite values. Its ``limit`` must be infinity.
    """

    code: Code = dataclasses.field(kw_only=True)

    def magnitude_key(self, x):
        return self.code.magnitude_key(x)

    def scale_of_key(self, key):
        return self.code.scale_of_key(key)

    def prepare(self, scale):
        return self.code.prepare(scale)

    def encode_fields(self, x, prepared, words):
        finite = jnp.isfinite(x)
        nan = jnp.uint32(self.code.spare_field)
        x = jnp.where(finite, x, jnp.float32(0))
        fields = self.code.encode_fields(x, prepared, words)
        # Only negative zero can be encoded as this field.
        fields = jnp.where(fields == nan, jnp.uint32(0), fields)
        return jnp.where(finite, fields, nan)

    def decode_fields(self, fields, prepared):
        value = self.code.decode_fields(fields, prepared)
        nan = fields == jnp.uint32(self.code.spare_field)
        # A NaN constant would become an array that JAX moves out of a scan over layers.
        return jnp.where(nan, value * jnp.float32(jnp.nan), value)


# Segments.segments for each field width and signedness. With these values, an 8-bit
# first moment resolves values almost as small as the square root of the second moment.
# With 3 instead of 4, the noise in an update would be many times the update for values
# far below the largest value of their block.
_COMPANDED = {(8, True): 4, (8, False): 4, (4, True): 1, (4, False): 2}
_LOG = {8: 5, 4: 3}  # Log.segments

_CLASSES = {"linear": Linear, "dynamic": Dynamic, "sqrt": Sqrt, "float": Float}

UNSIGNED = ("sqrt", "log", "float")
"""The codes without negative values."""


def code_of(name: str, bits: int, signed: bool) -> Code:
    """Return the code called ``name``, for signed or for non-negative values."""
    signed = signed and name not in UNSIGNED
    if name in _CLASSES:
        return _CLASSES[name](bits, signed)
    if name == "log":
        return Log(bits, signed, _LOG[bits])
    return Segments(bits, signed, _COMPANDED[bits, signed])
