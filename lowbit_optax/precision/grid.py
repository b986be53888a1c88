"""Rounding float32 to the numbers of a format, which may be a traced one.

A number of the format is a float32 whose significand ends at a given bit: ``23 - m``
bits are dropped from float32's, and below the smallest normal as many more as the
exponent is too small. Rounding drops them as integers, because XLA may leave out a cast
and may flush subnormals to zero:

    magnitude -> (exponent, significand) -> round_off(significand, shift) -> magnitude

Rounding sees a format as seven integers, a :class:`Grid`. They can be traced: which of
two formats a tensor is rounded to can then be decided while the program runs, and the
tensor is still rounded only once.

References:
  IEEE 754-2019, section 4.3.1.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit_optax._jaxprs.traced_once import traced_once
from lowbit_optax._numerics import float_layouts

MANTISSA = 23
SIGN = 0x80000000
INFINITY = 0x7F800000
"""float32's mantissa bits, sign and infinity."""


Integer = jax.Array | np.uint32


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
    >>> from lowbit_optax.precision.float_format import FloatFormat, grid_of
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
