"""Rounding to narrow formats works: nearest, toward zero and stochastic.

Casts are compared with ml_dtypes in numpy, and neighbours with the sorted list of the
format's values. Comparisons use bit patterns, because XLA's CPU code treats float32
subnormals, which include bfloat16 numbers, as zeros in ``==`` and ``<``.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from lowbit_optax._numerics import float_layouts, rounding
from lowbit_optax._numerics.float_layouts import NARROW_DTYPES
from lowbit_optax._numerics.rounding import words_toward
from lowbit_optax.formats.plain import Significand, rounded
from tests.helpers.patterns import (
    DTYPES,
    assert_same,
    cast,
    each_dtype,
    each_of,
    every,
    float_casts,
    is_nan,
    layout_of,
)

nearest = jax.jit(rounding.round_nearest, static_argnums=1)
stochastic = jax.jit(rounding.round_stochastic, static_argnums=1)


def magnitudes(dtype):
    """Returns every finite magnitude of a dtype in float64, ascending from 0."""
    layout = layout_of(dtype)
    patterns = np.arange(layout.special, dtype=f"uint{layout.width}")
    return patterns.view(dtype).astype(np.float64)


def float32_samples():
    """Returns every bfloat16 plus low halves at and near narrower formats' ties."""
    low = {0, 0xFFFF} | {2**b + d for b in range(16) for d in (-1, 0, 1)}
    low = np.array(sorted(low), np.uint32)
    high = np.arange(2**16, dtype=np.uint32) << 16
    return (high[:, None] | low).ravel().view(np.float32)


def boundaries(dtype):
    """Returns a dtype's values, their midpoints, and float32's neighbours of both."""
    values = magnitudes(dtype)
    middles = (values[1:] + values[:-1]) / 2
    overflow = values[-1] + (values[-1] - values[-2]) / 2
    points = np.concatenate([values, middles, [overflow, 2 * overflow, 3e38]])
    points = np.minimum(points, float(np.finfo(np.float32).max)).astype(np.float32)
    patterns = points.view(np.uint32).astype(np.int64)
    around = np.concatenate([patterns - 1, patterns, patterns + 1])
    around = np.clip(around, 0, 0x7F800000).astype(np.uint32)
    return np.concatenate([around, around | np.uint32(0x80000000)]).view(np.float32)


@each_dtype
def test_every_value_widens_to_the_same_number(dtype):
    values = every(dtype)
    widened = jax.jit(rounding.to_float32)(jnp.asarray(values))
    assert_same(widened, cast(values, np.float32))


@each_dtype
def test_nearest_is_the_cast_of_ml_dtypes(dtype):
    samples = float32_samples()[:: 1 if dtype == jnp.bfloat16 else 5]
    words = np.random.default_rng(0).integers(0, 2**32, 2**18, np.uint32)
    halves = (cast(every(wide), np.float32) for wide in (jnp.bfloat16, jnp.float16))
    x = np.concatenate([boundaries(dtype), *halves, samples, words.view(np.float32)])
    assert_same(nearest(jnp.asarray(x), dtype), cast(x, dtype))


@pytest.mark.exhaustive
@each_of(DTYPES[1:])
def test_nearest_is_the_cast_of_ml_dtypes_on_every_float32_in_range(dtype):
    # Run from a quarter of the smallest number, which rounds to 0, past overflow.
    info = ml_dtypes.finfo(dtype)
    start, end = np.float32([info.smallest_subnormal, info.max]).view(np.uint32)
    for exponent in range((start >> 23) - 2, (end >> 23) + 2):
        bits = np.arange(2**23, dtype=np.uint32) + np.uint32(exponent << 23)
        for x in (bits.view(np.float32), -bits.view(np.float32)):
            assert_same(nearest(jnp.asarray(x), dtype), cast(x, dtype))


@pytest.mark.exhaustive
@each_of(DTYPES[1:])
def test_every_float32_out_of_range_is_zero_or_infinity_or_nan(dtype):
    layout, info = layout_of(dtype), ml_dtypes.finfo(dtype)
    start, end = np.float32([info.smallest_subnormal / 2, info.max]).view(np.uint32)
    # Half of the smallest number ties with zero. Overflow starts within one exponent.
    start, end = jnp.uint32(start), jnp.uint32((end >> 23) + 1 << 23)

    def wrong(first):
        u = first + lax.iota(jnp.uint32, 2**24)
        magnitude = u & jnp.uint32(0x7FFFFFFF)
        x = lax.bitcast_convert_type(u, jnp.float32)
        got = float_layouts.to_bits(rounding.round_nearest(x, dtype))
        sign = (u >> jnp.uint32(31)) << jnp.uint32(layout.width - 1)
        below = (magnitude <= start) & (got != sign)
        past = (magnitude >= end) & (magnitude <= jnp.uint32(0x7F800000))
        past = past & (got != sign | jnp.uint32(layout.special))
        own = got & jnp.uint32(layout.largest)
        least = jnp.uint32(layout.special + (1 if layout.has_infinity else 0))
        number = (magnitude > jnp.uint32(0x7F800000)) & (own < least)
        return jnp.sum(below | past | number, dtype=jnp.uint32)

    starts = jnp.arange(2**8, dtype=jnp.uint32) << jnp.uint32(24)
    assert not np.any(jax.jit(lambda s: lax.map(wrong, s))(starts))


