"""Rounding float32 to narrow formats, in forms that XLA keeps on every backend.

``x.astype(bfloat16).astype(float32)`` is not such a form: XLA:GPU drops the round trip.
These functions work on the integer patterns instead.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit_optax._numerics import float_layouts, splitting


def to_float32(x: jax.Array) -> jax.Array:
    """Widen a narrow float array to float32, exactly, without a cast XLA could merge.

    Args:
      x: bfloat16, float16, float8_e4m3fn or float8_e5m2; other dtypes are cast.

    Returns:
      float32 array of the same shape.

    >>> import jax.numpy as jnp
    >>> to_float32(jnp.bfloat16(1.5))
    Array(1.5, dtype=float32)
    """
    if not float_layouts.is_narrow(x.dtype):
        return x.astype(jnp.float32)
    return splitting.join(x, None, 0, "nearest")


def round_nearest(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Round float32 to the nearest value of a narrow dtype, ties to even.

    Args:
      x: float32 array.
      dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2.

    Returns:
      Array of ``dtype``. Values that round past the largest finite one become infinity
      (NaN in float8_e4m3fn), as in a cast.

    >>> import jax.numpy as jnp
    >>> round_nearest(jnp.float32(0.999), jnp.bfloat16)
    Array(1, dtype=bfloat16)
    """
    layout = float_layouts.layout_of(dtype)
    return splitting.split(x, layout, 0, "nearest")[0]


def round_toward_zero(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Round float32 to a narrow dtype by dropping the bits that do not fit.

    Args:
      x: float32 array.
      dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2.

    Returns:
      Array of ``dtype``, nowhere larger in magnitude than ``x``: finite values past the
      largest one become that one.

    >>> import jax.numpy as jnp
    >>> round_toward_zero(jnp.float32(-0.999), jnp.bfloat16)
    Array(-0.996094, dtype=bfloat16)
    """
    layout = float_layouts.layout_of(dtype)
    # Stochastic rounding that always draws 0 drops the bits.
    never_up = jnp.zeros(x.shape, jnp.uint32)
    sign, pattern = splitting.pattern_of(x, layout, 0, "nearest", never_up)
    largest = jnp.minimum(pattern, jnp.uint32(layout.special - 1))
    pattern = jnp.where(jnp.isfinite(x), largest, pattern)
    return splitting.round_param(sign, pattern, layout, 0, "nearest")


def round_stochastic(
    x: jax.Array, dtype: jax.typing.DTypeLike, random: jax.Array
) -> jax.Array:
    """Round float32 to a neighbour in a narrow dtype, so that the mean is ``x``.

    With ``a <= x <= b`` the neighbours, the result is b with probability
    ``(x - a) / (b - a)``.

    Args:
      x: float32 array.
      dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2.
      random: uint32 array of x's shape, all 32 bits random. bfloat16 uses the leading
        16 bits; float16 and float8 use 13, 20 or 21 bits for normal results and up to
        31 for subnormal ones.

    Returns:
      Array of ``dtype``. Past the largest finite value it rounds to nearest.

    References:
      Zamirai et al. 2020, section 3.2, "Stochastic Rounding".

    >>> import jax.numpy as jnp
    >>> round_stochastic(jnp.float32(1 + 2**-8), jnp.bfloat16, jnp.uint32(0))
    Array(1, dtype=bfloat16)
    """
    layout = float_layouts.layout_of(dtype)
    return splitting.split(x, layout, 0, "nearest", random_residual=random)[0]


def round_significand(
    x: jax.Array,
    mantissa_bits: int,
    random: jax.Array | None = None,
    saturates: bool = False,
) -> jax.Array:
    """Round float32 to bfloat16 numbers of fewer mantissa bits.

    Args:
      x: float32 array.
      mantissa_bits: 1 to 7.
      random: uint32 array of x's shape, whose leading ``23 - mantissa_bits`` bits are
        used to round stochastically; None rounds to nearest even.
      saturates: whether finite values past the largest number become it; infinity
        otherwise.

    Returns:
      bfloat16 array.

    >>> import jax.numpy as jnp
    >>> round_significand(jnp.float32([1.1, 1.2, -1.2]), 2)
    Array([1, 1.25, -1.25], dtype=bfloat16)
    """
    drop = 23 - mantissa_bits
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = bits & jnp.uint32(0x7FFFFFFF)
    infinity = 0x7F800000
    kept = jnp.uint32(0xFFFFFFFF >> drop << drop)
    rounded = float_layouts.rounded_before_shift(magnitude, drop, random) & kept
    past = infinity - (1 << drop) if saturates else infinity
    rounded = jnp.where(rounded < jnp.uint32(infinity), rounded, jnp.uint32(past))
    is_nan = magnitude > jnp.uint32(infinity)
    special = jnp.where(is_nan, jnp.uint32(0x7FC00000), magnitude)
    rounded = jnp.where(magnitude < jnp.uint32(infinity), rounded, special)
    pattern = rounded | (bits & jnp.uint32(0x80000000))
    return float_layouts.from_bits(pattern >> jnp.uint32(16), jnp.bfloat16)


def round_to_precision(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Round float32 to the nearest value of a narrow dtype, kept as float32.

    >>> import jax.numpy as jnp
    >>> round_to_precision(jnp.float32(0.3), jnp.bfloat16)
    Array(0.30078125, dtype=float32)
    """
    return to_float32(round_nearest(x, dtype))


def narrow_or_cast(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Round to nearest in any float dtype; this is the cast that exact landing assumes.

    Args:
      x: float array.
      dtype: any float dtype; narrow ones are rounded on integer patterns.
    """
    if float_layouts.is_narrow(dtype):
        return round_nearest(to_float32(x), dtype)
    return lax.convert_element_type(x, np.dtype(dtype))
