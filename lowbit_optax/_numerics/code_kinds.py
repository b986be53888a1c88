"""Which codes there are, by name; see :mod:`lowbit_optax._numerics.codes`."""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax

from lowbit_optax._numerics.codes import (
    RANDOM_BITS,
    Code,
    Float,
    Scale,
    as_fields,
    bits_of,
    float_of,
    multiply_add,
    number_of,
    one_unless_zero,
    pattern_of,
    rounding_offset,
    rounding_thresholds,
    shift_and_round,
    with_sign_of_field,
)
from lowbit_optax._numerics.dynamic_code import Dynamic
from lowbit_optax._numerics.in_units import InUnits
from lowbit_optax._numerics.nested_code import Nested


@dataclasses.dataclass(frozen=True)
class Linear(InUnits):
    """Integers: with 8 bits, -127 to 127 or 0 to 254. Symmetric, without a zero point.

    A float32 near 2^11 has 12 fractional bits. So adding 2^11 to a number turns its
    pattern into a fixed-point number, which an integer sum and a shift can round.
    """

    @property
    def spare_field(self):
        return 0

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
        return as_fields(fields) if self.signed else self._unsigned_fields(x, fields)

    def decode_fields(self, fields, prepared, multiply_add=multiply_add):
        unit, _ = prepared
        number = number_of(fields, self._zero)
        return (number if self.signed else self._infinite(fields, number)) * unit


@dataclasses.dataclass(frozen=True)
class Segments(InUnits):
    """Segments of equal steps; the steps of each are twice those of the one before it.

    The magnitude field ``j 2^m + i``, with ``i < 2^m``, stands in units for

        2^j (1 + i 2^-m) - 1

    where j counts the segments from 0. The float32 pattern of ``1 + |x| / unit`` has j
    and i as its leading bits. So encoding is one multiplication and addition, and
    rounding is integer arithmetic. Between neighbours the pattern is linear in x, so
    the mean of stochastic rounding is x. With 8 segments of 16 steps and a sign this
    would be the mu-law of telephony (ITU-T G.711).

    Args:
      segments: e, for 2^e segments. The remaining m bits of the magnitude number the
        steps of a segment.
    """

    segments: int = 3

    @property
    def _steps(self) -> int:
        return self.bits - self.signed - self.segments

    @property
    def largest_field(self):
        if self.signed:
            return super().largest_field
        # The last segment is reserved for infinity. Of the segment before it only the
        # first value is used, which makes an unsigned scale a round number of units.
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
        # A signed code uses 2 + 2 |x| / unit: from 2 on, the low bits of the exponent
        # count the segments from 0.
        first = 2.0 if self.signed else 1.0
        inverse = jnp.broadcast_to(inverse * jnp.float32(first), size.shape)
        pattern = bits_of(multiply_add(size, inverse, jnp.full_like(size, first)))
        limit = self.largest_value + 1 if self.signed else 2.0 ** (2**self.segments - 1)
        pattern = jnp.minimum(pattern, jnp.int32(pattern_of(first * limit)))
        if not self.signed:
            # The exponent's bias is subtracted last: the pattern of a negative x is
            # negative, and subtracting from it first would wrap around.
            fields = shift_and_round(pattern, 0, self._dropped, words)
            fields = fields - jnp.int32(127 << self._steps)
            return as_fields(jnp.maximum(fields, one_unless_zero(x)))
        # Shift the magnitude up until it is directly below the sign bit.
        free = 32 - self.bits
        pattern = pattern << jnp.int32(free - self._dropped)
        pattern = as_fields(pattern + rounding_offset(free, words))
        sign = as_fields(x) & jnp.uint32(1 << 31)
        return (pattern | sign) >> jnp.uint32(free)

    def decode_fields(self, fields, prepared, multiply_add=multiply_add):
        unit = jnp.broadcast_to(prepared[0], fields.shape)
        # Raise the exponents: in an unsigned code, so that the field of infinity gets
        # float32's exponent of infinity; in a signed code, so that no carry is needed.
        lowest = 128 if self.signed else 256 - 2**self.segments
        lower = jnp.float32(2.0 ** (127 - lowest))
        shift = jnp.uint32(self._dropped)
        if not self.signed:
            pattern = (fields << shift) | jnp.uint32(lowest << 23)
            minus_one = jnp.full(fields.shape, -1, jnp.float32)
            lower = jnp.full(fields.shape, lower)
            return multiply_add(float_of(pattern), lower, minus_one) * unit
        magnitude = fields & jnp.uint32(2 ** (self.bits - 1) - 1)
        # A sum, though no bit is in both: it can share the shift's instruction.
        pattern = (magnitude << shift) + jnp.uint32(lowest << 23)
        # The product is exact. So (2^j (1 + i 2^-m) - 1) unit is rounded only once,
        # with a fused multiply-add or without.
        value = multiply_add(float_of(pattern), lower * unit, -unit)
        return with_sign_of_field(value, fields, self.bits)


@dataclasses.dataclass(frozen=True)
class Sqrt(InUnits):
    """Squares of integers, 0 to 254^2 with 8 bits: linear in the root of x."""

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
        # The step is (low + 1)^2 - low^2: the mean must be that of x, not of its root.
        up = number - low * low > rounding_thresholds(words) * (low + low + one)
        fields = jnp.where(up, root + jnp.int32(1), root)
        fields = jnp.minimum(fields, jnp.int32(self.largest_field))
        return self._unsigned_fields(x, fields)

    def decode_fields(self, fields, prepared, multiply_add=multiply_add):
        unit, _ = prepared
        number = self._infinite(fields, number_of(fields))
        return number * number * unit


# e of each code, by the bits of a field and whether one of them is the sign. With
# these, an 8-bit first moment resolves values about as small as the root of the second
# moment does. With e = 3 it would not, and the updates of values far below the largest
# of their block would be noise of many times their own size.
_COMPANDED = {(8, True): 4, (8, False): 4, (4, True): 1, (4, False): 2}
_LOG = {8: 5, 4: 3}


@functools.lru_cache(maxsize=64)
def code_of(name: str, bits: int, signed: bool, scale: Scale) -> Code:
    """The code with a name, for signed or for non-negative values."""
    if name == "linear":
        return Linear(bits, signed, scale)
    if name == "dynamic":
        return Dynamic(bits, signed, scale)
    if name == "sqrt":
        return Sqrt(bits, False, scale)
    if name == "float":
        return Float(bits, False, scale)
    if name == "nested":
        return Nested(bits, False)
    if name == "log":
        return Segments(bits, False, scale, _LOG[bits])
    return Segments(bits, signed, scale, _COMPANDED[bits, signed])
