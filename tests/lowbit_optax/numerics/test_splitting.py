"""Splitting a float32 master into a narrow parameter and k bits, and joining them.

Everything is compared as integers: as float32 patterns, which are ordered as the
magnitudes are. So a distance in patterns is a distance in units in the last place.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from jax import lax
from patterns import DTYPES, cast, each_dtype, each_of

import lowbit_optax
from lowbit_optax._numerics import float_layouts
from lowbit_optax._numerics import rounding as splitting
from lowbit_optax._numerics.random_bits import random_bits
from pallas_kernels import packed_shape

ROUNDINGS = ("nearest", "toward_zero", "stochastic")
INFINITY = 0x7F800000
BFLOAT16_NANS_WITHOUT_A_PAIR = 2**17 - 2
SHORT = 64

each_rounding = pytest.mark.parametrize("rounding", ROUNDINGS)


def split(x, dtype, extra, rounding, words=None, residual_words=None):
    """(param, residual fields) as ExtraBits computes them, before packing."""
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


def join_of_split(x, dtype, extra, rounding):
    """Patterns of the parameter and of the master that it and its residual give.

    Not jitted, on samples of one size: then XLA compiles each operation once for all
    dtypes, roundings and numbers of bits. Short arrays are repeated up to one size.
    """
    count = x.size
    if count < SHORT:
        x = jnp.asarray(np.resize(x, SHORT))
    param, master = joined(x, dtype, extra, rounding)
    bits = lax.bitcast_convert_type(master, jnp.uint32)
    param = np.asarray(float_layouts.to_bits(param))
    return param[:count], np.asarray(bits)[:count]


def all_extra_bits(dtype):
    return range(float_layouts.layout_of(dtype).max_extra_bits + 1)


@functools.cache
def float32_samples():
    """2^19 patterns: all exponents, ends of the range, and the ties of every k.

    Every bfloat16 with four low halves; 2000 bfloat16 (a few of every exponent) with
    low halves at and beside the ties of every k, after an even and an odd bit; random
    ones.
    """
    rng = np.random.default_rng(0)
    every = np.arange(2**16, dtype=np.uint32) << 16
    ties = {2**b + odd * 2 ** (b + 1) + d for b in range(16) for odd in (0, 1)
            for d in (-1, 0, 1)}  # fmt: skip
    ties = np.array(sorted(tie for tie in ties if tie < 2**16), np.uint32)
    seams = [e << 7 | m for e in range(256) for m in (0, 1, 0x7F)]
    high = np.concatenate([seams, rng.integers(0, 2**15, 2000 - len(seams))])
    high = high.astype(np.uint32) << 16
    high = np.where(np.arange(high.size) % 2, high, high | np.uint32(0x80000000))
    parts = [
        (every[:, None] | np.array([0, 0x7FFF, 0x8000, 0xFFFF], np.uint32)).ravel(),
        (high[:, None] | ties).ravel(),
    ]
    rest = 2**19 - sum(map(len, parts))
    return np.concatenate([*parts, rng.integers(0, 2**32, rest, np.uint32)])


def not_nan(patterns):
    return (patterns & 0x7FFFFFFF) <= INFINITY


def values(patterns):
    return jnp.asarray(np.asarray(patterns, np.uint32).view(np.float32))


# bfloat16 with 16 bits: the float32 master, bit for bit.


def bfloat16_differences(bits):
    """Counts of float32 patterns that do not come back as they should.

    Returns ``(numbers that changed, NaN patterns whose param or join is a number,
    NaN patterns that changed)``.
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
    """Sums of :func:`bfloat16_differences` over ``[start, start + chunk)`` each."""
    one = lambda start: bfloat16_differences(start + lax.iota(jnp.uint32, chunk))
    counts = jax.jit(lambda starts: lax.map(one, starts))(starts)
    return [int(np.sum(np.asarray(c, np.int64))) for c in counts]


@pytest.mark.exhaustive
def test_every_float32_joins_back_to_itself():
    starts = jnp.arange(2**8, dtype=jnp.uint32) << jnp.uint32(24)
    numbers, nans, moved = count_differences(starts, 2**24)
    assert numbers == 0
    assert nans == 0
    assert moved == BFLOAT16_NANS_WITHOUT_A_PAIR


