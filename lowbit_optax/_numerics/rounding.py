"""Rounding float32 to a narrow dtype, and keeping the next k bits as a residual.

On a GPU, ``x.astype(bfloat16).astype(float32)`` rounds nothing, because XLA removes the
round trip. The functions of this module compute with integer patterns instead,
elementwise.

Let ``w`` be the pattern of a float32 master, without its sign, in the parameter's
format with k more mantissa bits (:mod:`lowbit_optax._numerics.float_layouts`). Then

    nearest       p = (w + 2^(k-1)) >> k      e = w - (p << k) in [-2^(k-1), 2^(k-1))
    toward_zero   p = w >> k                  e = w - (p << k) in [0, 2^k)
    stochastic    p = (w + r) >> k            e = w - (p << k) in [-2^k, 2^k)

with r uniform on the integers of [0, 2^k). ``e`` is stored in two's complement
(unsigned for ``toward_zero``). Its sign shows whether the parameter was rounded up, so
joining needs no separate flag. ``stochastic`` stores k + 1 bits; the additional bit is
the paper's un-round bit.

``w`` itself is the master rounded to k extra bits: to nearest even, toward zero or
stochastically. If k = 0, it is the parameter.

**A chosen neighbor.** Stochastic rounding returns the upper neighbor of x if the word,
as a fraction, is at least 1 - f. Here f is the distance from the lower neighbor to x,
divided by the spacing. If the word is the fraction ``1/2 + d / spacing`` instead of
random, the result is the neighbor that is nearer to x + d. If x + d is not between the
two neighbors, the result is the neighbor on the same side.

**Sums.** float32 loses updates below 2^-25 of the weight, and rounds updates that are
not much larger. The error of the sum is known exactly (Dekker's Fast2Sum). A sum that
is rounded stochastically is the next float32 in the direction of the error, with the
probability that keeps the mean:

    s = fl(w + u)        e = u - fl(s - w)
    s' = next float32 after s in the direction of e   with probability |e| / ulp
         s                                            otherwise

where ulp is the distance between the two numbers. If e points to zero, this is the
spacing below s, which is smaller for powers of two, such as weights of exactly 1.

References:
  Lewandowski and Kosson, "Memory Efficient Mixed Precision Optimizers", 2023, section
    3.1: extra bits, rounding toward zero and stochastic with un-round bit.
  Dekker 1971, "A floating-point technique for extending the available precision".
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit_optax._numerics import float_layouts
from lowbit_optax._numerics.codes import as_fields, bits_of, float_of
from lowbit_optax._numerics.float_layouts import (
    BIAS,
    INFINITY,
    MANTISSA,
    SIGN,
    FloatLayout,
)
from pallas_kernels import operations

Rounding = typing.Literal["nearest", "stochastic", "toward_zero"]


def stored_bits(extra: int, rounding: Rounding) -> int:
    """Return the number of bits stored for a residual with ``extra`` bits.

    >>> stored_bits(8, "nearest"), stored_bits(8, "stochastic")
    (8, 9)
    """
    return extra + 1 if extra and rounding == "stochastic" else extra


def pattern_of(
    master: jax.Array,
    dtype: jax.typing.DTypeLike,
    extra: int,
    rounding: Rounding,
    random: float_layouts.RoundingBits = None,
) -> tuple[jax.Array, jax.Array]:
    """Return ``(sign, w)`` of a float32 master as uint32. The sign is the leading bit.

    A NaN gets a pattern that stays NaN when it is rounded to the parameter. ``random``
    specifies how the master is rounded to k extra bits, as in
    :func:`lowbit_optax._numerics.float_layouts.round_off`.
    """
    layout = float_layouts.layout_of(dtype)
    first, last = layout.special + 1 << extra, layout.largest << extra
    if rounding == "nearest" and extra:
        first, last = first - (1 << (extra - 1)), last + (1 << (extra - 1)) - 1
    elif rounding == "toward_zero":
        last += (1 << extra) - 1
    if extra == 0:
        random = _nearest_past_the_largest(master, dtype, random)
    return float_layouts.to_pattern(master, layout, extra, random, (first, last))


def _nearest_past_the_largest(
    master: jax.Array, dtype: jax.typing.DTypeLike, random: float_layouts.RoundingBits
) -> float_layouts.RoundingBits:
    """Return ``random``, changed for numbers past the largest finite value.

    For these numbers, the bits become one half, so that the numbers are rounded to
    nearest, with ties to even, as in a cast.
    """
    if random is None or random is float_layouts.TOWARD_ZERO:
        return random
    has_infinity = float_layouts.layout_of(dtype).has_infinity
    half = jnp.uint32(0x80000000 if has_infinity else 0x7FFFFFFF)
    largest = jnp.float32(jnp.finfo(dtype).max)
    return jnp.where(jnp.abs(master) <= largest, random, half)


def round_param(
    sign: jax.Array,
    pattern: jax.Array,
    dtype: jax.typing.DTypeLike,
    extra: int,
    rounding: Rounding,
    random: jax.Array | None = None,
) -> jax.Array:
    """Return the parameter for a sign and a pattern from :func:`pattern_of`.

    ``random`` contains uint32 random bits for ``"stochastic"``, which uses the leading
    k bits.
    """
    layout = float_layouts.layout_of(dtype)
    if extra == 0:
        magnitude = pattern
    elif rounding == "toward_zero":
        magnitude = pattern >> jnp.uint32(extra)
    else:
        half = jnp.uint32(1 << (extra - 1))
        magnitude = (pattern + half) >> jnp.uint32(extra)
        if not layout.has_infinity:
            # Round a tie between the largest finite value and NaN down, as in a cast.
            largest = layout.special - 1
            tie = jnp.uint32((largest << extra) + (1 << (extra - 1)))
            magnitude = jnp.where(pattern == tie, jnp.uint32(largest), magnitude)
        if rounding == "stochastic":
            assert random is not None, "stochastic rounding needs random bits"
            up = random >> jnp.uint32(32 - extra)
            drawn = (pattern + up) >> jnp.uint32(extra)
            # Past the largest finite value, a random number could give infinity.
            inside = pattern <= jnp.uint32((layout.special - 1) << extra)
            magnitude = jnp.where(inside, drawn, magnitude)
    shift = jnp.uint32(32 - layout.width)
    return float_layouts.from_bits((sign >> shift) | magnitude, dtype)


def residual_of(
    sign: jax.Array,
    pattern: jax.Array,
    param: jax.Array,
    extra: int,
    rounding: Rounding,
) -> jax.Array:
    """Return the residual that, joined with ``param``, comes closest to the pattern.

    For parameters from :func:`round_param`, the residual is exact, with one exception:
    464 in float8_e4m3fn, the tie between the largest finite value and NaN, whose
    residual is one unit too small with ``"nearest"``. For other parameters (see
    :mod:`lowbit_optax._numerics.landing`), the residual saturates. Residuals are uint32
    fields of ``stored_bits(extra, rounding)`` bits.
    """
    layout = float_layouts.layout_of(param.dtype)
    bits = float_layouts.to_bits(param)
    magnitude = bits & jnp.uint32(layout.largest)
    # If the signs differ, zero is between the master and the parameter. In bfloat16,
    # the residual stops at zero: masters on the other side are smaller than float32's
    # normal numbers, and join would need extra operations to recognize them. (Also, the
    # difference of two 31-bit patterns, one of them negative, may overflow an int32.)
    same_sign = (bits >> jnp.uint32(layout.width - 1)) == (sign >> jnp.uint32(31))
    ahead = pattern.astype(jnp.int32)
    behind = jnp.int32(0) if layout.same_exponent else -ahead
    ahead = jnp.where(same_sign, ahead, behind)
    error = ahead - (magnitude << jnp.uint32(extra)).astype(jnp.int32)
    width = stored_bits(extra, rounding)
    low = 0 if rounding == "toward_zero" else -(1 << (width - 1))
    high = low + (1 << width) - 1
    error = jnp.clip(error, jnp.int32(low), jnp.int32(high))
    return error.astype(jnp.uint32) & jnp.uint32((1 << width) - 1)


def split(
    master: jax.Array,
    dtype: jax.typing.DTypeLike,
    extra: int,
    rounding: Rounding,
    random_param: jax.Array | None = None,
    random_residual: float_layouts.RoundingBits = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Split a master into a parameter and its residual.

    The result is the same as from :func:`pattern_of`, :func:`round_param` and
    :func:`residual_of` in this order. bfloat16 needs fewer operations: the parameter is
    the rounded pattern itself, so the residual modulo 2^k is the low k bits of the
    pattern.

    Args:
      master: float32.
      dtype, extra, rounding: as in these functions.
      random_param: uint32 random bits for the parameter with ``"stochastic"``.
      random_residual: how to round the master to k extra bits, as in
        :func:`pattern_of`.

    Returns:
      ``(param, fields)``: the parameter, and uint32 fields of ``stored_bits(extra,
      rounding)`` bits, or None without extra bits.
    """
    layout = float_layouts.layout_of(dtype)
    simple = layout.same_exponent and (rounding != "stochastic" or not extra)
    if not simple:
        sign, pattern = pattern_of(master, dtype, extra, rounding, random_residual)
        param = round_param(sign, pattern, dtype, extra, rounding, random_param)
        if not extra:
            return param, None
        return param, residual_of(sign, pattern, param, extra, rounding)
    if not extra and random_residual is None:
        return operations.round_to_bfloat16(master), None
    # bfloat16's pattern is the leading bits of float32's. The sign bit can stay above
    # it, because rounding numbers or infinity never carries into the sign.
    most = layout.max_extra_bits
    drop = most - extra
    if drop:
        if not extra:
            random_residual = _nearest_past_the_largest(master, dtype, random_residual)
        # Replace NaNs before the sum. After it, a kernel with long blocks would need
        # more registers.
        bits = operations.pattern_with_one_nan(master)
        bits = float_layouts.rounded_before_shift(bits, drop, random_residual)
    elif rounding == "nearest":
        bits = operations.keep_nan(master)
    else:
        sign, pattern = pattern_of(master, dtype, extra, rounding)
        bits = sign | pattern
    half = jnp.uint32(1 << (most - 1) if extra and rounding == "nearest" else 0)
    param = float_layouts.from_bits((bits + half) >> jnp.uint32(most), dtype)
    if not extra:
        return param, None
    return param, (bits >> jnp.uint32(drop)) & jnp.uint32((1 << extra) - 1)


