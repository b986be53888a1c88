"""Rounding float32 to the numbers of a format, and their patterns.

A number of the format is a float32 whose significand ends at a given bit: ``23 - m``
bits are dropped from float32's, and below the smallest normal as many more as the
exponent is too small. Rounding drops them as integers, because XLA may leave out a cast
and may flush subnormals to zero:

    magnitude -> (exponent, significand) -> round_off(significand, shift) -> magnitude

Rounding sees a format as seven integers, a :class:`Grid`. They can be traced: which of
two formats a tensor is rounded to can then be decided while the program runs, and the
tensor is still rounded only once.

The patterns of numbers, sign, exponent and mantissa, are integer arithmetic too.

References:
  IEEE 754-2019, section 4.3.1.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit_optax._jaxprs.traced_once import traced_once
from lowbit_optax._numerics import float_layouts, rounding

MANTISSA = 23
SIGN = 0x80000000
INFINITY = 0x7F800000
"""float32's mantissa bits, sign and infinity."""

Integer = jax.Array | np.uint32
Specials = typing.Literal["none", "nan", "ieee"]


class Grid(typing.NamedTuple):
    """A format as the integers that rounding to it needs, uint32 scalars.

    Of the grids of two formats one can be selected field by field.

    Attributes:
      drop: how many bits of float32's significand a normal number leaves out.
      drop_below: how many a number just below the smallest normal leaves out.
      smallest_exponent: of the smallest normal, as float32 stores it.
      smallest: the smallest number above zero, a float32 pattern like the rest.
      largest: the largest finite number.
      past: what finite values past the largest become.
      infinite: what infinity becomes.

    >>> import jax, jax.numpy as jnp
    >>> from lowbit_optax._numerics.float_format import FloatFormat, grid_of
    >>> low, high = grid_of(FloatFormat(4, 3, 4)), grid_of(FloatFormat(6, 9))
    >>> def to_either(x, is_low):
    ...     grid = jax.tree.map(lambda a, b: jnp.where(is_low, a, b), low, high)
    ...     return round_to_grid(x, grid)[0]
    >>> [float(jax.jit(to_either)(jnp.float32(1.07), b)) for b in (True, False)]
    [1.125, 1.0703125]
    """

    drop: Integer
    drop_below: Integer
    smallest_exponent: Integer
    smallest: Integer
    largest: Integer
    past: Integer
    infinite: Integer


class PatternLayout(typing.NamedTuple):
    """What a format's patterns mean.

    Args:
      exponent_bits, mantissa_bits: of the format.
      specials: as in :class:`lowbit_optax.precision.FloatFormat`.
    """

    exponent_bits: int
    mantissa_bits: int
    specials: Specials

    @property
    def bits(self) -> int:
        """The width of a pattern, its sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def hidden(self) -> int:
        """The leading bit of a normal number's significand, which is not stored."""
        return 1 << self.mantissa_bits

    @property
    def mantissa_mask(self) -> int:
        """A pattern in which the mantissa's bits are 1."""
        return self.hidden - 1

    @property
    def all_ones(self) -> int:
        """The largest pattern without a sign."""
        return (1 << (self.bits - 1)) - 1

    @property
    def largest(self) -> int:
        """The pattern of the largest finite number."""
        past = {"none": 0, "nan": 1, "ieee": self.hidden}
        return self.all_ones - past[self.specials]

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned integers that hold a pattern."""
        return np.dtype(f"uint{max(8, 1 << (self.bits - 1).bit_length())}")


def round_to_grid(
    x: jax.Array, grid: Grid, random: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Round float32 to the format that a grid describes.

    Args:
      x: float32 array.
      grid: of ``float_format.grid_of``, or selected from several of its results.
      random: as in ``FloatFormat.round``.

    Returns:
      ``(rounded, overflowed)``: float32 as ``FloatFormat.round``'s, and bool as
      ``FloatFormat.overflows``'s.

    Raises:
      TypeError: x is not float32.
      ValueError: random is not uint32 of x's shape.
    """
    x = jnp.asarray(x)
    if x.dtype != jnp.float32:
        raise TypeError(f"x must be float32, got {x.dtype} {x.shape}")
    if random is not None and (random.dtype, random.shape) != (jnp.uint32, x.shape):
        raise ValueError(
            f"random must be uint32 {x.shape}, got {random.dtype} {random.shape}"
        )
    return traced_once(_round_to_grid)(x, grid, random)


