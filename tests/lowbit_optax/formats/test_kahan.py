"""Kahan summation accumulates small updates in every format, up to known limits."""

import functools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import lax

import lowbit_optax
from lowbit_optax._numerics.random_bits import random_bits
from tests.helpers.patterns import DTYPES, float_casts

SIZE = 4096
ARITHMETICS = ("float32", "param")
each_arithmetic = pytest.mark.parametrize("arithmetic", ARITHMETICS)


@functools.partial(jax.jit, static_argnums=(0, 3))
def train(tx, params, grads, steps):
    """Returns the parameters and the state after ``steps`` steps."""

    def one(carry, _):
        params, state = carry
        return lowbit_optax.step(tx, params, state, grads), None

    return lax.scan(one, (params, tx.init(params)), length=steps)[0]


def ones(dtype=jnp.bfloat16):
    return {"w": jnp.ones(SIZE, dtype)}, {"w": jnp.ones(SIZE, jnp.float32)}


def masters(params, state):
    tree = jax.jit(lowbit_optax.master_weights)(params, state)
    return np.asarray(tree["w"]).astype(np.float64)


@functools.cache
def float32_run(learning_rate, steps):
    """Returns the weights of the same training in float32."""
    params, grads = ones(jnp.float32)
    params, _ = train(optax.sgd(learning_rate), params, grads, steps)
    return np.asarray(params["w"])


# Small updates.

STEPS, RATE = 1000, 1e-5


def step_deviation(spacing, steps):
    """Bounds the standard deviation after ``steps`` stochastic roundings.

    A draw between two neighbours varies most if both have probability 1/2.
    """
    return spacing / 2 * np.sqrt(steps)


def assert_tracks_float32(run, spacing, steps=STEPS, rate=RATE):
    """Checks that the masters, and their mean, follow the float32 run.

    ``spacing`` is the spacing of the stored number, which every step rounds
    stochastically. The float32 sums near 1 also round differently, by at most 2^-24 for
    each of the three sums of a step (y, w + y and the error).
    """
    params, state = run
    error = masters(params, state) - float32_run(rate, steps).astype(np.float64)
    rounding = steps * 3 * 2.0**-24
    deviation = step_deviation(spacing, steps)
    assert abs(error.mean()) <= 5 * deviation / np.sqrt(SIZE) + rounding
    # By Azuma-Hoeffding, the chance that one of 4096 exceeds 7 deviations is at most
    # 4096 * 2 exp(-49/2).
    assert np.abs(error).max() <= 7 * deviation + rounding


def test_a_compensation_rounded_to_nearest_stalls_where_the_default_does_not():
    # The rate 1e-6 is about 2^-20. Once c reaches 2^-11, bfloat16's spacing is 2^-18.
    # Each step is then less than half a spacing, and nearest rounding loses it.
    steps, rate = 4000, 1e-6
    params, grads = ones()
    tx = lowbit_optax.kahan_sgd(rate, residual_rounding="nearest")
    after, state = train(tx, params, grads, steps)
    chex.assert_trees_all_equal(after, params)
    np.testing.assert_array_equal(masters(after, state), 1 - 2.0**-11)
    later = train(tx, params, grads, 2 * steps)
    chex.assert_trees_all_equal(later[0], params)
    run = train(lowbit_optax.kahan_sgd(rate), params, grads, steps)
    assert np.all(np.asarray(run[0]["w"]) < 1)
    assert_tracks_float32(run, 2.0**-17, steps, rate)


@pytest.mark.parametrize(
    ("tx", "dtype", "largest"),
    [
        # Below 1, bfloat16's spacing is 2^-8. Eight extra bits reduce it to 2^-16.
        (lowbit_optax.extra_bits_sgd(RATE, bits=8), jnp.bfloat16, 2.0**-8),
        # The compensation is at most half of the parameter's spacing, or a whole
        # spacing if the parameter is rounded stochastically. As a bfloat16 number, its
        # own spacing is 2^-8 of its size.
        (lowbit_optax.kahan_sgd(RATE, rounding="stochastic"), jnp.bfloat16, 2.0**-8),
        *(
            (lowbit_optax.kahan_sgd(RATE), x, float(ml_dtypes.finfo(x).eps) / 4)
            for x in DTYPES
        ),
    ],
)
def test_stored_masters_track_the_float32_run(tx, dtype, largest):
    params, grads = ones(dtype)
    run = train(tx, params, grads, STEPS)
    assert_tracks_float32(run, spacing=largest * 2.0**-8)
    if "compensation" in run[1].residual.name:
        assert run[1].residual.tree["w"].dtype == jnp.bfloat16


# One step, by its lines.


def advance(format_, param, c, update, seed=0):
    (random,) = random_bits(jnp.uint32(seed), jnp.uint32(0), [0])
    return format_.advance(param, c, update, random)