def join(
    param: jax.Array, fields: jax.Array | None, extra: int, rounding: Rounding
) -> jax.Array:
    """Return the exact float32 master for a parameter and its residual.

    In bfloat16, some residuals cannot result from any split with this parameter:
    negative residuals of 0 and positive residuals of infinity, which would make the
    master a NaN. Such a residual belongs to another parameter, so the parameter itself
    is returned. All other residuals are possible: the master is within half a unit of
    the parameter, or within one unit with stochastic rounding.
    """
    layout = float_layouts.layout_of(param.dtype)
    bits = float_layouts.to_bits(param)
    if layout.same_exponent:
        # The pattern is float32's own. Its sign bit is above both parts and does not
        # change.
        drop = layout.max_extra_bits - extra
        high = bits << jnp.uint32(layout.max_extra_bits)
        param = lax.bitcast_convert_type(high, jnp.float32)
        if not extra:
            return param
        low = _error_of(fields, extra, rounding, drop)
        master = lax.bitcast_convert_type(high + low, jnp.float32)
        # If the residual leads past zero (the sum carries into the sign) or past
        # infinity, the sum is the pattern of a NaN. No split returns such a pair, so
        # the user changed the parameter.
        leaves = jnp.isnan(master)
        if not drop or rounding == "stochastic":
            # In this case, a NaN parameter and its residual can give a NaN, whose bits
            # must be kept, or infinity, which must not be returned.
            leaves = leaves ^ jnp.isnan(param)
        return jnp.where(leaves, param, master)
    error = _error_of(fields, extra, rounding) if extra else jnp.uint32(0)
    sign = (bits >> jnp.uint32(layout.width - 1)) << jnp.uint32(31)
    magnitude = ((bits & jnp.uint32(layout.largest)) << jnp.uint32(extra)) + error
    # A negative residual of zero means that the master has the other sign.
    behind = magnitude >> jnp.uint32(31)
    sign = sign ^ (behind << jnp.uint32(31))
    magnitude = jnp.where(behind > 0, jnp.uint32(0) - magnitude, magnitude)
    return float_layouts.from_pattern(sign, magnitude, layout, extra)


