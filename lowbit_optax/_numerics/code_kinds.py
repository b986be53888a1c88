"""The codes that :func:`lowbit_optax.block_quantized` knows.

What a code is, and how all of them round, is in :mod:`lowbit_optax._numerics.codes`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit_optax._numerics.codes import (
    RANDOM_BITS,
    Code,
    Scale,
    as_fields,
    bits_of,
    float_of,
    multiply_add,
    one_unless_zero,
    pattern_of,
    rounding_offset,
    rounding_thresholds,
    shift_and_round,
)


@dataclasses.dataclass(frozen=True)
class Linear(Code):
    """Integers: -127 to 127, or 0 to 254, in 8 bits. Symmetric, without a zero point.

    ``2^11 + c`` has 12 fractional bits in float32: adding 2^11 makes the pattern a
    fixed-point number, in which rounding is an integer sum and a shift.
    """

    @property
    def largest_value(self):
        return float(self.largest_field)

    @property
    def _zero(self) -> int:
        """The field of 0."""
        return 2 ** (self.bits - 1) if self.signed else 0

    def encode_fields(self, x, prepared, words, multiply_add=multiply_add):
        _, inverse = prepared
        middle = 2.0 ** (23 - RANDOM_BITS) + self._zero
        fixed = bits_of(x * inverse + jnp.float32(middle))
        least = middle - self.largest_field if self.signed else middle
        fixed = jnp.maximum(fixed, jnp.int32(pattern_of(least)))
        fixed = jnp.minimum(fixed, jnp.int32(pattern_of(middle + self.largest_field)))
        first = pattern_of(2.0 ** (23 - RANDOM_BITS))
        fields = shift_and_round(fixed, first, RANDOM_BITS, words)
        if not self.signed:
            fields = jnp.maximum(fields, one_unless_zero(x))
            finite = x < jnp.float32(jnp.inf)
            fields = jnp.where(finite, fields, jnp.int32(self.infinity_field))
        return as_fields(fields)

    def decode_fields(self, fields, prepared, multiply_add=multiply_add):
        unit, _ = prepared
        # An integer below 2^23 in the mantissa of 2^23.
        number = float_of(fields | jnp.uint32(0x4B000000)) - jnp.float32(
            2.0**23 + self._zero
        )
        if not self.signed:
            number = jnp.where(
                fields == jnp.uint32(self.infinity_field), jnp.float32(jnp.inf), number
            )
        return number * unit


@dataclasses.dataclass(frozen=True)
class Segments(Code):
    """Segments of equal steps, each twice as coarse as the one before it.

    In units, magnitude ``j 2^m + i`` (``i < 2^m``) of segment j stands for

        2^j (1 + i 2^-m) - 1

    from 0 up. ``1 + |x| / unit`` has j and i in the leading bits of its float32
    pattern, so encoding is one multiplication and addition, and rounding is on
    integers; between neighbours the pattern is linear in x, so the mean of a stochastic
    rounding is x. With 8 segments of 16 steps and a sign it would be the mu-law of
    telephony (ITU-T G.711).

    Args:
      segments: e, for 2^e segments; the steps in one take the remaining m bits.
    """

    segments: int = 3

    @property
    def _steps(self) -> int:
        return self.bits - self.signed - self.segments

    @property
    def largest_field(self):
        if self.signed:
            return super().largest_field
        # The last segment is for infinity, and the numbers of the one before it are
        # not needed: an unsigned scale is a round number of units.
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

    def encode_fields(self, x, prepared, words, multiply_add=multiply_add):
        _, inverse = prepared
        size = jnp.abs(x) if self.signed else x
        # Of a signed code it is 2 + 2 |x| / unit, whose exponents begin with zeros.
        first = 2.0 if self.signed else 1.0
        inverse = jnp.broadcast_to(inverse * jnp.float32(first), size.shape)
        pattern = bits_of(multiply_add(size, inverse, jnp.full_like(size, first)))
        limit = self.largest_value + 1 if self.signed else 2.0 ** (2**self.segments - 1)
        pattern = jnp.minimum(pattern, jnp.int32(pattern_of(first * limit)))
        if not self.signed:
            # Subtracted last: a negative x has a negative pattern, which would wrap.
            fields = shift_and_round(pattern, 0, self._dropped, words)
            fields = fields - jnp.int32(127 << self._steps)
            return as_fields(jnp.maximum(fields, one_unless_zero(x)))
        # The magnitude moves to below the sign's bit.
        free = 32 - self.bits
        pattern = pattern << jnp.int32(free - self._dropped)
        pattern = as_fields(pattern + rounding_offset(free, words))
        sign = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(1 << 31)
        return (pattern | sign) >> jnp.uint32(free)

    def decode_fields(self, fields, prepared, multiply_add=multiply_add):
        unit = jnp.broadcast_to(prepared[0], fields.shape)
        # The exponents are raised so that infinity's field has float32's exponent of
        # infinity (unsigned), or so that no carry is needed (signed).
        lowest = 128 if self.signed else 256 - 2**self.segments
        lower = jnp.float32(2.0 ** (127 - lowest))
        shift = jnp.uint32(self._dropped)
        if not self.signed:
            pattern = (fields << shift) | jnp.uint32(lowest << 23)
            minus_one = jnp.full(fields.shape, -1, jnp.float32)
            lower = jnp.full(fields.shape, lower)
            return multiply_add(float_of(pattern), lower, minus_one) * unit
        magnitude = fields & jnp.uint32(2 ** (self.bits - 1) - 1)
        pattern = (magnitude << shift) | jnp.uint32(lowest << 23)
        # The product is exact, so the difference is (2^j (1 + i 2^-m) - 1) unit rounded
        # once, with or without a fused multiply-add.
        value = multiply_add(float_of(pattern), lower * unit, -unit)
        sign = (fields >> jnp.uint32(self.bits - 1)) << jnp.uint32(31)
        return float_of(lax.bitcast_convert_type(value, jnp.uint32) | sign)


@dataclasses.dataclass(frozen=True)
class Sqrt(Code):
    """Squares of integers, 0 to 254^2 in 8 bits: linear in the root of x."""

    @property
    def largest_value(self):
        return float(self.largest_field) ** 2

    def encode_fields(self, x, prepared, words, multiply_add=multiply_add):
        _, inverse = prepared
        one = jnp.float32(1)
        finite = (x < jnp.float32(jnp.inf)) & (x > jnp.float32(0))
        number = jnp.where(finite, x, jnp.float32(0)) * inverse
        root = lax.sqrt(number).astype(jnp.int32)
        low = root.astype(jnp.float32)
        # (low + 1)^2 - low^2: the mean is to be right of x, not of its root.
        up = number - low * low > rounding_thresholds(words) * (low + low + one)
        fields = jnp.where(up, root + jnp.int32(1), root)
        fields = jnp.minimum(fields, jnp.int32(self.largest_field))
        fields = jnp.maximum(fields, one_unless_zero(x))
        above = (x < jnp.float32(jnp.inf)) | (x < jnp.float32(0))
        return as_fields(jnp.where(above, fields, jnp.int32(self.infinity_field)))

    def decode_fields(self, fields, prepared, multiply_add=multiply_add):
        unit, _ = prepared
        number = float_of(fields | jnp.uint32(0x4B000000)) - jnp.float32(2.0**23)
        infinite = fields == jnp.uint32(self.infinity_field)
        number = jnp.where(infinite, jnp.float32(jnp.inf), number)
        return number * number * unit


@dataclasses.dataclass(frozen=True)
class Dynamic(Code):
    """Dettmers' dynamic exponent map, by arithmetic instead of a table.

    The leading one of a magnitude k, at bit i, says which decade it is in; the bits
    below are linear in the decade:

        10^(i - I) (0.1 + 0.9 (k + 1/2 - 2^i) / 2^i)

    with I the highest i (unsigned magnitudes start at 1 instead of 0, that is k = 1 is
    zero). That is the published map (``create_dynamic_map`` in bitsandbytes) without
    its lone ``+1``, which has no negative counterpart.
    """

    @property
    def largest_value(self):
        return float(self._published(self.largest_field + (not self.signed)))

    @property
    def smallest_value(self):
        return float(self._published(1 + (not self.signed)))

    @property
    def _decades(self) -> int:
        """I."""
        return self.bits - 1 - self.signed

    def _published(self, k: int) -> float:
        i = k.bit_length() - 1
        return 10.0 ** (i - self._decades) * (0.1 + 0.9 * ((k + 0.5) / 2**i - 1))

    def _values(self, k: jax.Array) -> jax.Array:
        """The magnitudes of integers k, which are float32."""
        pattern = lax.bitcast_convert_type(k, jnp.uint32)
        i = (pattern >> jnp.uint32(23)) - jnp.uint32(127)
        two_to_minus_i = float_of((jnp.uint32(127) - i) << jnp.uint32(23))
        share = (k + jnp.float32(0.5)) * two_to_minus_i - jnp.float32(1)
        value = jnp.float32(0.1) + jnp.float32(0.9) * share
        decades = jnp.uint32(self._decades) - i
        for bit in range(3):
            set_ = (decades >> jnp.uint32(bit) & jnp.uint32(1)) != jnp.uint32(0)
            value = jnp.where(set_, value * jnp.float32(10.0 ** -(2**bit)), value)
        return jnp.where(k > self._zero_magnitude, value, jnp.float32(0))

    @property
    def _zero_magnitude(self) -> np.float32:
        return np.float32(not self.signed)

    def encode_fields(self, x, prepared, words, multiply_add=multiply_add):
        _, inverse = prepared
        size = jnp.abs(x) if self.signed else x
        # Written so that NaN is taken for infinity.
        inside = size < jnp.float32(jnp.inf)
        number = jnp.where(inside, size * inverse, jnp.float32(1))
        inside = number < jnp.float32(self.largest_value)
        number = jnp.maximum(number, jnp.float32(0))
        # Up through the decades: the value times 10^(I - i), and 2^i.
        mantissa, power = number, jnp.float32(2.0**self._decades)
        power = jnp.full_like(number, power)
        for j in range(1, self._decades + 1):
            lower = number < jnp.float32(10.0**-j)
            mantissa = jnp.where(lower, number * jnp.float32(10.0**j), mantissa)
            power = jnp.where(lower, jnp.float32(2.0 ** (self._decades - j)), power)
        share = (mantissa - jnp.float32(0.1)) * jnp.float32(1 / 0.9)
        low = power * (jnp.float32(1) + share) - jnp.float32(0.5)
        low = low.astype(jnp.int32).astype(jnp.float32)
        low = jnp.maximum(low, self._zero_magnitude)
        one = jnp.float32(1)
        # A value that lies on a code may have come out just below it.
        low = jnp.where(self._values(low + one) <= number, low + one, low)
        here, above = self._values(low), self._values(low + one)
        up = number - here > rounding_thresholds(words) * (above - here)
        k = jnp.where(up, low + one, low).astype(jnp.int32)
        k = k - jnp.int32(not self.signed)
        k = jnp.where(
            inside,
            jnp.minimum(k, jnp.int32(self.largest_field)),
            jnp.int32(self.largest_field),
        )
        if not self.signed:
            k = jnp.maximum(k, one_unless_zero(x))
            above = (x < jnp.float32(jnp.inf)) | (x < jnp.float32(0))
            return as_fields(jnp.where(above, k, jnp.int32(self.infinity_field)))
        sign = lax.bitcast_convert_type(x, jnp.uint32) >> jnp.uint32(31)
        return as_fields(k) | sign << jnp.uint32(self.bits - 1)

    def decode_fields(self, fields, prepared, multiply_add=multiply_add):
        unit, _ = prepared
        magnitude = fields & jnp.uint32(2 ** (self.bits - 1) - 1)
        if not self.signed:
            magnitude = fields + jnp.uint32(1)
        k = lax.bitcast_convert_type(magnitude, jnp.int32).astype(jnp.float32)
        value = self._values(k)
        if not self.signed:
            infinite = fields == jnp.uint32(self.infinity_field)
            value = jnp.where(infinite, jnp.float32(jnp.inf), value)
            return value * unit
        sign = (fields >> jnp.uint32(self.bits - 1)) << jnp.uint32(31)
        return float_of(lax.bitcast_convert_type(value * unit, jnp.uint32) | sign)


# e of each code, by bits of a field and whether one of them is the sign. Eight bits of
# a first moment largest_value about as far down as the root of the second: where they end
# sooner (e = 3), updates of values far below their group's largest are noise of many
# times their size.
_COMPANDED = {(8, True): 4, (8, False): 4, (4, True): 1, (4, False): 2}
_LOG = {8: 5, 4: 3}


@functools.lru_cache(maxsize=64)
def code_of(name: str, bits: int, signed: bool, scale: Scale) -> Code:
    """The code of a name, for signed or non-negative values."""
    if name == "linear":
        return Linear(bits, signed, scale)
    if name == "dynamic":
        return Dynamic(bits, signed, scale)
    if name == "sqrt":
        return Sqrt(bits, False, scale)
    if name == "log":
        return Segments(bits, False, scale, _LOG[bits])
    return Segments(bits, signed, scale, _COMPANDED[bits, signed])
