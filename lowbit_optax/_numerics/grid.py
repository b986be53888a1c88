"""Rounding float32 to the numbers of a format, and their patterns.

A number of the format is a float32 whose significand ends at a given bit: ``23 - m``
bits are dropped from float32's, and below the smallest normal as many more as the
exponent is too small. Rounding drops them as integers, because XLA may leave out a cast
and may flush subnormals to zero:

    magnitude -> (exponent, significand) -> round_off(significand, shift) -> magnitude

Rounding sees a format as seven integers, a :class:`Grid`. They can be traced: a program
can decide while it runs to which of two formats a tensor is rounded, and still rounds
it only once.

References:
  IEEE 754-2019, section 4.3.1.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit_optax._jaxprs.traced_once import traced_once
from lowbit_optax._numerics import rounding
from lowbit_optax._numerics.float_layouts import (
    INFINITY,
    MANTISSA,
    SIGN,
    FloatLayout,
    exponent_and_significand,
    magnitude_of,
    round_off_far,
)

Integer = jax.Array | np.uint32


class Grid(typing.NamedTuple):
    """A format as the integers that rounding to it needs, uint32 scalars.

    The grids of two formats can be mixed: :func:`jax.numpy.where` selects each field.

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
    magnitude = magnitude_of(x)
    exponent, significand = exponent_and_significand(magnitude)
    shift = jnp.where(
        magnitude < grid.smallest_exponent << np.uint32(MANTISSA),
        grid.drop_below + grid.smallest_exponent - exponent,
        grid.drop,
    )
    kept = round_off_far(significand, shift, random)
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
    sign = lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(SIGN)
    value = lax.bitcast_convert_type(sign | rounded, jnp.float32)
    return value, magnitude > grid.largest


def encode(layout: FloatLayout, x: jax.Array) -> jax.Array:
    """The patterns of a format's numbers; see ``FloatFormat.encode``."""
    drop, smallest = layout.max_extra_bits, layout.smallest_exponent
    largest = np.uint32(layout.special - 1)
    base = np.uint32((smallest - 1) << layout.mantissa_bits)
    x = rounding.to_float32(x)
    magnitude = magnitude_of(x)
    exponent, significand = exponent_and_significand(magnitude)
    pattern = jnp.where(
        magnitude < np.uint32(smallest << MANTISSA),
        significand >> jnp.minimum(np.uint32(drop + smallest) - exponent, 31),
        (magnitude >> np.uint32(drop)) - base,
    )
    past = magnitude > (largest + base) << np.uint32(drop)
    pattern = jnp.where(past, largest, pattern)
    nan = magnitude > np.uint32(INFINITY)
    if layout.specials == "nan":
        pattern = jnp.where(nan, np.uint32(layout.nan), pattern)
    elif layout.specials == "ieee":
        infinity = np.uint32(layout.special)
        payload = (magnitude >> np.uint32(drop)) & np.uint32(layout.hidden - 1)
        payload = jnp.where(payload == 0, np.uint32(layout.hidden >> 1), payload)
        pattern = jnp.where(magnitude == np.uint32(INFINITY), infinity, pattern)
        if layout.mantissa_bits:
            pattern = jnp.where(nan, infinity | payload, pattern)
    sign = lax.bitcast_convert_type(x, jnp.uint32) >> np.uint32(31)
    pattern = pattern | (sign << np.uint32(layout.width - 1))
    # The smallest unsigned integers that hold a pattern.
    return pattern.astype(f"uint{max(8, 1 << (layout.width - 1).bit_length())}")


def decode(layout: FloatLayout, patterns: jax.Array) -> jax.Array:
    """The float32 values of unsigned patterns, the inverse of :func:`encode`."""
    patterns = patterns.astype(jnp.uint32)
    sign = (patterns >> np.uint32(layout.width - 1)) << np.uint32(31)
    pattern = patterns & np.uint32(layout.largest)
    drop = np.uint32(layout.max_extra_bits)
    below = np.uint32(layout.smallest_exponent - 1)
    normal = (pattern << drop) + (below << np.uint32(MANTISSA))
    # A subnormal's leading bit is moved to the hidden one's place, unless it is one of
    # float32's subnormals.
    rise = drop + below
    up = jnp.minimum(lax.clz(pattern) - np.uint32(31 - MANTISSA), rise)
    subnormal = (pattern << up) + ((rise - up) << np.uint32(MANTISSA))
    value = jnp.where(pattern < np.uint32(layout.hidden), subnormal, normal)
    value = jnp.where(pattern == 0, np.uint32(0), value)
    if layout.specials != "none":
        special = np.uint32(INFINITY | 1 << (MANTISSA - 1))
        if layout.specials == "ieee":
            payload = (pattern & np.uint32(layout.hidden - 1)) << drop
            special = np.uint32(INFINITY) | payload
        value = jnp.where(pattern >= np.uint32(layout.special), special, value)
    return lax.bitcast_convert_type(sign | value, jnp.float32)
