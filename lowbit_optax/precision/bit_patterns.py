"""Numbers of a format as bit patterns: sign, exponent, mantissa.

As in :mod:`lowbit_optax.precision.grid` everything is integer arithmetic on float32's
own patterns, because XLA may flush subnormals to zero.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit_optax.precision.grid import (
    INFINITY,
    MANTISSA,
    Grid,
    bits_of,
    magnitude_of,
    smallest_normal_of,
    split,
)

Specials = typing.Literal["none", "nan", "ieee"]


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


def encode(x: jax.Array, layout: PatternLayout, grid: Grid) -> jax.Array:
    """The patterns of numbers of a format.

    Args:
      x: float32 array of the format's numbers; see ``FloatFormat.encode`` for others.
      layout, grid: of the format.

    Returns:
      An array of the layout's dtype.
    """
    m = layout.mantissa_bits
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


def decode(patterns: jax.Array, layout: PatternLayout, grid: Grid) -> jax.Array:
    """The values of patterns, the inverse of :func:`encode`.

    Args:
      patterns: unsigned integers.
      layout, grid: of the format.

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
