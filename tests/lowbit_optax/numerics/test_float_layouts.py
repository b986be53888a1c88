"""Bit patterns of narrow formats, against ml_dtypes and Python's integers."""

import fractions

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from lowbit_optax._numerics import float_layouts

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)

to_pattern = jax.jit(float_layouts.to_pattern, static_argnums=(1, 2))
from_pattern = jax.jit(float_layouts.from_pattern, static_argnums=(2, 3))


def as_float32(patterns):
    return lax.bitcast_convert_type(jnp.asarray(patterns, jnp.uint32), jnp.float32)


def patterns_of(x):
    return np.asarray(lax.bitcast_convert_type(x, jnp.uint32))


def all_values(dtype):
    """Every value of a narrow dtype, by numpy and ml_dtypes alone."""
    width = np.dtype(dtype).itemsize * 8
    return np.arange(2**width, dtype=f"uint{width}").view(dtype)


@each_dtype
def test_layout_says_what_ml_dtypes_says(dtype):
    layout, info = float_layouts.layout_of(dtype), ml_dtypes.finfo(dtype)
    assert layout.width == info.bits
    assert layout.mantissa_bits == info.nmant
    assert layout.exponent_bits == info.nexp
    assert 2.0 ** (1 - layout.bias) == float(info.smallest_normal)
    largest = np.asarray(layout.special - 1, f"uint{layout.width}").view(dtype)
    assert largest == info.max
    beyond = np.asarray(layout.special, f"uint{layout.width}").view(dtype)
    assert np.isinf(beyond) if layout.has_infinity else np.isnan(beyond)
    assert np.isnan(np.asarray(layout.nan, f"uint{layout.width}").view(dtype))
    assert np.isnan(np.asarray(layout.largest, f"uint{layout.width}").view(dtype))


def test_only_the_four_formats_are_narrow():
    assert [np.dtype(d) for d in DTYPES] == list(float_layouts.NARROW_DTYPES)
    assert all(float_layouts.is_narrow(d) for d in DTYPES)
    others = (jnp.float32, jnp.float8_e4m3b11fnuz, jnp.int16, jnp.uint8, jnp.bool_)
    assert not any(float_layouts.is_narrow(d) for d in others)
    with pytest.raises(KeyError):
        float_layouts.layout_of(jnp.float32)


@each_dtype
def test_max_extra_bits_is_what_float32_has_more(dtype):
    given = float_layouts.layout_of(dtype).max_extra_bits
    assert given == ml_dtypes.finfo(np.float32).nmant - ml_dtypes.finfo(dtype).nmant


@each_dtype
def test_bits_of_every_value_come_and_go_unchanged(dtype):
    values = all_values(dtype)
    bits = float_layouts.to_bits(jnp.asarray(values))
    assert bits.dtype == jnp.uint32
    np.testing.assert_array_equal(bits, np.arange(values.size))
    back = float_layouts.from_bits(bits, dtype)
    assert back.dtype == dtype
    # NaN payloads too: compare patterns, not values.
    np.testing.assert_array_equal(
        np.asarray(back).view(f"uint{values.itemsize * 8}"), np.arange(values.size)
    )


def rounded_integers(values, shift):
    """Nearest-even quotients by Python's own rule, which is exact on fractions."""
    return [round(fractions.Fraction(int(v), 2**shift)) for v in values]


ROUND_OFF_SHIFTS = (0, 1, 2, 7, 13, 16, 23, 30, 31)