def test_every_nan_stays_one_and_all_but_those_without_a_pair_stay_themselves():
    # All 2 * (2^23 - 1) NaN patterns, which lie in these chunks with two infinities.
    starts = np.arange(8, dtype=np.uint32) * np.uint32(2**20) + np.uint32(INFINITY)
    starts = jnp.asarray(np.concatenate([starts, starts | np.uint32(0x80000000)]))
    numbers, nans, moved = count_differences(starts, 2**20)
    assert (numbers, nans) == (0, 0)
    assert moved == BFLOAT16_NANS_WITHOUT_A_PAIR


def test_the_split_of_one_third_is_as_written_by_hand():
    # 1/3 is 0x3EAAAAAB: its low half is past the middle, so the parameter is rounded
    # up and the residual negative, 0xAAAB - 0x10000.
    x = values([0x3EAAAAAB])
    param, fields = split(x, jnp.bfloat16, 16, "nearest")
    assert hex(int(float_layouts.to_bits(param)[0])) == "0x3eab"
    assert hex(int(fields[0])) == "0xaaab"
    # With 4 bits: 0x3EAAA|AAAB rounds to 0x3EAAB, and 0xB means -5.
    param, fields = split(x, jnp.bfloat16, 4, "nearest")
    assert hex(int(float_layouts.to_bits(param)[0])) == "0x3eab"
    assert hex(int(fields[0])) == "0xb"
    assert float(splitting.join(param, fields, 4, "nearest")[0]) == (0xAAB / 2**13)
    # Toward zero the same bits follow a parameter that is not rounded up.
    param, fields = split(x, jnp.bfloat16, 4, "toward_zero")
    assert hex(int(float_layouts.to_bits(param)[0])) == "0x3eaa"
    assert hex(int(fields[0])) == "0xb"


# Fewer bits.


@each_rounding
def test_fewer_bits_round_to_the_nearest_in_order_and_more_are_never_worse(rounding):
    samples = float32_samples()
    # Numbers' patterns by magnitude, infinity last; NaNs (in their place) dropped.
    order = np.argsort(samples & 0x7FFFFFFF, kind="stable")
    order = order[: np.sum(not_nan(samples))]
    ordered = (samples[order] & 0x7FFFFFFF).astype(np.int64)
    previous = np.full(ordered.shape, 2**31)
    for extra in range(17):
        _, back = join_of_split(values(samples), jnp.bfloat16, extra, rounding)
        np.testing.assert_array_equal(back[order] >> 31, samples[order] >> 31)
        back = (back[order] & 0x7FFFFFFF).astype(np.int64)
        error = np.abs(back - ordered)
        # Half of the last of 16 + k bits, in units of float32's last; it is reached.
        assert error.max() == (2 ** (15 - extra) if extra < 16 else 0)
        assert np.all(error <= previous)
        assert np.all(np.diff(back) >= 0)
        previous = error


@each_rounding
@pytest.mark.parametrize("extra", [1, 2, 5, 8, 12, 16])
def test_every_code_of_the_residual_is_used(extra, rounding):
    # Consecutive masters over four parameters near 1, at all k-bit positions.
    spacing = 2 ** (16 - extra)
    bits = np.uint32(0x3F800000) + np.arange(2 ** (extra + 2), dtype=np.uint32) * (
        np.uint32(spacing)
    )
    words = np.random.default_rng(0).integers(0, 2**32, (8, bits.size), np.uint32)
    split_ = jax.jit(lambda x, w: split(x, jnp.bfloat16, extra, rounding, w)[1])
    seen = np.unique(
        [
            split_(values(bits), jnp.asarray(w))
            for w in (words if rounding == "stochastic" else words[:1])
        ]
    )
    width = splitting.stored_bits(extra, rounding)
    every = np.arange(2**width)
    if rounding == "stochastic":
        # The rounded-off part is less than a whole step, so -2^k never happens; few
        # draws do not reach every other one of many.
        assert not np.any(seen == 2**extra)
        if extra > 5:
            signed = seen.astype(np.int64)
            signed = np.where(signed >= 2**extra, signed - 2**width, signed)
            assert signed.min() < -(2 ** (extra - 1)) * 1.5
            assert signed.max() > 2 ** (extra - 1) * 1.5
            return
        every = np.delete(every, 2**extra)
    np.testing.assert_array_equal(seen, every)


