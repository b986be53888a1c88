"""Two counterexamples to a theorem, and the formulas of the bounds of two papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.papers import (
    halted_descent,
    lpmm_bounds,
    quantized_descent,
    rounded_passes,
)

pytestmark = pytest.mark.standard_promotion

EPS = 2.0**-8
"""The machine epsilon of bfloat16."""


def _step(w, optimum, rate):
    """Returns a weight after a step of SGD, and both radii divided by its distance."""
    tx = halted_descent.optimizer(16, rate)
    start, optimum = jnp.bfloat16([w]), jnp.float32([optimum])
    end, _ = halted_descent.stepped(tx, start, tx.init(start), jnp.ones(1), optimum)
    away = abs(w - float(optimum[0]))
    stated, corrected = (
        float(halted_descent.radius(eps, rate, optimum)) / away
        for eps in (EPS, EPS / 2)
    )
    return float(end[0]), stated, corrected


def test_a_step_within_the_radius_can_change_a_weight():
    w = 2 - 2**-7  # The spacing 2^-7 is little more than EPS times this weight.
    assert EPS * w < 2**-7 < EPS * w * 1.01
    end, stated, corrected = _step(w, w - 0.010, 0.5)
    assert (end, stated > 1, corrected < 1) == (w - 2**-7, True, True)
    end, _, corrected = _step(w, w - 0.0075, 0.5)
    assert (end, corrected > 1) == (w, True)


def test_the_radius_of_the_halted_weights():
    assert halted_descent.radius(0.25, 0.5, jnp.float32([-3, 4])) == 1


def test_rounding_can_double_a_step():
    """The weight lands on an optimum that the format contains."""
    optimum = 1.5
    end, stated, _ = _step(optimum + 2**-7, optimum, 0.75)
    assert (end, stated < 1) == (optimum, True)


def test_the_bounds_of_the_rounded_weights():
    found = halted_descent.of_weights(16, 0.1, 1, jnp.arange(20))
    assert min(found["distance to bound"]["values"]) < 0.9
    assert found["distance to corrected bound"] >= 1
    assert found["starts"]["changed"] > 0
    assert found["starts, corrected"]["changed"] == 0
    assert found["starts, corrected"]["all"] > 5000


def test_exact_passes_approach_the_optimum_as_in_theory():
    """With one weight, each step multiplies the distance by 1 - a."""
    distance, ratios = rounded_passes.rounded_passes(32, 0.25, 1, 0)
    steps = rounded_passes.steps_of(0.25, 1)
    np.testing.assert_allclose(distance, 0.75**steps, rtol=1e-3)
    eps = rounded_passes.epsilon(32)
    t = steps // rounded_passes.POINTS * np.arange(1, rounded_passes.POINTS + 1)
    expected = 0.75 ** (2 * t) / np.exp(-0.25 * t * (1 - 4 * eps))
    np.testing.assert_allclose(ratios, expected, rtol=1e-3)


def test_the_bound_of_lpmm():
    case = lpmm_bounds.Case(8, 4, 0.5, 0.01)
    p, m, g = case.steps()
    assert (p, m, g) == (4 / 128, 4 * 4 / 128 / 0.5, 4 * 4 / 128)
    minima = quantized_descent.examples()
    assert np.abs(np.abs(minima.mean(0)) - 1).max() < 1e-5
    noise = 0.01 * (quantized_descent.variance() + 4 * g**2 + 4 * m**2 / 8)
    noise += 1.5 * 4 * p**2 / (2 * 0.01 * 4)
    start = (0.5 / 0.5 + 0.5 / (0.01 * 4)) * 16 / 200
    assert lpmm_bounds.bound(case, 100) == pytest.approx(start + noise / 0.5, rel=1e-4)
    assert max(x.rate for x in lpmm_bounds.cases(4)) == 1 / 6


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_algorithm_1_with_tiny_steps_is_momentum_sgd(momentum):
    one = jnp.ones((1, 1))
    steps = [1e-6 * one] * 3
    rate = 0.2 * (1 - momentum)
    given = 1, "stochastic", 400, momentum * one, rate * one, steps, jax.random.key(0)
    of_average, of_iterates, largest = quantized_descent.train(*given)
    # Without noise, each difference from the optimum has a recursion of its own.
    h, m, away, each = quantized_descent.CURVES, 0.0, np.ones(16), []
    for _ in range(400):
        each.append(away)
        m = momentum * m + h * away
        away = away - rate * m
    of_mean = np.mean(each, 0) ** 2 @ h / 2
    assert of_average[0] == pytest.approx(of_mean, rel=0.2)
    assert of_iterates[0] == pytest.approx(np.mean(np.square(each) @ h) / 2, abs=0.02)
    assert 1 < largest[0, 0] < 2