def _round_to_grid(x: jax.Array, grid: Grid, random: jax.Array | None):
    """See :func:`round_to_grid`."""
    bits = bits_of(x)
    magnitude = magnitude_of(x)
    exponent, significand = split(magnitude)
    shift = jnp.where(
        magnitude < smallest_normal_of(grid),
        grid.drop_below + grid.smallest_exponent - exponent,
        grid.drop,
    )
    # Random numbers have 31 bits, so a longer shift begins with a plain one, which may
    # stop at 31 bits because no significand has more.
    before = jnp.minimum(shift - jnp.minimum(shift, np.uint32(31)), np.uint32(31))
    kept = float_layouts.round_off(
        significand >> before, jnp.minimum(shift, np.uint32(31)), random
    )
    # The hidden bit adds 1 to the exponent, and so does one carried out of it.
    base = (exponent - np.uint32(1)) << np.uint32(MANTISSA)
    rounded = jnp.where(
        shift <= np.uint32(MANTISSA),
        (kept << jnp.minimum(shift, np.uint32(MANTISSA))) + base,
        kept * grid.smallest,
    )
    infinity = np.uint32(INFINITY)
    beyond = jnp.where(magnitude == infinity, grid.infinite, grid.past)
    rounded = jnp.where(rounded > grid.largest, beyond, rounded)
    rounded = jnp.where(magnitude > infinity, magnitude, rounded)
    sign = bits & np.uint32(SIGN)
    return (
        lax.bitcast_convert_type(sign | rounded, jnp.float32),
        magnitude > grid.largest,
    )


def encode(layout: PatternLayout, grid: Grid, x: jax.Array) -> jax.Array:
    """The patterns of numbers of a format.

    Args:
      layout, grid: of the format.
      x: float array of the format's numbers; see ``FloatFormat.encode`` for others.

    Returns:
      An array of the layout's dtype.
    """
    m = layout.mantissa_bits
    x = rounding.to_float32(x)
    magnitude = magnitude_of(x)
    exponent, significand = split(magnitude)
    deep = jnp.minimum(grid.drop + grid.smallest_exponent - exponent, 31)
    pattern = jnp.where(
        magnitude < smallest_normal_of(grid),
        significand >> deep,
        (magnitude >> grid.drop) - ((grid.smallest_exponent - 1) << np.uint32(m)),
    )
    pattern = jnp.where(magnitude > grid.largest, np.uint32(layout.largest), pattern)
    nan = magnitude > np.uint32(INFINITY)
    if layout.specials == "nan":
        pattern = jnp.where(nan, np.uint32(layout.all_ones), pattern)
    elif layout.specials == "ieee":
        infinity = np.uint32(layout.largest + 1)
        payload = (magnitude >> grid.drop) & np.uint32(layout.mantissa_mask)
        quiet = np.uint32(layout.hidden >> 1)
        payload = jnp.where(payload == 0, quiet, payload)
        pattern = jnp.where(magnitude == np.uint32(INFINITY), infinity, pattern)
        if m:
            pattern = jnp.where(nan, infinity | payload, pattern)
    sign = bits_of(x) >> np.uint32(31)
    pattern = pattern | (sign << np.uint32(layout.bits - 1))
    return pattern.astype(layout.dtype)


def decode(layout: PatternLayout, grid: Grid, patterns: jax.Array) -> jax.Array:
    """The values of patterns, the inverse of :func:`encode`.

    Args:
      layout, grid: of the format.
      patterns: unsigned integers.

    Returns:
      float32 array.
    """
    patterns = patterns.astype(jnp.uint32)
    sign = (patterns >> np.uint32(layout.bits - 1)) << np.uint32(31)
    pattern = patterns & np.uint32(layout.all_ones)
    base = (grid.smallest_exponent - np.uint32(1)) << np.uint32(MANTISSA)
    normal = (pattern << grid.drop) + base
    # A subnormal's leading bit is moved to the hidden one's place, unless it is one of
    # float32's subnormals.
    rise = grid.drop + grid.smallest_exponent - np.uint32(1)
    up = jnp.minimum(lax.clz(pattern) - np.uint32(31 - MANTISSA), rise)
    subnormal = (pattern << up) + ((rise - up) << np.uint32(MANTISSA))
    value = jnp.where(pattern < np.uint32(layout.hidden), subnormal, normal)
    value = jnp.where(pattern == 0, np.uint32(0), value)
    if layout.specials != "none":
        payload = (pattern & np.uint32(layout.mantissa_mask)) << grid.drop
        special = np.uint32(INFINITY) | payload
        if layout.specials == "nan":
            special = np.uint32(INFINITY | 1 << (MANTISSA - 1))
        value = jnp.where(pattern > np.uint32(layout.largest), special, value)
    return lax.bitcast_convert_type(sign | value, jnp.float32)


def bits_of(x: jax.Array) -> jax.Array:
    """The bit patterns of float32 numbers, as uint32.

    >>> import jax.numpy as jnp
    >>> hex(bits_of(jnp.float32(1)))
    '0x3f800000'
    """
    return lax.bitcast_convert_type(x, jnp.uint32)


def magnitude_of(x: jax.Array) -> jax.Array:
    """float32's pattern without its sign, uint32."""
    return bits_of(x) & np.uint32(SIGN - 1)


def split(magnitude: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32's exponent, 1 for its subnormals, and significand with its hidden bit."""
    hidden = np.uint32(1 << MANTISSA)
    stored = magnitude >> np.uint32(MANTISSA)
    fraction = magnitude & (hidden - np.uint32(1))
    significand = jnp.where(stored > 0, fraction | hidden, fraction)
    return jnp.maximum(stored, np.uint32(1)), significand


def smallest_normal_of(grid: Grid) -> Integer:
    """The smallest normal's float32 pattern, uint32."""
    return grid.smallest_exponent << np.uint32(MANTISSA)