@each_dtype
def test_toward_zero_never_enlarges_in_any_dtype(dtype):
    layout = float_layouts.layout_of(dtype)
    x = values(float32_samples())
    for extra in (1, layout.max_extra_bits // 2, layout.max_extra_bits):
        param, back = join_of_split(x, dtype, extra, "toward_zero")
        narrow = np.asarray(param).astype(f"uint{layout.width}").view(dtype)
        with np.errstate(all="ignore"):
            narrow = np.abs(narrow.astype(np.float64))
            master = np.abs(np.asarray(back).view(np.float32).astype(np.float64))
        assert np.all((narrow <= master) | (np.isnan(narrow) & np.isnan(master)))


@each_dtype
@pytest.mark.parametrize("extra", [1, 8])
def test_a_parameter_rounded_to_nearest_is_within_half_a_step_of_its_master(
    dtype, extra
):
    layout = float_layouts.layout_of(dtype)
    x = values(float32_samples())
    sign, pattern = splitting.pattern_of(x, dtype, extra, "nearest")
    param = splitting.round_param(sign, pattern, dtype, extra, "nearest")
    magnitude = np.asarray(float_layouts.to_bits(param)) & layout.largest
    distance = (magnitude.astype(np.int64) << extra) - np.asarray(pattern)
    finite = np.asarray(pattern) < layout.special << extra
    # Ties go up in magnitude: the distance is in (-half, half]; but for the tie with
    # a format's NaN, which goes down.
    half = 2 ** (extra - 1)
    low = -half + (1 if layout.has_infinity else 0)
    assert distance[finite].min() == low
    assert distance[finite].max() == half


# The other formats, with all their bits.


def exact_range(dtype):
    """Float32 patterns from the smallest normal up to the end of the range.

    To the end of the top exponent: past the largest value the parameter is infinite,
    but the residual leads back from there. Not so for float8_e4m3fn, up to its 448.
    """
    info, layout = ml_dtypes.finfo(dtype), float_layouts.layout_of(dtype)
    smallest = np.float32(info.smallest_normal).view(np.uint32)
    end = np.float32(2.0 ** (2 ** (layout.exponent_bits - 1)) if layout.has_infinity
                     else info.max).view(np.uint32)  # fmt: skip
    return int(smallest), int(end)


def changed(start, count, dtype, rounding):
    """How many of these patterns and their negatives do not come back."""
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


@each_rounding
@each_of(NARROWER)
def test_sampled_normal_values_are_exact_with_all_extra_bits(dtype, rounding):
    start, end = exact_range(dtype)
    # All of them moved into the range, with their low bits.
    samples = float32_samples()
    magnitude = start + (samples & 0x7FFFFFFF) % (end - start)
    samples = (samples & 0x80000000) | magnitude
    extra = float_layouts.layout_of(dtype).max_extra_bits
    _, back = join_of_split(values(samples), dtype, extra, rounding)
    np.testing.assert_array_equal(back, samples)


@each_rounding
@each_of(NARROWER)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_subnormals_join_to_within_half_their_fixed_spacing(dtype, rounding, share):
    layout = float_layouts.layout_of(dtype)
    extra = round(share * layout.max_extra_bits)
    samples = float32_samples()
    start, _ = exact_range(dtype)
    _, back = join_of_split(values(samples), dtype, extra, rounding)
    below = (samples & 0x7FFFFFFF) < start
    back, samples = back[below], samples[below]
    error = back.view(np.float32).astype(np.float64)
    error -= samples.view(np.float32).astype(np.float64)
    spacing = float(ml_dtypes.finfo(dtype).smallest_subnormal) / 2**extra
    assert np.abs(error).max() <= spacing / 2
    np.testing.assert_array_equal(back >> 31, samples >> 31)


@each_dtype
@each_rounding
def test_zeros_infinities_and_nans_are_kept_with_any_bits(dtype, rounding):
    x = np.array([0.0, -0.0, np.inf, -np.inf], np.float32)
    wide = cast(cast(x, dtype), np.float32)
    nans = np.array([0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFF8000, 0x7FFFFFFF], "u4")
    x = values(np.concatenate([x.view("u4"), nans, nans | 0x80000000]))
    layout = float_layouts.layout_of(dtype)
    number = layout.special + (1 if layout.has_infinity else 0)
    for extra in all_extra_bits(dtype):
        param, back = join_of_split(x, dtype, extra, rounding)
        own = param[:4].astype(f"uint{layout.width}").view(dtype).astype(np.float32)
        np.testing.assert_array_equal(own, wide)
        np.testing.assert_array_equal(back[:4].view(np.float32), wide)
        np.testing.assert_array_equal(back[:2], [0, 0x80000000])
        assert np.all((param[4:] & layout.largest) >= number)
        assert np.all((back[4:] & 0x7FFFFFFF) > INFINITY)


@each_dtype
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_values_past_the_largest_overflow_as_a_cast_does(dtype, rounding, share):
    # Half a step past the largest, where a cast turns: to infinity, or for
    # float8_e4m3fn, whose tie at 464 goes to 448, to NaN.
    largest = float(ml_dtypes.finfo(dtype).max)
    step = largest - float(np.nextafter(dtype(largest), dtype(0)))
    x = largest + step * np.array([0.0, 0.4, 0.5, 0.6, 0.9])
    x = x.astype(np.float32)
    x = np.concatenate([x, [np.finfo(np.float32).max], -x]).astype(np.float32)
    expected = cast(x, dtype)
    layout = float_layouts.layout_of(dtype)
    extra = round(share * layout.max_extra_bits)
    param, _ = join_of_split(jnp.asarray(x), dtype, extra, rounding)
    got = np.asarray(param).astype(f"uint{layout.width}")
    if dtype == jnp.float8_e4m3fn:
        np.testing.assert_array_equal(np.isnan(got.view(dtype)), np.isnan(expected))
        keep = ~np.isnan(expected)
        np.testing.assert_array_equal(got.view(dtype)[keep], expected[keep])
    else:
        np.testing.assert_array_equal(got, expected.view(got.dtype))


# Stochastic rounding, of the parameter and of the residual.


@each_dtype
def test_stochastic_parameters_go_up_in_exactly_their_share_of_the_draws(dtype):
    extra = 8
    layout = float_layouts.layout_of(dtype)
    magnitudes = np.random.default_rng(0).integers(
        0, (layout.special - 1) << extra, 500, np.uint32
    )
    pattern = jnp.asarray(magnitudes)[:, None]
    sign = jnp.zeros_like(pattern)
    draws = jnp.arange(256, dtype=jnp.uint32) << jnp.uint32(24)
    draws = (draws | jnp.uint32(0x00ABCDEF))[None, :]  # the noise must not count
    param = splitting.round_param(
        sign, jnp.broadcast_to(pattern, (500, 256)), dtype, extra, "stochastic", draws
    )
    bits = np.asarray(float_layouts.to_bits(param))
    low = magnitudes >> extra
    assert set(np.unique(bits - low[:, None])) == {0, 1}
    ups = np.sum(bits > low[:, None], axis=1)
    np.testing.assert_array_equal(ups, magnitudes % 256)


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


@each_dtype
@pytest.mark.parametrize(
    ("rounding", "residual_rounding"),
    [("nearest", "stochastic"), ("stochastic", "nearest"), ("stochastic",) * 2],
)
def test_extra_bits_are_unbiased_to_five_standard_errors(
    dtype, rounding, residual_rounding
):
    # 10^5 copies of one master; the parameter's mean (where it is drawn) and the
    # joined master's mean are the master.
    n, extra = 100_000, 3 if rounding == "stochastic" else 4
    format_ = lowbit_optax.extra_bits(
        extra, rounding=rounding, residual_rounding=residual_rounding
    )
    info = ml_dtypes.finfo(dtype)
    # A third of the way to the next parameter, and of that to what the bits keep. Once
    # in the normal range, and once among the subnormals (bfloat16's are float32's).
    kept = 2**extra // 4 + 1
    offset = (kept + 0.32) / 2**extra
    normal, subnormal = float(info.eps), float(info.smallest_subnormal)
    masters = [(1 + normal * offset, normal)]
    if dtype != jnp.bfloat16:
        masters.append((subnormal * (1 + offset), subnormal))

    @jax.jit
    def split_(x, seed):  # an argument: XLA would fold constant draws, slowly
        (random,) = random_bits(seed, jnp.uint32(1), [2])
        x = jnp.broadcast_to(x, (n,))
        return format_.split(x, jnp.dtype(dtype), random)

    draws_param = rounding == "stochastic"
    draws_residual = residual_rounding == "stochastic"
    for master, step in masters:
        param, residual = split_(jnp.float32(master), jnp.uint32(0))
        back = jax.jit(format_.join)(param, residual)
        master = float(np.float32(master))
        param, back = (np.asarray(a).astype(np.float64) for a in (param, back))
        # In steps above the parameter below the master.
        params = np.arange(1 + draws_param)
        joined = (kept + np.arange(1 + draws_residual)) / 2**extra
        base = master - step * offset
        np.testing.assert_allclose(np.unique(param), base + step * params, rtol=1e-6)
        np.testing.assert_allclose(np.unique(back), base + step * joined, rtol=1e-6)
        # Means: the joined master's is the master, the parameter's the joined master's.
        for error, is_drawn in (
            (back - master, draws_residual),
            (param - back, draws_param),
        ):
            if is_drawn:
                assert abs(error.mean()) <= 5 * error.std() / np.sqrt(n)


@each_rounding
@pytest.mark.parametrize("extra", [0, 3, 8, 16])
def test_masters_that_the_bits_hold_never_change_whatever_is_drawn(extra, rounding):
    samples = float32_samples() >> (16 - extra) << (16 - extra)
    keep = not_nan(samples)
    for word in (0, 0x80000000, 0xFFFFFFFF):
        words = jnp.full(samples.shape, word, jnp.uint32)
        _, master = joined(values(samples), jnp.bfloat16, extra, rounding, words, words)
        back = np.asarray(lax.bitcast_convert_type(master, jnp.uint32))
        np.testing.assert_array_equal(back[keep], samples[keep])


@each_dtype
@each_rounding
def test_no_draw_makes_a_finite_master_in_range_infinite(dtype, rounding):
    layout = float_layouts.layout_of(dtype)
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    below = np.nextafter(largest, np.float32(0))
    x = np.array([largest, -largest, below, -below], np.float32)
    x = jnp.asarray(np.resize(x, SHORT))
    words = jnp.full(x.shape, 0xFFFFFFFF, jnp.uint32)
    for extra in (0, 3, layout.max_extra_bits):
        param, master = joined(x, dtype, extra, rounding, words, words)
        bits = np.asarray(float_layouts.to_bits(param)) & layout.largest
        np.testing.assert_array_equal(bits[:2], layout.special - 1)
        assert np.all(bits < layout.special)
        np.testing.assert_array_equal(master[:2], [largest, -largest])
        assert np.all(np.abs(np.asarray(master)) <= largest)


# Residuals of a parameter that rounding would not have chosen (exact landing).


@each_rounding
@pytest.mark.parametrize("extra", [1, 8, 16])
def test_the_residual_of_another_parameter_comes_as_near_as_its_bits_reach(
    extra, rounding
):
    layout = float_layouts.layout_of(jnp.bfloat16)
    one = 0x3F80 << extra
    width = splitting.stored_bits(extra, rounding)
    low, high = -(2 ** (width - 1)), 2 ** (width - 1) - 1
    if rounding == "toward_zero":
        low, high = 0, 2**width - 1
    offsets = np.array([-(2**20), low - 1, low, 0, high, high + 1, 2**20])
    offsets = np.resize(offsets, SHORT)
    pattern = jnp.asarray(one + offsets, jnp.uint32)
    sign = jnp.zeros_like(pattern)
    param = jnp.ones(pattern.shape, jnp.bfloat16)
    fields = splitting.residual_of(sign, pattern, param, extra, rounding)
    master = splitting.join(param, fields, extra, rounding)
    expected = one + np.clip(offsets, low, high)
    expected = expected << (layout.max_extra_bits - extra)
    got = lax.bitcast_convert_type(master, jnp.uint32)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("extra", [8, 16])
@pytest.mark.parametrize("size", [1.0, 3e38])
def test_a_parameter_of_the_other_sign_saturates_toward_its_master(size, extra):
    # -1 moves as far toward a master near 1.01 as its bits reach.
    x = jnp.full((1,), 1.01 * size, jnp.float32)
    sign, pattern = splitting.pattern_of(x, jnp.bfloat16, extra, "nearest")
    param = jnp.full((1,), -size, jnp.bfloat16)
    fields = splitting.residual_of(sign, pattern, param, extra, "nearest")
    np.testing.assert_array_equal(fields, [2 ** (extra - 1)])
    master = float(splitting.join(param, fields, extra, "nearest")[0])
    assert float(param[0]) < master < 0.99 * float(param[0])


def test_a_bfloat16_zero_of_the_other_sign_takes_no_residual():
    x = values([0x3F812345])
    sign, pattern = splitting.pattern_of(x, jnp.bfloat16, 8, "nearest")
    param = jnp.full((1,), -0.0, jnp.bfloat16)
    fields = splitting.residual_of(sign, pattern, param, 8, "nearest")
    np.testing.assert_array_equal(fields, [0])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_a_zero_of_the_other_sign_reaches_across(dtype):
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    for master in (-0.25 * smallest, 0.25 * smallest):
        x = jnp.full((1,), master, jnp.float32)
        sign, pattern = splitting.pattern_of(x, dtype, 8, "nearest")
        param = jnp.full((1,), -np.copysign(0.0, master), dtype)
        fields = splitting.residual_of(sign, pattern, param, 8, "nearest")
        assert float(splitting.join(param, fields, 8, "nearest")[0]) == master


# The format, with its packing.


@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [
        (jnp.bfloat16, "nearest"),
        (jnp.bfloat16, "toward_zero"),
        (jnp.float16, "nearest"),
        (jnp.float8_e4m3fn, "toward_zero"),
        (jnp.float8_e5m2, "stochastic"),
    ],
)
def test_a_format_joins_what_it_splits(dtype, rounding):
    most = float_layouts.layout_of(dtype).max_extra_bits
    format_ = lowbit_optax.extra_bits(most, rounding=rounding)
    x = jax.random.normal(jax.random.key(0), (70, 33), jnp.float32)
    x = jnp.where(jnp.abs(x) < 0.1, jnp.float32(0.25), x)  # normal in every format

    @jax.jit
    def split_(x, seed):
        (random,) = random_bits(seed, seed, [0])
        return format_.split(x, jnp.dtype(dtype), random)

    param, residual = split_(x, jnp.uint32(0))
    assert param.dtype == dtype
    assert residual.shape == packed_shape((70, 33), format_.width)
    np.testing.assert_array_equal(jax.jit(format_.join)(param, residual), x)


