"""Bit patterns of float32 values in a narrow format with k more mantissa bits.

The extended format has the E exponent bits of the narrow format, and M + k mantissa
bits. Without the sign, its patterns are integers that sort like the magnitudes. All
computations with stored weights are integer arithmetic on these patterns:

* rounding float32 to the narrow format is the case k = 0,
* ``pattern = (param << k) + residual`` joins a parameter and its extra bits,
* ``pattern - (param << k)`` is the residual for a given parameter.

The arithmetic uses integers for two reasons. XLA may remove a round trip float32 ->
bfloat16 -> float32, so a rounding error measured with casts would be zero on a GPU. And
arithmetic on float32's subnormal numbers may flush them to zero.

For bfloat16, the extended pattern is the leading 16 + k bits of the float32.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MANTISSA = 23
BIAS = 127
INFINITY = 0x7F800000
SIGN = 0x80000000
"""float32's mantissa bits, exponent bias, infinity, and sign bit."""

Specials = typing.Literal["none", "nan", "ieee"]

TOWARD_ZERO = 0
"""Pass this instead of random bits to drop the last bits without rounding up."""

RoundingBits = jax.Array | typing.Literal[0] | None
"""How to round: uint32 random bits, :data:`TOWARD_ZERO`, or None (to nearest)."""


@dataclasses.dataclass(frozen=True)
class FloatLayout:
    """The meaning of the bit patterns of a float format.

    Args:
      exponent_bits, mantissa_bits, bias: as in IEEE 754.
      specials: as in :class:`lowbit_optax.precision.FloatFormat`.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials = "ieee"

    @property
    def max_extra_bits(self) -> int:
        """Number of extra bits that makes normal float32 numbers in range exact."""
        return MANTISSA - self.mantissa_bits

    @property
    def width(self) -> int:
        """Number of bits of a pattern, including the sign."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def hidden(self) -> int:
        """Leading bit of the significand of normal numbers, which is not stored."""
        return 1 << self.mantissa_bits

    @property
    def largest(self) -> int:
        """Largest magnitude pattern, which is all ones."""
        return (1 << (self.width - 1)) - 1

    @property
    def special(self) -> int:
        """Smallest magnitude pattern that is not a finite number."""
        count = {"none": 0, "nan": 1, "ieee": self.hidden}[self.specials]
        return self.largest + 1 - count

    @property
    def nan(self) -> int:
        """Magnitude pattern of a quiet NaN."""
        return self.special | (self.hidden >> 1)

    @property
    def has_infinity(self) -> bool:
        """Whether ``special`` is infinity and not NaN."""
        return self.specials == "ieee"

    @property
    def same_exponent(self) -> bool:
        """Whether the exponent has 8 bits, as in float32 and bfloat16."""
        return self.exponent_bits == 8

    @property
    def smallest_exponent(self) -> int:
        """Exponent of the smallest normal number, as float32 stores it."""
        return BIAS + 1 - self.bias


_LAYOUTS = {
    np.dtype(jnp.bfloat16): FloatLayout(8, 7, 127),
    np.dtype(jnp.float16): FloatLayout(5, 10, 15),
    np.dtype(jnp.float8_e4m3fn): FloatLayout(4, 3, 7, "nan"),
    np.dtype(jnp.float8_e5m2): FloatLayout(5, 2, 15),
}
NARROW_DTYPES = tuple(_LAYOUTS)


def is_narrow(dtype: jax.typing.DTypeLike) -> bool:
    """Return whether weight formats can store parameters in this dtype."""
    # numpy does not know the dtype of typed random keys.
    return jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype) in _LAYOUTS


def layout_of(dtype: jax.typing.DTypeLike) -> FloatLayout:
    """Return the layout of a narrow dtype; raise a KeyError for other dtypes."""
    return _LAYOUTS[np.dtype(dtype)]


