"""Bit patterns of narrow formats, against ml_dtypes and Python's integers."""

import fractions

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from patterns import DTYPES, each_dtype, every, patterns_of

from lowbit_optax._numerics import float_layouts

to_pattern = jax.jit(float_layouts.to_pattern, static_argnums=(1, 2))
from_pattern = jax.jit(float_layouts.from_pattern, static_argnums=(2, 3))


def test_only_the_four_formats_are_narrow():
    assert [np.dtype(d) for d in DTYPES] == list(float_layouts.NARROW_DTYPES)
    assert all(float_layouts.is_narrow(d) for d in DTYPES)
    others = (jnp.float32, jnp.float8_e4m3b11fnuz, jnp.int16, jnp.uint8, jnp.bool_)
    assert not any(float_layouts.is_narrow(d) for d in others)
    with pytest.raises(KeyError):
        float_layouts.layout_of(jnp.float32)


@each_dtype
def test_bits_of_every_value_come_and_go_unchanged(dtype):
    values = every(dtype)
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


def test_stochastic_round_off_by_31_bits_keeps_the_share():
    # 2^31 draws are too many to enumerate: the draw at which the result turns to 1.
    value, shift = jnp.uint32(0x12345678), jnp.uint32(31)
    turn = (2**31 - 0x12345678) * 2  # draws are the leading 31 of 32 bits
    draws = jnp.array([0, turn - 1, turn, 2**32 - 1], jnp.uint32)
    got = float_layouts.round_off(jnp.broadcast_to(value, (4,)), shift, draws)
    np.testing.assert_array_equal(got, [0, 0, 1, 1])


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