def nearest_bfloat16_disagreements(start, count):
    """Counts patterns that round differently from the textbook's integer formula."""
    u = start + lax.iota(jnp.uint32, count)
    x = lax.bitcast_convert_type(u, jnp.float32)
    got = lax.bitcast_convert_type(
        rounding.round_nearest(x, jnp.bfloat16), jnp.uint16
    ).astype(jnp.uint32)
    odd = (u >> jnp.uint32(16)) & jnp.uint32(1)
    expected = (u + jnp.uint32(0x7FFF) + odd) >> jnp.uint32(16)
    nan = (u & jnp.uint32(0x7FFFFFFF)) > jnp.uint32(0x7F800000)
    got_nan = (got & jnp.uint32(0x7FFF)) > jnp.uint32(0x7F80)
    wrong = jnp.where(nan, ~got_nan, got != expected)
    return jnp.sum(wrong, dtype=jnp.uint32)


@pytest.mark.exhaustive
def test_nearest_bfloat16_is_the_integer_formula_on_every_float32():
    @jax.jit
    def block(start):
        starts = start + (jnp.arange(16, dtype=jnp.uint32) << jnp.uint32(24))
        return lax.map(lambda s: nearest_bfloat16_disagreements(s, 2**24), starts).sum()

    assert sum(int(block(jnp.uint32(i << 28))) for i in range(16)) == 0


def test_no_nan_becomes_a_number():
    # 0x7FFFFFFF + 0x8000 overflows into the sign, so rounding this NaN as an integer
    # would give minus zero.
    nans = np.array([0x7FFFFFFF, 0x7F800001, 0x7FFF8000, 0x7F80FFFF], np.uint32)
    x = jnp.asarray(np.concatenate([nans, nans | 0x80000000]).view(np.float32))
    for dtype in DTYPES:
        assert is_nan(np.asarray(nearest(x, dtype))).all()
        for word in (0, 0xFFFFFFFF):
            words = jnp.full(x.shape, word, jnp.uint32)
            assert is_nan(np.asarray(stochastic(x, dtype, words))).all()


def neighbours(x, dtype):
    """Returns the magnitudes below and above, and the share between them."""
    values = magnitudes(dtype)
    size = np.abs(x.astype(np.float64))
    below = np.searchsorted(values, size, side="right") - 1
    low = values[below]
    exact = low == size
    high = np.where(exact, low, values[np.minimum(below + 1, len(values) - 1)])
    share = np.where(exact, 0.0, (size - low) / np.where(exact, 1.0, high - low))
    return low, high, share


@each_dtype
def test_a_stochastic_result_is_one_of_the_two_neighbours(dtype):
    x = np.concatenate([boundaries(dtype), float32_samples()[::11]])
    x = x[~is_nan(x)]
    x = x[np.abs(x.astype(np.float64)) <= magnitudes(dtype)[-1]]
    low, high, share = neighbours(x, dtype)
    rng = np.random.default_rng(1)
    seen = []
    for words in (
        np.zeros(x.shape, np.uint32),
        np.full(x.shape, 0xFFFFFFFF, np.uint32),
        rng.integers(0, 2**32, x.shape, np.uint32),
    ):
        got = np.asarray(stochastic(jnp.asarray(x), dtype, jnp.asarray(words)))
        np.testing.assert_array_equal(np.signbit(got), np.signbit(x))
        size = np.abs(got.astype(np.float64))
        assert np.all((size == low) | (size == high))
        seen.append(size)
    # The smallest draw never rounds up. The largest draw rounds up unless the value is
    # exact or so near its lower neighbour that 31 random bits cannot resolve it.
    np.testing.assert_array_equal(seen[0], low)
    np.testing.assert_array_equal(seen[1][share >= 2.0**-16], high[share >= 2.0**-16])


DRAWS = 2**20


@functools.cache
def masters_between(dtype):
    """Returns float32 values at known shares between normal or subnormal neighbours."""
    info = ml_dtypes.finfo(dtype)
    smallest, spacing = float(info.smallest_normal), float(info.smallest_subnormal)
    step = float(info.eps)
    points = [1 + step * s for s in (1 / 8, 0.3, 0.5, 0.99)]
    points += [-(2 - step) - step * 0.7, 1024 * smallest * (1 + 0.6 * step)]
    points += [smallest - spacing * 0.4, 2 * smallest + spacing * 0.6]  # at a seam
    if dtype != jnp.bfloat16:
        points += [spacing * s for s in (0.01, 0.3, 0.75)]
    else:  # float32 patterns with a quarter and 0.7 between bfloat16 subnormals
        points += np.uint32([0x00014000, 0x0000B333]).view(np.float32).tolist()
    points += [-float(info.max) * (1 - 0.3 * step)]
    return np.array(points, np.float32)