def rounding_errors(rng, w):
    """Returns compensations of up to half a spacing, as rounding to w can leave."""
    power = 2.0 ** np.floor(np.log2(np.abs(w.astype(np.float64))))
    size = power * float(ml_dtypes.finfo(w.dtype).eps) / 2
    return rng.uniform(-1, 1, SIZE) * size


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("residual_rounding", ["nearest", "stochastic"])
def test_a_step_in_float32_arithmetic_rounds_only_what_is_stored(
    dtype, residual_rounding
):
    rng = np.random.default_rng(1)
    w = rng.normal(size=SIZE).astype(dtype)
    c = rounding_errors(rng, w).astype(ml_dtypes.bfloat16)
    update = (rng.normal(size=SIZE) * 10.0 ** rng.uniform(-5, 1, SIZE)).astype("f4")
    format_ = lowbit_optax.kahan(residual_rounding=residual_rounding)
    new, residual, _ = advance(format_, *map(jnp.asarray, (w, c, update)))
    y = update - c.astype(np.float32)
    s = (w.astype(np.float32) + y).astype(dtype)
    np.testing.assert_array_equal(np.asarray(new).view("u2"), s.view("u2"))
    error = (s.astype(np.float32) - w.astype(np.float32)) - y
    if residual_rounding == "nearest":
        np.testing.assert_array_equal(
            np.asarray(residual).view("u2"), error.astype(ml_dtypes.bfloat16).view("u2")
        )
    else:
        low = (error.view("u4") & 0xFFFF0000).view("f4")
        high = ((error.view("u4") + 0xFFFF) & 0xFFFF0000).view("f4")
        wide = np.asarray(residual).astype("f4")
        assert np.all((wide == low) | (wide == high))
        assert np.any(wide != error.astype(ml_dtypes.bfloat16).astype("f4"))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_no_update_changes_nothing(rounding):
    # This includes a compensation that is a tie, half a spacing above 1.
    format_ = lowbit_optax.kahan(rounding=rounding)
    w = jnp.ones(SIZE, jnp.bfloat16)
    c = jnp.asarray(np.resize([2.0**-8, -(2.0**-8), 3e-4, 0.0], SIZE), jnp.bfloat16)
    new, kept, _ = advance(format_, w, c, jnp.zeros(SIZE))
    chex.assert_trees_all_equal((new, kept), (w, c))


def test_a_compensation_of_a_whole_spacing_belongs_to_its_weight():
    # Stochastic rounding can lose almost a whole spacing, which itself rounds up.
    param, residual = jnp.ones(1, jnp.bfloat16), jnp.full(1, 2.0**-7, jnp.bfloat16)
    joined = lowbit_optax.kahan(rounding="stochastic").join(param, residual)
    np.testing.assert_array_equal(joined, 1 - 2.0**-7)


def test_a_sum_that_float32_rounds_to_a_tie_keeps_its_compensation():
    # A few compensations are rounded up, to more than half a spacing of 1.
    format_ = lowbit_optax.kahan()
    w, update = jnp.ones(SIZE, jnp.bfloat16), jnp.full(SIZE, 2.0**-8 + 2.0**-24)
    new, kept, _ = advance(format_, w, jnp.zeros(SIZE, jnp.bfloat16), update)
    assert jnp.max(jnp.abs(kept)) > 2.0**-8
    np.testing.assert_array_equal(new, w)
    np.testing.assert_array_less(1 + 2.0**-9, format_.join(new, kept))


def test_a_weight_that_overflows_has_no_compensation():
    w, update = jnp.full(2, 3e38, jnp.bfloat16), jnp.full(2, 3e38)
    new, kept, _ = advance(lowbit_optax.kahan(), w, jnp.zeros(2, jnp.bfloat16), update)
    assert jnp.isinf(new).all()
    np.testing.assert_array_equal(kept, 0)


# Casts that a GPU's compiler could remove.


@each_arithmetic
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_no_cast_measures_the_rounding_error(arithmetic, rounding):
    # XLA:GPU drops float32 -> bfloat16 -> float32, so an error measured with casts
    # would be zero on a GPU although it is right on a CPU.
    format_ = lowbit_optax.kahan(rounding=rounding, arithmetic=arithmetic)
    param = jnp.ones(8, jnp.bfloat16)
    closed = jax.make_jaxpr(functools.partial(advance, format_))(
        param, format_.init(param), jnp.ones(8)
    )
    assert float_casts(closed) == []


def test_masters_of_replaced_weights_round_to_the_new_weights():
    tx = lowbit_optax.kahan_sgd(0.01)
    draw = lambda n: np.random.default_rng(n).standard_normal((64, 64), np.float32)
    params, state = lowbit_optax.from_master(tx, draw(0))
    step = jax.jit(functools.partial(lowbit_optax.step, tx))
    params, state = step(params, state, draw(1))
    loaded = jnp.asarray(draw(2), jnp.bfloat16)
    plain, _ = lowbit_optax.convert(loaded, state, tx, optax.sgd(0.01))
    for master in (lowbit_optax.master_weights(loaded, state), plain):
        # Only at powers of two, a compensation may be too large for one of the sides.
        assert np.mean(master.astype(jnp.bfloat16) != loaded) < 0.01
