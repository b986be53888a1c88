"""Narrow moments stall with nearest rounding but not with stochastic rounding."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import lax

import lowbit_optax
from lowbit_optax import cast
from lowbit_optax._numerics.random_bits import Draws, random_bits
from tests.helpers import patterns

SIZE = 4096


def second_moment(format_, steps):
    """Returns Adam's nu at b2 = 0.999 for gradients of 1, as stored and in float32."""
    tx = lowbit_optax.lowbit(
        optax.scale_by_adam(b2=0.999),
        weights=lowbit_optax.nearest(),
        moments="float32" if format_ is None else {"nu": format_},
    )
    params = jnp.ones(SIZE, jnp.bfloat16)
    grads = jnp.ones(SIZE, jnp.float32)

    def one(state, _):
        _, state = tx.update(grads, state, params)
        return state, None

    @jax.jit
    def run(state):
        return lax.scan(one, state, length=steps)[0]

    with jax.numpy_dtype_promotion("standard"):  # optax's bias correction needs it
        state = tx.init(params)
        stored = run(state).inner_state.nu
    return stored, np.asarray(stored).astype(np.float64)


def test_a_nearest_second_moment_stops_half_way_and_a_stochastic_one_does_not():
    # After 5000 steps with a gradient of 1, nu is 1 - 0.999^5000 = 0.993. An update of
    # 0.001 (1 - nu) is lost once it is less than half the spacing of nu.
    _, true = second_moment(None, 5000)
    np.testing.assert_allclose(true, 1 - 0.999**5000, rtol=1e-4)
    stored, nearest = second_moment(cast(jnp.bfloat16, rounding="nearest"), 5000)
    assert stored.dtype == jnp.bfloat16
    assert np.all(nearest < 0.5 * true)
    _, later = second_moment(cast(jnp.bfloat16, rounding="nearest"), 6000)
    np.testing.assert_array_equal(later, nearest)  # it has stopped for good
    _, drawn = second_moment(cast(jnp.bfloat16), 5000)
    # Each draw deviates by at most half of 2^-8, and b2 makes old draws decay, so an
    # element deviates by 2^-9 / sqrt(1 - b2^2) = 0.044. Float32 adds 5000 * 2^-24.
    deviation = 2.0**-9 / np.sqrt(1 - 0.999**2)
    error = abs(drawn.mean() - true.mean())
    assert error <= 5 * deviation / np.sqrt(SIZE) + 5000 * 2.0**-24
    assert drawn.std() <= 1.5 * deviation


# One encoding.


def encode(format_, x, *, number=0, seed=0, step=0):
    @jax.jit
    def run(x, seed, step):
        (random,) = random_bits(seed, step, [0])
        return format_.encode(x, Draws(random), number)

    return run(jnp.asarray(x), jnp.uint32(seed), jnp.uint32(step))


@patterns.each_dtype
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_stored_value_decodes_to_itself_and_is_stored_unchanged_again(
    dtype, rounding
):
    values = patterns.every(dtype)
    wide = patterns.cast(values, np.float32)
    format_ = cast(dtype, rounding=rounding)
    patterns.assert_same(format_.decode(jnp.asarray(values), values.shape), wide)
    patterns.assert_same(encode(format_, wide), values)


@patterns.each_dtype
def test_two_moments_and_two_steps_are_rounded_by_independent_draws(dtype):
    half = np.full(SIZE, 1 + float(ml_dtypes.finfo(dtype).eps) / 2, np.float32)
    up = {
        "mu": encode(cast(dtype), half),
        "nu": encode(cast(dtype), half, number=1),
        "third": encode(cast(dtype), half, number=2),
        "later": encode(cast(dtype), half, step=1),
        "seed": encode(cast(dtype), half, seed=1),
    }
    up = {name: np.asarray(x).astype(np.float32) > 1 for name, x in up.items()}
    for first, second in itertools.combinations(up, 2):
        # Two fair coins agree half of the time.
        agreeing = np.mean(up[first] == up[second])
        assert abs(agreeing - 0.5) <= 5 * np.sqrt(0.25 / SIZE), (first, second)