@each_dtype
def test_the_share_of_draws_that_go_up_is_the_distance_from_below(dtype):
    # With equally spaced draws, rounding up is monotone in the draw, so the number of
    # ups is within 1 of share * DRAWS for every spacing.
    x = masters_between(dtype)
    low, high, share = neighbours(x, dtype)
    draws = jnp.arange(DRAWS, dtype=jnp.uint32) << jnp.uint32(32 - 20)

    @jax.jit
    def ups(value, word):
        words = jnp.full(draws.shape, word, jnp.uint32) | draws
        rounded = rounding.round_stochastic(
            jnp.broadcast_to(value, draws.shape), dtype, words
        )
        size = float_layouts.to_bits(rounded) & jnp.uint32(layout_of(dtype).largest)
        return size.min(), size.max(), jnp.sum(size > size.min(), dtype=jnp.uint32)

    for value, below, above, part in zip(x, low, high, share, strict=True):
        least, most, count = ups(jnp.float32(value), jnp.uint32(0))
        assert magnitudes(dtype)[int(least)] == below
        assert magnitudes(dtype)[int(most)] == above
        assert abs(int(count) - part * DRAWS) <= 1


@each_dtype
@pytest.mark.parametrize("word", [0, 0x55555555, 0xFFFFFFFF])
def test_past_the_largest_value_stochastic_rounding_is_nearest(dtype, word):
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    step = largest - np.nextafter(cast(largest, dtype), cast(0, dtype)).astype("f4")
    x = largest + step * np.array([0.001, 0.25, 0.499, 0.5, 0.501, 0.9], np.float32)
    x = np.concatenate([x, [np.finfo(np.float32).max, np.inf]])
    x = np.concatenate([x, -x]).astype(np.float32)
    words = jnp.full(x.shape, word, jnp.uint32)
    assert_same(stochastic(jnp.asarray(x), dtype, words), cast(x, dtype))


@each_dtype
def test_rounding_contains_no_cast_that_xla_could_drop(dtype):
    # XLA:GPU drops float32 -> bfloat16 -> float32, which never shows on a CPU.
    x, words = jnp.ones(4), jnp.zeros(4, jnp.uint32)
    for round_ in (
        lambda x: rounding.round_to_precision(x, dtype),
        lambda x: rounding.to_float32(rounding.round_stochastic(x, dtype, words)),
    ):
        assert float_casts(jax.make_jaxpr(round_)(x)) == []
    # The search itself must find a cast.
    casting = lambda x: x.astype(dtype).astype(jnp.float32)
    assert len(float_casts(jax.make_jaxpr(jax.jit(casting))(x))) == 2


EVERY_BIT = jnp.uint32(0xFFFFFFFF)


def neighbours_and_chosen(significand, dtype, bits):
    """Returns random numbers' neighbours, the chosen neighbours, and the goals."""
    random = np.random.default_rng(0)
    largest = float(jnp.finfo(dtype).max) / 2
    least = max(float(jnp.finfo(dtype).smallest_subnormal), 2.0**-100)
    exponents = random.uniform(np.log2(least), np.log2(largest), 2**16)
    x = random.choice([-1, 1], 2**16) * np.exp2(exponents)
    x = jnp.asarray(x, jnp.float32)
    ends = [
        np.asarray(rounded(significand, x, dtype, jnp.full(x.shape, words)), np.float64)
        for words in (jnp.uint32(0), EVERY_BIT)
    ]
    spacing = np.abs(ends[1] - ends[0])
    ahead = jnp.asarray(spacing * random.normal(size=x.shape), jnp.float32)
    words = words_toward(x, ahead, layout_of(dtype), bits)
    chosen = np.asarray(rounded(significand, x, dtype, words), np.float64)
    goal = np.asarray(x, np.float64) + np.asarray(ahead, np.float64)
    return ends, chosen, goal


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(x, layout_of(x).mantissa_bits) for x in NARROW_DTYPES] + [(jnp.bfloat16, 3)],
    ids=str,
)
def test_the_neighbour_nearer_to_the_goal_is_taken(dtype, bits):
    is_whole = bits == layout_of(dtype).mantissa_bits
    significand = None if is_whole else Significand(bits, saturates=False)
    (toward_zero, away), chosen, goal = neighbours_and_chosen(significand, dtype, bits)
    assert np.all((chosen == toward_zero) | (chosen == away))
    farther = np.where(chosen == away, toward_zero, away)
    is_worse = np.abs(chosen - goal) - np.abs(farther - goal)
    assert np.all(is_worse <= 2.0**-9 * np.abs(away - toward_zero))  # ties may differ
    assert 0.3 < np.mean(chosen == away) < 0.7


def test_without_a_distance_it_rounds_to_nearest():
    x = jnp.linspace(1, 2, 1000)
    words = words_toward(x, jnp.zeros_like(x), layout_of(jnp.bfloat16), 7)
    got = rounded(None, x, jnp.bfloat16, words)
    assert np.array_equal(got, x.astype(jnp.bfloat16))
