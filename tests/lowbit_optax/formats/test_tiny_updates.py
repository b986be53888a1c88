"""Updates far below float32's resolution move weights by the right amount on average.

A float32 sum rounds to nearest and loses an update below 2^-25 of the weight. With
``sum_rounding="stochastic"``, the rounding error of the sum enters the stochastic
rounding of the weight.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lowbit_optax
from lowbit_optax import extra_bits, stochastic_rounding
from lowbit_optax._numerics.rounding import stochastic_sum

pytestmark = pytest.mark.standard_promotion

ALL_WORDS = jnp.arange(2**16, dtype=jnp.uint32)
FORMATS = {
    "extra_bits(8)": extra_bits(8, sum_rounding="stochastic"),
    "extra_bits(4)": extra_bits(4, sum_rounding="stochastic"),
    "extra_bits(12)": extra_bits(12, sum_rounding="stochastic"),
    "extra_bits()": extra_bits(sum_rounding="stochastic"),
    "stochastic_rounding": stochastic_rounding(sum_rounding="stochastic"),
}


@jax.jit
def sums(w, u):
    return stochastic_sum(w, u, ALL_WORDS)


floats = st.floats(-(2.0**100), 2.0**100, width=32)


@settings(max_examples=300, deadline=None)
@given(floats, floats)
def test_sums_of_any_numbers_are_neighbours_with_their_mean(w, u):
    got = np.asarray(sums(np.float32(w), np.float32(u)))
    nearest = np.float32(w) + np.float32(u)
    if abs(nearest) < 2.0**-80:
        return
    exact = np.longdouble(w) + np.longdouble(u)
    step = np.spacing(np.abs(nearest))
    assert np.all(np.abs(np.longdouble(got) - exact) <= step)
    assert len(np.unique(got)) <= 2
    error = abs(float(np.mean(got - np.longdouble(nearest)) + (nearest - exact)))
    # If the update is larger than the weight, its own last bit is the limit.
    assert error <= max(step * 2.0**-16, abs(u) * 2.0**-24 * (abs(u) > abs(w)))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("w", "u", "want"),
    [
        (1.0, np.inf, np.inf),
        (-np.inf, 1.0, -np.inf),
        (3e38, 3e38, np.inf),
        (-3e38, -3e38, -np.inf),
        (np.inf, -np.inf, np.nan),
        (np.nan, 1.0, np.nan),
        (1.0, -1.0, 0.0),
        (0.0, 1e-9, 1e-9),
        (1.0, 0.0, 1.0),
    ],
)
def test_sums_without_a_rounding_error_are_float32s(w, u, want):
    got = np.asarray(sums(np.float32(w), np.float32(u)))
    np.testing.assert_array_equal(got, np.full(got.shape, want, np.float32))


@functools.cache
def movement(format_, rate, sign, implementation="xla", rows=512, steps=16):
    """Returns the mean movement over the requested one, and the masters' deviation."""
    tx = lowbit_optax.lowbit(
        optax.sgd(rate), weights=format_, implementation=implementation, min_size=0
    )
    params = {"w": jnp.ones((rows, 512), jnp.bfloat16)}
    grads = {"w": jnp.full((rows, 512), -sign, jnp.float32)}

    @jax.jit
    def run(params, state):
        step = lambda _, carry: lowbit_optax.step(tx, *carry, grads)
        params, state = jax.lax.fori_loop(0, steps, step, (params, state))
        return lowbit_optax.master_weights(params, state)["w"]

    masters = np.asarray(run(params, tx.init(params)), np.float64)
    return (masters - 1).mean() / (sign * steps * rate), masters.std()


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["up", "down"])
@pytest.mark.parametrize("rate", [1e-6, 1e-8])
@pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)
def test_weights_of_one_move_by_the_requested_amount(format_, rate, sign):
    ratio, deviation = movement(format_, rate, sign)
    # Allow five standard errors of 2^18 weights, and rounding of the probabilities.
    allowed = 5 * deviation / 2**9 / (16 * rate) + 2.0**-17 * 2.0**-23 / rate
    assert abs(ratio - 1) <= allowed
    assert allowed < 0.6 or format_ == FORMATS["stochastic_rounding"]


def test_kernels_move_weights_of_one_by_the_requested_amount():
    rate, rows = 1e-8, 64
    ratio, deviation = movement(FORMATS["extra_bits()"], rate, 1.0, "pallas", rows, 2)
    assert abs(ratio - 1) <= 5 * deviation / (rows * 512) ** 0.5 / (2 * rate) < 0.2