def test_small_leaves_keep_a_whole_master():
    format_ = lowbit_optax.extra_bits(8)
    assert format_.for_leaf((64, 64), jnp.bfloat16, 4096) is format_
    for shape in ((), (0,), (63, 65)):
        assert format_.for_leaf(shape, jnp.bfloat16, 4096) == lowbit_optax.master_copy()
    # Nothing is packed without bits, so nothing is too small.
    none = lowbit_optax.extra_bits(0)
    assert none.for_leaf((), jnp.bfloat16, 4096) is none


@pytest.mark.parametrize(
    ("dtype", "most"),
    [("bfloat16", 16), ("float16", 13), ("float8_e4m3fn", 20), ("float8_e5m2", 21)],
)
def test_without_a_number_a_leaf_keeps_the_most_bits_that_its_dtype_holds(dtype, most):
    dtype = jnp.dtype(dtype)
    format_ = lowbit_optax.extra_bits()
    assert format_.check(dtype) is None
    assert format_.for_leaf((64, 64), dtype, 0) == lowbit_optax.extra_bits(most)
    assert format_.for_leaf((), dtype, 0) == lowbit_optax.master_copy()


def test_a_tree_of_two_dtypes_trains_with_the_most_bits_of_each():
    tx = lowbit_optax.lowbit(optax.sgd(2.0**-20), weights=lowbit_optax.extra_bits())
    params = {"b": jnp.ones((64, 64), jnp.bfloat16), "h": jnp.ones((64, 64), "float16")}
    grads = jax.tree.map(lambda w: jnp.ones(w.shape, jnp.float32), params)
    params, state = jax.jit(lowbit_optax.step, static_argnums=0)(
        tx, params, tx.init(params), grads
    )
    masters = lowbit_optax.master_weights(params, state)
    for master in masters.values():
        np.testing.assert_array_equal(master, np.float32(1 - 2.0**-20))


numbers = st.integers(0, 2 * INFINITY).map(
    lambda i: i if i <= INFINITY else (i - INFINITY) | 0x80000000
)