def to_bits(x: jax.Array) -> jax.Array:
    """Return the patterns of a narrow float array as uint32, including signs."""
    unsigned = f"uint{layout_of(x.dtype).width}"
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def from_bits(bits: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return the narrow float array with these patterns; inverts :func:`to_bits`."""
    unsigned = f"uint{layout_of(dtype).width}"
    return lax.bitcast_convert_type(bits.astype(unsigned), np.dtype(dtype))


def magnitude_of(x: jax.Array) -> jax.Array:
    """Return the uint32 patterns of float32 numbers without their signs."""
    return lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(SIGN - 1)


def exponent_and_significand(magnitude: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return float32 exponents (1 for subnormals) and significands with hidden bits."""
    hidden = 1 << MANTISSA
    stored = magnitude >> jnp.uint32(MANTISSA)
    fraction = magnitude & jnp.uint32(hidden - 1)
    significand = jnp.where(stored > 0, fraction | jnp.uint32(hidden), fraction)
    return jnp.maximum(stored, jnp.uint32(1)), significand


def round_off(value: jax.Array, shift, random: RoundingBits = None) -> jax.Array:
    """Return ``value / 2^shift`` as uint32, rounded as ``random`` specifies.

    Stochastic rounding rounds up with exactly the probability (dropped bits) / 2^shift.

    Args:
      value: uint32, less than 2^31.
      shift: an int or a uint32 array, from 0 to 31.
      random: uint32 random bits for stochastic rounding, which uses the leading
        ``shift`` bits; :data:`TOWARD_ZERO`; or None to round to nearest even.
    """
    if isinstance(shift, int):
        if shift == 0:
            return value
        shift = jnp.uint32(shift)
    return rounded_before_shift(value, shift, random) >> shift


def rounded_before_shift(
    value: jax.Array, shift, random: RoundingBits = None
) -> jax.Array:
    """Return ``value`` plus the offset that :func:`round_off` adds before the shift."""
    if random is TOWARD_ZERO:
        return value
    one = jnp.uint32(1)
    if isinstance(shift, int):
        half = jnp.uint32((1 << (shift - 1)) - 1)
        shift = jnp.uint32(shift)
    else:
        half = (one << (jnp.maximum(shift, one) - one)) - one
    if random is None:
        # Add half - 1 plus the last kept bit, so that ties are rounded up only if that
        # bit is 1. With shift 0, the kept bit must not be added.
        odd = (value >> shift) & jnp.minimum(shift, one)
        return value + half + odd
    return value + ((random >> one) >> (jnp.uint32(31) - shift))


def round_off_far(
    significand: jax.Array, shift: jax.Array, random: RoundingBits
) -> jax.Array:
    """Apply :func:`round_off` to a float32 significand, with any shift.

    Rounding uses at most 31 random bits. A larger shift first drops the lowest bits, at
    most 31 of them, because significands have fewer.
    """
    most = jnp.uint32(31)
    near = jnp.minimum(shift, most)
    before = jnp.minimum(shift - near, most)
    return round_off(significand >> before, near, random)


def to_pattern(
    x: jax.Array,
    layout: FloatLayout,
    extra: int,
    random: RoundingBits,
    nans: tuple[int, int],
) -> tuple[jax.Array, jax.Array]:
    """Round float32 numbers to patterns of a format with ``extra`` more bits.

    Args:
      x: float32 array.
      layout: layout of the narrow format.
      extra: k, from 0 to ``layout.max_extra_bits``.
      random: as in :func:`round_off`.
      nans: first and last pattern to which NaNs are clipped if all bits of float32 are
        kept (bfloat16 with 16 extra bits). If fewer bits are kept, every NaN becomes
        the same quiet NaN, without a sign in bfloat16.

    Returns:
      ``(sign, magnitude)`` as uint32. The sign bit is in the same position as in
      float32. Values past the largest finite number become infinity, or NaN if the
      format has no infinity. NaN stays NaN.
    """
    sign = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(SIGN)
    magnitude = magnitude_of(x)
    nan = magnitude > jnp.uint32(INFINITY)
    drop = layout.max_extra_bits - extra

    if layout.same_exponent:
        if drop:
            kept = jnp.uint32(layout.nan << extra)
            sign = jnp.where(nan, jnp.uint32(0), sign)
        else:
            kept = jnp.clip(magnitude, *map(jnp.uint32, nans))
        return sign, jnp.where(nan, kept, round_off(magnitude, drop, random))

    smallest = layout.smallest_exponent
    bias_gap = jnp.uint32((smallest - 1) << MANTISSA)
    normal = round_off(magnitude - bias_gap, drop, random)
    # Below the smallest normal number of the format, the spacing is constant, so shift
    # the significand down as an integer.
    exponent, significand = exponent_and_significand(magnitude)
    is_normal = magnitude >= jnp.uint32(smallest << MANTISSA)
    deep = jnp.where(is_normal, jnp.uint32(0), jnp.uint32(smallest + drop) - exponent)
    pattern = jnp.where(is_normal, normal, round_off_far(significand, deep, random))
    special = jnp.uint32(layout.special << extra)
    top = (1 << layout.exponent_bits) - layout.has_infinity  # one past the largest
    past = magnitude >= jnp.uint32((top + smallest - 1) << MANTISSA)
    pattern = jnp.minimum(jnp.where(past, special, pattern), special)
    return sign, jnp.where(nan, jnp.uint32(layout.nan << extra), pattern)


def from_pattern(
    sign: jax.Array, magnitude: jax.Array, layout: FloatLayout, extra: int
) -> jax.Array:
    """Return the exact float32 values of the results of :func:`to_pattern`.

    The format must have fewer exponent bits than float32. Otherwise, the pattern is
    the pattern of the float32 value, without its last bits.
    """
    rise = layout.max_extra_bits - extra
    bias_gap = jnp.uint32((layout.smallest_exponent - 1) << MANTISSA)
    normal = (magnitude << jnp.uint32(rise)) + bias_gap
    spacing = 2.0 ** (1 - layout.bias - layout.mantissa_bits - extra)
    subnormal = lax.bitcast_convert_type(
        magnitude.astype(jnp.float32) * jnp.float32(spacing), jnp.uint32
    )
    smallest = jnp.uint32(layout.hidden << extra)
    value = jnp.where(magnitude < smallest, subnormal, normal)
    special, nan = jnp.uint32(layout.special << extra), INFINITY | 1 << 22
    beyond = jnp.uint32(INFINITY if layout.has_infinity else nan)
    value = jnp.where(magnitude >= special, beyond, value)
    if layout.has_infinity:
        value = jnp.where(magnitude > special, jnp.uint32(nan), value)
    return lax.bitcast_convert_type(sign | value, jnp.float32)
