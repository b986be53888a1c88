"""Codes: a float32 value as a k-bit field, relative to the scale of its group.

A code is four elementwise functions, on arrays of any one shape, so that arrays on the
XLA path and rows in a kernel run the same operations (sums, products, shifts, integer
minima and maxima; only ``Sqrt`` takes a root and only ``Dynamic`` divides)::

    statistic(x) --> largest of the group --> scale_of --> scale (stored as bfloat16)
    prepare(scale) --> (unit, 1 / unit)                    once a group
    encode_fields(x, prepared, words) --> field
    decode_fields(field, prepared) --> x'

``unit`` is ``scale * 2^-q``, exactly. In units, the fields of a code stand for fixed
numbers (``Linear``: integers), of which the largest is ``reach``; the scale is the
smallest that a bfloat16 (or a power of two) can be with ``reach * unit >= largest``.

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
import functools
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
    scale: typing.Literal["bfloat16", "power_of_two"] = "bfloat16"

    @property
    def reach(self) -> float:
        """The largest number that a field stands for."""
        raise NotImplementedError

    @property
    def finest(self) -> float:
        """The smallest positive one."""
        return 1.0

    @property
    def top(self) -> int:
        """The field, or its magnitude where codes have signs, of ``reach``."""
        return 2 ** (self.bits - 1) - 1 if self.signed else 2**self.bits - 2

    @property
    def infinite(self) -> int:
        """The unsigned codes' field for what is not finite."""
        return self.top + 1

    @property
    def _exponent(self) -> int:
        return math.ceil(math.log2(self.reach))

    def statistic(self, x: jax.Array) -> jax.Array:
        """float32, not negative; its maximum over a group goes to :meth:`scale_of`."""
        size = jnp.abs(x)
        return jnp.where(size < jnp.float32(jnp.inf), size, jnp.float32(0))

    def scale_of(self, maximum: jax.Array) -> jax.Array:
        """The scale of groups, bfloat16, rounded up; 0 for groups of zeros."""
        factor = np.float32(2.0**self._exponent / self.reach)
        pattern = lax.bitcast_convert_type(maximum * factor, jnp.uint32)
        dropped = 16 if self.scale == "bfloat16" else 23
        pattern = pattern + jnp.uint32((1 << dropped) - 1 - _TOLERANCE)
        largest = _LARGEST_BFLOAT16 >> dropped << dropped
        pattern = pattern >> jnp.uint32(dropped) << jnp.uint32(dropped)
        pattern = jnp.minimum(pattern, jnp.uint32(largest))
        scale = lax.bitcast_convert_type(
            (pattern >> jnp.uint32(16)).astype(jnp.uint16), jnp.bfloat16
        )
        return jnp.where(maximum > jnp.float32(0), scale, jnp.bfloat16(0))

    def prepare(self, scale: jax.Array) -> Prepared:
        """What encode and decode take in the scale's place.

        Args:
          scale: float32, of any shape.

        Returns:
          ``(unit, 1 / unit)``.
        """
        # No smaller, for the smallest code would be subnormal, which XLA takes for 0.
        least = 2.0 ** (-126 + self._exponent) / min(self.finest, 1.0)
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


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(pattern: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(pattern, jnp.float32)


def _pattern(x: float) -> int:
    """A number's float32 pattern, as a Python int."""
    return int(np.float32(x).view(np.int32))


def _is_positive(x: jax.Array) -> jax.Array:
    """1 for a number that is not 0, else 0; by its pattern, so without a selection."""
    pattern = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(jnp.minimum(pattern, jnp.uint32(1)), jnp.int32)


def _round_off(
    pattern: jax.Array, first: int, dropped: int, words: jax.Array | None
) -> jax.Array:
    """``(pattern - first) / 2^dropped``, rounded; 2^dropped divides ``first``.

    ``dropped`` is at least RANDOM_BITS. The constants make one, for one sum of three.
    """
    if words is None:
        return (pattern + jnp.int32((1 << (dropped - 1)) - first)) >> jnp.int32(dropped)
    low = dropped - RANDOM_BITS
    more = words >> jnp.uint32(32 - RANDOM_BITS) << jnp.uint32(low)
    more = lax.bitcast_convert_type(more, jnp.int32)
    # In the middle of what the random bits leave open.
    half = 1 << (low - 1) if low else 0
    return (pattern + more + jnp.int32(half - first)) >> jnp.int32(dropped)


def _uniform(words: jax.Array | None) -> jax.Array:
    """Thresholds from 0 to 1, the middles of 2^12 intervals; or 1/2."""
    if words is None:
        return jnp.float32(0.5)
    number = (words >> jnp.uint32(32 - RANDOM_BITS)).astype(jnp.int32)
    number = number.astype(jnp.float32) + jnp.float32(0.5)
    return number * jnp.float32(2.0**-RANDOM_BITS)


def _as_fields(numbers: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(numbers, jnp.uint32)


@dataclasses.dataclass(frozen=True)
class Linear(Code):
    """Integers: -127 to 127, or 0 to 254, in 8 bits. Symmetric, without a zero point.

    ``2^11 + c`` has 12 fractional bits in float32: adding 2^11 makes the pattern a
    fixed-point number, in which rounding is an integer sum and a shift.
    """

    @property
    def reach(self):
        return float(self.top)

    @property
    def _zero(self) -> int:
        """The field of 0."""
        return 2 ** (self.bits - 1) if self.signed else 0

    def encode_fields(self, x, prepared, words, multiply_add=multiply_add):
        _, inverse = prepared
        middle = 2.0 ** (23 - RANDOM_BITS) + self._zero
        fixed = _bits(x * inverse + jnp.float32(middle))
        least = middle - self.top if self.signed else middle
        fixed = jnp.maximum(fixed, jnp.int32(_pattern(least)))
        fixed = jnp.minimum(fixed, jnp.int32(_pattern(middle + self.top)))
        first = _pattern(2.0 ** (23 - RANDOM_BITS))
        fields = _round_off(fixed, first, RANDOM_BITS, words)
        if not self.signed:
            fields = jnp.maximum(fields, _is_positive(x))
            finite = x < jnp.float32(jnp.inf)
            fields = jnp.where(finite, fields, jnp.int32(self.infinite))
        return _as_fields(fields)

    def decode_fields(self, fields, prepared, multiply_add=multiply_add):
        unit, _ = prepared
        # An integer below 2^23 in the mantissa of 2^23.
        number = _float(fields | jnp.uint32(0x4B000000)) - jnp.float32(
            2.0**23 + self._zero
        )
        if not self.signed:
            number = jnp.where(
                fields == jnp.uint32(self.infinite), jnp.float32(jnp.inf), number
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
    def top(self):
        if self.signed:
            return super().top
        # The last segment is for infinity, and the numbers of the one before it are
        # not needed: an unsigned scale is a round number of units.
        return (2**self.segments - 2) << self._steps

    @property
    def infinite(self):
        return (2**self.segments - 1) << self._steps

    @property
    def reach(self):
        steps = 2**self._steps
        segment, step = divmod(self.top, steps)
        return 2.0**segment * (1 + step / steps) - 1

    @property
    def finest(self):
        return 2.0**-self._steps

    @property
    def _dropped(self) -> int:
        return 23 - self._steps

    def encode_fields(self, x, prepared, words, multiply_add=multiply_add):
        _, inverse = prepared
        size = jnp.abs(x) if self.signed else x
        one = jnp.full_like(size, 1)
        pattern = _bits(multiply_add(size, jnp.broadcast_to(inverse, size.shape), one))
        limit = self.reach + 1 if self.signed else 2.0 ** (2**self.segments - 1)
        pattern = jnp.minimum(pattern, jnp.int32(_pattern(limit)))
        if not self.signed:
            # Subtracted last: a negative x has a negative pattern, which would wrap.
            fields = _round_off(pattern, 0, self._dropped, words)
            fields = fields - jnp.int32(127 << self._steps)
            return _as_fields(jnp.maximum(fields, _is_positive(x)))
        fields = _round_off(pattern, _pattern(1.0), self._dropped, words)
        sign = lax.bitcast_convert_type(x, jnp.uint32) >> jnp.uint32(31)
        return _as_fields(fields) | sign << jnp.uint32(self.bits - 1)

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
            return multiply_add(_float(pattern), lower, minus_one) * unit
        magnitude = fields & jnp.uint32(2 ** (self.bits - 1) - 1)
        pattern = (magnitude << shift) | jnp.uint32(lowest << 23)
        # The product is exact, so the difference is (2^j (1 + i 2^-m) - 1) unit rounded
        # once, with or without a fused multiply-add.
        value = multiply_add(_float(pattern), lower * unit, -unit)
        sign = (fields >> jnp.uint32(self.bits - 1)) << jnp.uint32(31)
        return _float(lax.bitcast_convert_type(value, jnp.uint32) | sign)


@dataclasses.dataclass(frozen=True)
class Sqrt(Code):
    """Squares of integers, 0 to 254^2 in 8 bits: linear in the root of x."""

    @property
    def reach(self):
        return float(self.top) ** 2

    def encode_fields(self, x, prepared, words, multiply_add=multiply_add):
        _, inverse = prepared
        one = jnp.float32(1)
        finite = (x < jnp.float32(jnp.inf)) & (x > jnp.float32(0))
        number = jnp.where(finite, x, jnp.float32(0)) * inverse
        root = lax.sqrt(number).astype(jnp.int32)
        low = root.astype(jnp.float32)
        # (low + 1)^2 - low^2: the mean is to be right of x, not of its root.
        up = number - low * low > _uniform(words) * (low + low + one)
        fields = jnp.where(up, root + jnp.int32(1), root)
        fields = jnp.minimum(fields, jnp.int32(self.top))
        fields = jnp.maximum(fields, _is_positive(x))
        above = (x < jnp.float32(jnp.inf)) | (x < jnp.float32(0))
        return _as_fields(jnp.where(above, fields, jnp.int32(self.infinite)))

    def decode_fields(self, fields, prepared, multiply_add=multiply_add):
        unit, _ = prepared
        number = _float(fields | jnp.uint32(0x4B000000)) - jnp.float32(2.0**23)
        infinite = fields == jnp.uint32(self.infinite)
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
    def reach(self):
        return float(self._published(self.top + (not self.signed)))

    @property
    def finest(self):
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
        two_to_minus_i = _float((jnp.uint32(127) - i) << jnp.uint32(23))
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
        inside = number < jnp.float32(self.reach)
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
        up = number - here > _uniform(words) * (above - here)
        k = jnp.where(up, low + one, low).astype(jnp.int32)
        k = k - jnp.int32(not self.signed)
        k = jnp.where(inside, jnp.minimum(k, jnp.int32(self.top)), jnp.int32(self.top))
        if not self.signed:
            k = jnp.maximum(k, _is_positive(x))
            above = (x < jnp.float32(jnp.inf)) | (x < jnp.float32(0))
            return _as_fields(jnp.where(above, k, jnp.int32(self.infinite)))
        sign = lax.bitcast_convert_type(x, jnp.uint32) >> jnp.uint32(31)
        return _as_fields(k) | sign << jnp.uint32(self.bits - 1)

    def decode_fields(self, fields, prepared, multiply_add=multiply_add):
        unit, _ = prepared
        magnitude = fields & jnp.uint32(2 ** (self.bits - 1) - 1)
        if not self.signed:
            magnitude = fields + jnp.uint32(1)
        k = lax.bitcast_convert_type(magnitude, jnp.int32).astype(jnp.float32)
        value = self._values(k)
        if not self.signed:
            infinite = fields == jnp.uint32(self.infinite)
            value = jnp.where(infinite, jnp.float32(jnp.inf), value)
            return value * unit
        sign = (fields >> jnp.uint32(self.bits - 1)) << jnp.uint32(31)
        return _float(lax.bitcast_convert_type(value * unit, jnp.uint32) | sign)


# e of each code, by bits of a field and whether one of them is the sign. Eight bits of
# a first moment reach about as far down as the root of the second: where they end
# sooner (e = 3), updates of values far below their group's largest are noise of many
# times their size.
_COMPANDED = {(8, True): 4, (8, False): 4, (4, True): 1, (4, False): 2}
_LOG = {8: 5, 4: 3}


@functools.lru_cache(maxsize=64)
def code_of(name: str, bits: int, signed: bool, scale: str) -> Code:
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
