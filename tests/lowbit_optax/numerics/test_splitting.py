"""A float32 master is split into a narrow parameter and k bits, and joined again.

Comparisons use float32 bit patterns as integers. They are ordered by magnitude, so a
distance between patterns is a distance in units in the last place.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from lowbit_optax._numerics import float_layouts
from lowbit_optax._numerics import rounding as splitting
from tests.helpers.patterns import DTYPES, each_of

ROUNDINGS = ("nearest", "toward_zero", "stochastic")
INFINITY = 0x7F800000
BFLOAT16_NANS_WITHOUT_A_PAIR = 2**17 - 2

each_rounding = pytest.mark.parametrize("rounding", ROUNDINGS)


def split(x, dtype, extra, rounding, words=None, residual_words=None):
    """Returns (param, residual fields) as ExtraBits computes them, before packing."""
    sign, pattern = splitting.pattern_of(x, dtype, extra, rounding, residual_words)
    if words is None:
        words = lax.bitcast_convert_type(x, jnp.uint32) * jnp.uint32(0x9E3779B9)
    param = splitting.round_param(sign, pattern, dtype, extra, rounding, words)
    if not extra:
        return param, None
    return param, splitting.residual_of(sign, pattern, param, extra, rounding)


def joined(x, dtype, extra, rounding, words=None, residual_words=None):
    param, fields = split(x, dtype, extra, rounding, words, residual_words)
    return param, splitting.join(param, fields, extra, rounding)


def values(patterns):
    return jnp.asarray(np.asarray(patterns, np.uint32).view(np.float32))


# bfloat16 with 16 bits restores every bit of the float32 master.


def bfloat16_differences(bits):
    """Counts the float32 patterns that do not round-trip.

    Returns ``(changed numbers, NaN patterns whose param or join is a number, changed
    NaN patterns)``.
    """
    x = lax.bitcast_convert_type(bits, jnp.float32)
    param, master = joined(x, jnp.bfloat16, 16, "nearest")
    infinity = jnp.uint32(INFINITY)
    absolute = jnp.uint32(0x7FFFFFFF)
    back = lax.bitcast_convert_type(master, jnp.uint32)
    is_nan = (bits & absolute) > infinity
    back_nan = (back & absolute) > infinity
    param_nan = (float_layouts.to_bits(param) & jnp.uint32(0x7FFF)) > jnp.uint32(0x7F80)
    changed = back != bits
    wrong_nan = (is_nan & ~(back_nan & param_nan)) | (~is_nan & param_nan)
    count = lambda x: jnp.sum(x, dtype=jnp.uint32)
    return count(changed & ~is_nan), count(wrong_nan), count(changed & is_nan)


def count_differences(starts, chunk):
    """Sums :func:`bfloat16_differences` over chunks that begin at ``starts``."""
    one = lambda start: bfloat16_differences(start + lax.iota(jnp.uint32, chunk))
    counts = jax.jit(lambda starts: lax.map(one, starts))(starts)
    return [int(np.sum(np.asarray(c, np.int64))) for c in counts]


@pytest.mark.exhaustive
def test_every_float32_joins_back_to_itself():
    starts = jnp.arange(2**8, dtype=jnp.uint32) << jnp.uint32(24)
    assert count_differences(starts, 2**24) == [0, 0, BFLOAT16_NANS_WITHOUT_A_PAIR]


def test_nans_stay_nans_and_keep_their_bits_if_they_have_a_pair():
    # These chunks contain all 2 * (2^23 - 1) NaN patterns and two infinities.
    starts = np.arange(8, dtype=np.uint32) * np.uint32(2**20) + np.uint32(INFINITY)
    starts = jnp.asarray(np.concatenate([starts, starts | np.uint32(0x80000000)]))
    assert count_differences(starts, 2**20) == [0, 0, BFLOAT16_NANS_WITHOUT_A_PAIR]


# The other formats, with all their bits.


def exact_range(dtype):
    """Returns the range of float32 patterns that all extra bits restore exactly.

    It runs from the smallest normal number to the end of the top exponent. Past the
    largest value, the parameter is infinite, but the residual restores the master. For
    float8_e4m3fn, the range ends at its largest value, 448.
    """
    info, layout = ml_dtypes.finfo(dtype), float_layouts.layout_of(dtype)
    smallest = np.float32(info.smallest_normal).view(np.uint32)
    end = np.float32(2.0 ** (2 ** (layout.exponent_bits - 1)) if layout.has_infinity
                     else info.max).view(np.uint32)  # fmt: skip
    return int(smallest), int(end)


def changed(start, count, dtype, rounding):
    """Counts the patterns, of both signs, that do not round-trip."""
    bits = start + lax.iota(jnp.uint32, count)
    bits = jnp.stack([bits, bits | jnp.uint32(0x80000000)])
    x = lax.bitcast_convert_type(bits, jnp.float32)
    extra = float_layouts.layout_of(dtype).max_extra_bits
    _, master = joined(x, dtype, extra, rounding)
    back = lax.bitcast_convert_type(master, jnp.uint32)
    return jnp.sum(back != bits, dtype=jnp.uint32)


def count_changed(start, end, dtype, rounding, chunk=2**20):
    assert (end - start) % chunk == 0
    starts = jnp.arange(start, end, chunk, dtype=jnp.uint32)
    one = lambda start: changed(start, chunk, dtype, rounding)
    counts = np.asarray(jax.jit(lambda s: lax.map(one, s))(starts))
    return int(counts.sum(dtype=np.int64))


NARROWER = tuple(d for d in DTYPES if d != jnp.bfloat16)


@pytest.mark.exhaustive
@each_rounding
@each_of(NARROWER)
def test_every_normal_value_in_range_is_exact_with_all_extra_bits(dtype, rounding):
    start, end = exact_range(dtype)
    assert count_changed(start, end, dtype, rounding) == 0


# Stochastic rounding of the parameter and of the residual.


@each_rounding
@pytest.mark.parametrize("extra", [0, 4, 8])
def test_stochastic_residuals_go_up_in_exactly_their_share_of_the_draws(
    extra, rounding
):
    drop = 16 - extra
    rng = np.random.default_rng(0)
    samples = rng.integers(0x30000000, 0x50000000, 24, np.uint32)
    x = values(samples)[:, None]
    draws = jnp.arange(2**drop, dtype=jnp.uint32) << jnp.uint32(32 - drop)
    shape = (x.shape[0], 2**drop)
    _, master = jax.jit(joined, static_argnums=(1, 2, 3))(
        jnp.broadcast_to(x, shape),
        jnp.bfloat16,
        extra,
        rounding,
        jnp.full(shape, 0x87654321, jnp.uint32),
        jnp.broadcast_to(draws, shape),
    )
    back = np.asarray(lax.bitcast_convert_type(master, jnp.uint32))
    low = samples >> drop << drop
    assert set(np.unique((back - low[:, None]) >> drop)) == {0, 1}
    ups = np.sum(back > low[:, None], axis=1)
    np.testing.assert_array_equal(ups, samples % 2**drop)