@pytest.mark.parametrize("shift", ROUND_OFF_SHIFTS)
def test_round_off_is_pythons_round_half_to_even(shift):
    # Around every kind of tie: quotients 0 to 4, remainders at and beside one half.
    near = [q * 2**shift + 2**shift // 2 + d for q in range(5) for d in (-1, 0, 1)]
    near += [q * 2**shift + d for q in range(5) for d in (0, 1)]
    near += [2**31 - 1, 2**31 - 2, 2**30 + 2**29 + 1]
    values = np.array([v for v in near if 0 <= v < 2**31], np.uint32)
    expected = rounded_integers(values, shift)
    static = float_layouts.round_off(jnp.asarray(values), shift)
    np.testing.assert_array_equal(static, expected)
    shifts = jnp.full(values.shape, shift, jnp.uint32)
    np.testing.assert_array_equal(
        float_layouts.round_off(jnp.asarray(values), shifts), expected
    )


@pytest.mark.parametrize("form", ["static", "array"])
@pytest.mark.parametrize("shift", [1, 4, 10])
def test_stochastic_round_off_goes_up_in_exactly_its_share_of_the_draws(shift, form):
    # All 2^shift leading random bits (those below are noise) against every remainder.
    draws = jnp.arange(2**shift, dtype=jnp.uint32) << jnp.uint32(32 - shift)
    noise = jnp.uint32(0x2C1B3C6D) >> jnp.uint32(shift)
    values = jnp.uint32(5 << shift) + jnp.arange(2**shift, dtype=jnp.uint32)
    count = shift if form == "static" else jnp.full((), shift, jnp.uint32)
    rounded = jax.jit(
        jax.vmap(lambda r: float_layouts.round_off(values, count, r), out_axes=1)
    )(draws | noise)
    assert set(np.unique(rounded)) == {5, 6}
    np.testing.assert_array_equal(
        np.sum(np.asarray(rounded) == 6, axis=1), np.arange(2**shift)
    )


def test_stochastic_round_off_by_31_bits_keeps_the_share():
    # 2^31 draws are too many to enumerate: the draw at which the result turns to 1.
    value, shift = jnp.uint32(0x12345678), jnp.uint32(31)
    turn = (2**31 - 0x12345678) * 2  # draws are the leading 31 of 32 bits
    draws = jnp.array([0, turn - 1, turn, 2**32 - 1], jnp.uint32)
    got = float_layouts.round_off(jnp.broadcast_to(value, (4,)), shift, draws)
    np.testing.assert_array_equal(got, [0, 0, 1, 1])


@each_dtype
def test_patterns_without_extra_bits_are_the_formats_own(dtype):
    layout = float_layouts.layout_of(dtype)
    own = np.arange(2**layout.width, dtype=np.uint32)
    # All but the NaNs, which need not keep their payloads.
    own = own[(own & layout.largest) < layout.special + layout.has_infinity]
    values = own.astype(f"uint{layout.width}").view(dtype)
    sign, magnitude = to_pattern(jnp.asarray(values.astype(np.float32)), layout, 0)
    got = (np.asarray(sign) >> (32 - layout.width)) | np.asarray(magnitude)
    np.testing.assert_array_equal(got, own)


@each_dtype
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_every_finite_pattern_with_extra_bits_returns_from_float32(dtype, share):
    layout = float_layouts.layout_of(dtype)
    extra = round(share * layout.max_extra_bits)
    last = (layout.special << extra) - 1
    rng = np.random.default_rng(0)
    count = min(last + 1, 2**18)
    magnitudes = np.sort(rng.choice(last + 1, count, replace=False).astype(np.uint32))
    # The edges of zero, of the subnormals and of the range.
    edge = 1 << (layout.mantissa_bits + extra)
    edges = np.array([0, 1, 2, edge - 1, edge, edge + 1, last - 1, last], np.uint32)
    magnitudes = jnp.asarray(np.union1d(magnitudes, edges))
    for sign in (0, 0x80000000):
        signs = jnp.full_like(magnitudes, sign)
        values = from_pattern(signs, magnitudes, layout, extra)
        back_sign, back = to_pattern(values, layout, extra)
        np.testing.assert_array_equal(back_sign, signs)
        np.testing.assert_array_equal(back, magnitudes)
        # Patterns are in the order of their magnitudes.
        steps = np.diff(np.abs(np.asarray(values).astype(np.float64)))
        assert np.all(steps > 0)


@each_dtype
def test_an_extra_bit_halves_the_spacing_everywhere(dtype):
    layout = float_layouts.layout_of(dtype)
    coarse = jnp.arange(layout.special, dtype=jnp.uint32)
    zero = jnp.zeros_like(coarse)
    values = from_pattern(zero, coarse, layout, 0)
    doubled = from_pattern(zero, coarse << 1, layout, 1)
    np.testing.assert_array_equal(patterns_of(values), patterns_of(doubled))
    between = from_pattern(zero, (coarse << 1) | jnp.uint32(1), layout, 1)
    wide = np.asarray(values).astype(np.float64)
    middle = (wide[:-1] + wide[1:]) / 2
    np.testing.assert_array_equal(np.asarray(between)[:-1].astype(np.float64), middle)


@each_dtype
def test_patterns_at_and_past_the_special_one_are_not_finite(dtype):
    layout = float_layouts.layout_of(dtype)
    for extra in (0, 1, layout.max_extra_bits):
        special = jnp.array([layout.special << extra], jnp.uint32)
        sign = jnp.array([0x80000000], jnp.uint32)
        (at,) = np.asarray(from_pattern(sign, special, layout, extra))
        assert np.isneginf(at) if layout.has_infinity else np.isnan(at)
        nan = jnp.array([layout.nan << extra], jnp.uint32)
        (value,) = np.asarray(from_pattern(sign, nan, layout, extra))
        assert np.isnan(value)


@each_dtype
def test_infinity_and_nan_have_the_same_pattern_with_any_extra_bits(dtype):
    layout = float_layouts.layout_of(dtype)
    x = as_float32([0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF])
    most = layout.max_extra_bits
    for extra in (0, 1, most // 2, most):
        sign, magnitude = to_pattern(x, layout, extra)
        np.testing.assert_array_equal(sign, [0, 0x80000000, 0, 0, 0])
        infinite = layout.special << extra
        np.testing.assert_array_equal(magnitude[:2], [infinite] * 2)
        kind = np.asarray(magnitude[2:]) >> extra
        assert np.all(kind > layout.special if layout.has_infinity else kind == 0x7F)


@each_dtype
def test_stochastic_draws_never_lift_the_largest_finite_value_to_infinity(dtype):
    layout = float_layouts.layout_of(dtype)
    largest = jnp.full((2,), float(ml_dtypes.finfo(dtype).max), jnp.float32)
    draws = jnp.array([0, 0xFFFFFFFF], jnp.uint32)
    for extra in (0, layout.max_extra_bits // 2, layout.max_extra_bits):
        _, magnitude = to_pattern(largest, layout, extra, draws)
        np.testing.assert_array_equal(magnitude, [(layout.special - 1) << extra] * 2)