def _error_of(
    fields: jax.Array | None, extra: int, rounding: Rounding, rise: int = 0
) -> jax.Array:
    """Return ``e 2^rise`` in two's complement for the fields of residuals."""
    assert fields is not None
    if rounding == "toward_zero":
        return fields << jnp.uint32(rise)
    # Shift the sign of the field to bit 31 and back, which extends it.
    unused = 32 - stored_bits(extra, rounding)
    signed = (fields << jnp.uint32(unused)).astype(jnp.int32)
    return (signed >> jnp.int32(unused - rise)).astype(jnp.uint32)


def to_float32(x: jax.Array) -> jax.Array:
    """Convert a narrow float array to float32 without a cast that XLA could remove.

    Other dtypes are cast.

    >>> import jax.numpy as jnp
    >>> to_float32(jnp.bfloat16(1.5))
    Array(1.5, dtype=float32)
    """
    if not float_layouts.is_narrow(x.dtype):
        return x.astype(jnp.float32)
    return join(x, None, 0, "nearest")


def round_nearest(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Round float32 to the nearest value of a narrow dtype, ties to even.

    As in a cast, values that round past the largest finite one become infinity (NaN in
    float8_e4m3fn).

    >>> import jax.numpy as jnp
    >>> round_nearest(jnp.float32(0.999), jnp.bfloat16)
    Array(1, dtype=bfloat16)
    """
    return split(x, dtype, 0, "nearest")[0]


def round_stochastic(
    x: jax.Array, dtype: jax.typing.DTypeLike, random: jax.Array | None
) -> jax.Array:
    """Round float32 to a neighbor in a narrow dtype, so that the mean is ``x``.

    Between the neighbors ``a <= x <= b``, the result is b with probability ``(x - a) /
    (b - a)``. Past the largest finite value, it is the nearest value.

    Args:
      x: float32 array.
      dtype: a narrow dtype.
      random: uint32 array with the shape of x, all 32 bits random. bfloat16 uses the
        leading 16 bits. float16 and float8 use 13, 20 or 21 bits for normal results and
        up to 31 for subnormal ones. If None, round to nearest.

    References:
      Zamirai et al. 2020, section 3.2, "Stochastic Rounding".

    >>> import jax.numpy as jnp
    >>> round_stochastic(jnp.float32(1 + 2**-8), jnp.bfloat16, jnp.uint32(0))
    Array(1, dtype=bfloat16)
    """
    return split(x, dtype, 0, "nearest", random_residual=random)[0]


def round_to_precision(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Round float32 to the nearest value of a narrow dtype, and return it as float32.

    >>> import jax.numpy as jnp
    >>> round_to_precision(jnp.float32(0.3), jnp.bfloat16)
    Array(0.30078125, dtype=float32)
    """
    return to_float32(round_nearest(x, dtype))


def narrow_or_cast(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Round to nearest in any float dtype, like the cast that exact landing assumes."""
    if float_layouts.is_narrow(dtype):
        return round_nearest(to_float32(x), dtype)
    return lax.convert_element_type(x, np.dtype(dtype))


def words_toward(
    x: jax.Array, ahead: jax.Array, layout: FloatLayout, mantissa_bits: int
) -> jax.Array:
    """Return words that make rounding pick the neighbor nearer to ``x + ahead``.

    Args:
      x: float32 array.
      ahead: float32 array, called d in the module's docstring.
      layout: layout of the dtype to which x is rounded.
      mantissa_bits: number of mantissa bits that rounding keeps, at most the layout's.

    Returns:
      uint32 words with the shape of x. Only their leading 23 bits are used.

    >>> import jax.numpy as jnp
    >>> from lowbit_optax._numerics.float_layouts import layout_of
    >>> from lowbit_optax._numerics.rounding import round_stochastic
    >>> x, ahead = jnp.float32(1.03), jnp.float32([0.0, 0.03, 0.04, 5.0])
    >>> words = words_toward(x, ahead, layout_of(jnp.float8_e4m3fn), 3)
    >>> round_stochastic(jnp.full(4, x), jnp.float8_e4m3fn, words)
    Array([1, 1, 1.125, 1.125], dtype=float8_e4m3fn)
    """
    pattern = as_fields(x)
    # Below this exponent, the spacing is constant or its inverse overflows float32.
    least = max(layout.smallest_exponent, mantissa_bits + 1)
    exponent = jnp.maximum(
        pattern & jnp.uint32(INFINITY), jnp.uint32(least << MANTISSA)
    )
    inverse = float_of(jnp.uint32((2 * BIAS + mantissa_bits) << MANTISSA) - exponent)
    away = float_of(as_fields(ahead) ^ (pattern & jnp.uint32(SIGN)))
    return words_of_share(away * inverse)


def words_of_share(share: jax.Array) -> jax.Array:
    """Return uint32 words whose 23 leading bits are ``clip(1/2 + share, 0, 1)``.

    They round up if the remainder plus the share is at least 1/2, where both are in
    units of the spacing.
    """
    # The mantissa of a number from 1 to 2 is the fraction.
    fraction = jnp.float32(1.5) + share
    fraction = jnp.clip(fraction, jnp.float32(1), jnp.float32(2 - 2.0**-MANTISSA))
    return as_fields(fraction) << jnp.uint32(32 - MANTISSA)


def where_known(words: jax.Array, ahead: jax.Array, others: jax.Array) -> jax.Array:
    """Return ``words``, or ``others`` where ``ahead`` is 0 or NaN."""
    # On explicit axes, a selection needs sharded words, but random words are not.
    is_known = jnp.abs(ahead) > jnp.float32(0)  # False for NaN
    lost = jnp.where(is_known, jnp.uint32(0), jnp.uint32(2**32 - 1))
    return (words & ~lost) | (others & lost)


_RANDOM_BITS = 16
_UNUSED = MANTISSA - _RANDOM_BITS


def stochastic_sum(w: jax.Array, u: jax.Array, words: jax.Array) -> jax.Array:
    """Return ``w + u`` rounded to one of two neighboring float32 numbers.

    Args:
      w: float32.
      u: float32. The mean is exact if ``|u| <= |w|``, and otherwise to 2^-24 of u.
      words: uint32 with random bits in the lowest 16 bits. The probability is rounded
        to a multiple of 2^-16.

    Returns:
      float32 with the shape of w. Infinities and NaNs are the same as in the sum.

    >>> import jax.numpy as jnp
    >>> w, u = jnp.float32(1.0), jnp.float32(2.0**-25)  # a quarter of the step upwards
    >>> words = jnp.arange(2**16, dtype=jnp.uint32)
    >>> sums = stochastic_sum(w, u, words)
    >>> float(jnp.mean(sums > w)), float(jnp.max(sums) - w)
    (0.25, 1.1920928955078125e-07)
    """
    total = w + u
    error = u - (total - w)
    pattern = bits_of(total)
    # -1 if the error points to zero, otherwise 0.
    to_zero = (bits_of(error) ^ pattern) >> jnp.int32(31)
    towards = pattern + to_zero
    binade = towards & jnp.int32(INFINITY)
    # Compare the error and the random number as mantissas with the exponent of the
    # smaller neighbor, where one step is one unit in the last place.
    share = jnp.abs(error) * jnp.float32(2.0**MANTISSA) + float_of(binade)
    words = lax.bitcast_convert_type(words, jnp.int32) << jnp.int32(_UNUSED)
    # Use the midpoints of 2^16 intervals.
    drawn = (words & jnp.int32(2**MANTISSA - 2**_UNUSED)) | binade
    drawn = drawn | jnp.int32(2 ** (_UNUSED - 1))
    # If the sum overflows float32, its error is infinite.
    moves = (bits_of(share) > drawn) & (bits_of(share) < jnp.int32(INFINITY))
    neighbour = towards + to_zero + jnp.int32(1)
    return float_of(jnp.where(moves, neighbour, pattern))
