"""Rounding of float32 to the numbers of a format, and their bit patterns.

A number of the format is a float32 whose significand ends at a certain bit. Normal
numbers drop the last ``23 - m`` bits of float32's significand. Numbers below the
smallest normal one drop one more bit for each exponent below it. Rounding drops these
bits with integer arithmetic, because XLA may remove casts and flush subnormals to zero:

    magnitude -> (exponent, significand) -> round_off(significand, shift) -> magnitude

A :class:`Grid` describes a format as seven integers. They can be traced, so a program
can choose one of two formats at run time, and round only once.

References:
  IEEE 754-2019, section 4.3.1.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit_optax._jaxprs.compiling import traced_once
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
    """Describes a format with the uint32 scalars that rounding needs.

    To select one of two formats at run time, apply :func:`jax.numpy.where` to each
    field.

    Attributes:
      drop: number of significand bits that normal numbers drop.
      drop_below: number of bits that numbers just below the smallest normal one drop.
      smallest_exponent: exponent of the smallest normal number, as float32 stores it.
      smallest: float32 pattern of the smallest positive number.
      largest: float32 pattern of the largest finite number.
      past: float32 pattern of the result for finite values past the largest number.
      infinite: float32 pattern of the result for infinity.

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
      grid: result of ``float_format.grid_of``, or a selection from several results.
      random: as in ``FloatFormat.round``.

    Returns:
      ``(rounded, overflowed)``: the results of ``FloatFormat.round`` in float32, and of
      ``FloatFormat.overflows``.

    Raises:
      TypeError: if x is not float32.
      ValueError: if random is not uint32 with the shape of x.
    """
    x = jnp.asarray(x)
    if x.dtype != jnp.float32:
        raise TypeError(f"round_to_grid: x must be float32, got {x.dtype} {x.shape}")
    if random is not None and (random.dtype, random.shape) != (jnp.uint32, x.shape):
        raise ValueError(
            f"round: random must be uint32 {x.shape}, got {random.dtype} {random.shape}"
        )
    return traced_once(_round_to_grid)(x, grid, random)


def _round_to_grid(x: jax.Array, grid: Grid, random: jax.Array | None):
    magnitude = magnitude_of(x)
    exponent, significand = exponent_and_significand(magnitude)
    shift = jnp.where(
        magnitude < grid.smallest_exponent << np.uint32(MANTISSA),
        grid.drop_below + grid.smallest_exponent - exponent,
        grid.drop,
    )
    kept = round_off_far(significand, shift, random)
    # The hidden bit adds 1 to the exponent, and so does a carry out of it.
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
    """Return the bit patterns of numbers; see ``FloatFormat.encode``."""
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
    # Use the smallest unsigned dtype that can store a pattern.
    return pattern.astype(f"uint{max(8, 1 << (layout.width - 1).bit_length())}")


def decode(layout: FloatLayout, patterns: jax.Array) -> jax.Array:
    """Return the float32 values of bit patterns; inverts :func:`encode`."""
    patterns = patterns.astype(jnp.uint32)
    sign = (patterns >> np.uint32(layout.width - 1)) << np.uint32(31)
    pattern = patterns & np.uint32(layout.largest)
    drop = np.uint32(layout.max_extra_bits)
    below = np.uint32(layout.smallest_exponent - 1)
    normal = (pattern << drop) + (below << np.uint32(MANTISSA))
    # Shift the leading bit of a subnormal number to the position of the hidden bit,
    # unless the number is also subnormal in float32.
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
