"""Stochastic rounding by words that choose the neighbour."""

import jax.numpy as jnp
import numpy as np
import pytest

from lowbit_optax._numerics.chosen_neighbour import words_toward
from lowbit_optax._numerics.float_layouts import NARROW_DTYPES, layout_of
from lowbit_optax.formats.plain import Significand, rounded

EVERY_BIT = jnp.uint32(0xFFFFFFFF)


def neighbours_and_chosen(significand, dtype, bits):
    """Of numbers of all exponents, and distances of all sizes beside their spacing."""
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
    assert np.all(is_worse <= 2.0**-9 * np.abs(away - toward_zero))  # but near ties
    assert 0.3 < np.mean(chosen == away) < 0.7


def test_without_a_distance_it_rounds_to_nearest():
    x = jnp.linspace(1, 2, 1000)
    words = words_toward(x, jnp.zeros_like(x), layout_of(jnp.bfloat16), 7)
    got = rounded(None, x, jnp.bfloat16, words)
    assert np.array_equal(got, x.astype(jnp.bfloat16))
