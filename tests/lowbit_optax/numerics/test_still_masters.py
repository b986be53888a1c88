"""A rate of 0 changes no bit of a master, and updates move masters across zero.

optax's sum loses the sign of a zero: both -0 plus +0 and a number minus itself are +0.
With an unsigned residual (``rounding="toward_zero"``), the master has that sign.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import extra_bits
from lowbit_optax._numerics.landing import ADD, ADD_LIKE_GRADS, REPLACE
from lowbit_optax._numerics.random_bits import random_bits
from lowbit_optax.release import value_and_update
from tests.helpers.exact_steps import apply_any as update
from tests.helpers.optimizers import matching_grad_dtype, weights_only
from tests.helpers.patterns import (
    DTYPES,
    assert_same,
    cast,
    each_of,
    every,
    is_nan,
    patterns_of,
)

pytestmark = pytest.mark.standard_promotion

NARROWER = tuple(d for d in DTYPES if d != jnp.bfloat16)
ROUNDINGS = ("nearest", "toward_zero", "stochastic")
each_rounding = pytest.mark.parametrize("rounding", ROUNDINGS)
LANDINGS = {"step": REPLACE, "update": ADD, "update like grads": ADD_LIKE_GRADS}
TOWARD_ZERO = extra_bits(8, rounding="toward_zero")
FLUSHED = np.finfo(np.float32).smallest_normal


def optax_apply(param, update):
    # JAX does not promote float8.
    if isinstance(update, jax.Array) and param.dtype.itemsize == 1:
        return lowbit_optax.apply_updates(param, update)
    return optax.apply_updates(param, update)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def stay(format_, landing, dtype, fields, param):
    """Returns masters before and after an update of -0, and both new parameters."""
    draws = [random_bits(jnp.uint32(0), step, [0])[0] for step in jnp.arange(2)]
    # A state only contains pairs that a split returned, as most of these pairs are.
    master = format_.join(param, fields)
    param, fields = format_.split(master, jnp.dtype(dtype), draws[0])
    landing = landing.of(param, param)
    before = format_.join(param, fields)
    still = jnp.full(param.shape, -0.0, jnp.float32)
    new, kept, result = format_.advance(param, fields, still, draws[1], landing)
    applied = result if landing.is_direct else optax_apply(param, result)
    return before, master, new, applied, format_.join(applied, kept)


@each_of(DTYPES)
@each_rounding
@pytest.mark.parametrize("landing", LANDINGS.values(), ids=LANDINGS.keys())
def test_no_bit_of_any_master_moves_at_rate_0(dtype, rounding, landing):
    # Combine every parameter with every residual.
    format_ = extra_bits(2 if dtype in (jnp.bfloat16, jnp.float16) else 8,
                         rounding=rounding).on_fields()  # fmt: skip
    params = every(dtype)
    fields = np.arange(2**format_.width, dtype=np.uint32)[:, None]
    fields = np.broadcast_to(fields, (fields.size, params.size))
    params = np.broadcast_to(params, fields.shape)
    before, every_master, new, applied, after = map(
        np.asarray, stay(format_, landing, dtype, fields, params)
    )
    with np.errstate(invalid="ignore"):
        # XLA's CPU code flushes subnormal float32 numbers in every sum.
        kept = (np.abs(before) >= FLUSHED) | (before == 0)
    kept |= is_nan(before)
    assert kept.mean() > 0.98
    assert np.mean(patterns_of(before) == patterns_of(every_master)) > 0.95
    assert np.sum((before == 0) & np.signbit(before)) > 0
    assert_same(after[kept], before[kept])
    assert_same(applied[kept], new[kept])


@each_of(DTYPES)
def test_the_sign_of_a_zero_is_applied(dtype):
    # Use old values for which a float32 sum can resolve the smallest number.
    values = every(dtype)
    with np.errstate(invalid="ignore"):
        near = float(ml_dtypes.finfo(dtype).smallest_subnormal) * 2.0**21
        values = values[np.abs(values.astype(np.float32)) < near]
    for zero in cast([0.0, -0.0], dtype):
        new = np.full(values.shape, zero)
        landed, update = jax.jit(ADD.land)(values, new)
        if dtype == jnp.bfloat16:
            # Only subnormals round to bfloat16's zeros, and they are flushed. A zero
            # keeps its sign, and the sum is +0 from all other numbers.
            normal = np.abs(values.astype(np.float32)) >= FLUSHED
            np.testing.assert_array_equal(patterns_of(landed)[normal], 0)
            assert_same(np.asarray(landed)[values == 0], values[values == 0])
        else:
            assert_same(landed, new)
        assert_same(optax_apply(jnp.asarray(values), update), landed)


def masters():
    """Returns numbers near zero in every narrower dtype, including both zeros."""
    rng = np.random.default_rng(0)
    small = rng.normal(size=60) * 2.0 ** rng.integers(-30, -5, 60)
    return jnp.asarray(np.concatenate([[0, -0.0, -0.5, -1e-3], small]), jnp.float32)


def loss(w):
    return jnp.sum(w.astype(jnp.float32))


def released(tx, params, state, grads):
    del grads  # the gradient of the loss is 1 as well
    _, params, state = value_and_update(loss, tx)(params, state)
    return params, state


def sum_outside(tx, params, state, grads):
    """Adds the update in a separate program."""
    updates, state = jax.jit(tx.update)(grads, state, params)
    return jax.jit(optax_apply)(params, updates), state


def like_grads(tx, params, state, grads):
    tx = matching_grad_dtype(tx)
    return update(tx, params, state, grads.astype(params.dtype))


def direct(tx, params, state, grads):
    return sum_outside(lowbit_optax.direct_updates(tx), params, state, grads)


ROUTES = {
    "step": (lowbit_optax.step, None),
    "update": (update, None),
    "optax's sum": (sum_outside, None),
    "direct": (direct, None),
    "like grads": (like_grads, None),
    "released": (released, None),
    "step in kernels": (lowbit_optax.step, "pallas"),
    "update in kernels": (update, "pallas"),
    "update in kernels for TPUs": (update, "tpu"),
}


def assert_still(tx, params, state, advance):
    before = lowbit_optax.master_weights(params, state)
    assert np.any(np.signbit(before) & (np.asarray(params) == 0))
    for _ in range(2):
        params, state = advance(tx, params, state, jnp.ones(params.shape))
        assert_same(lowbit_optax.master_weights(params, state), before)


@each_of(NARROWER)
@pytest.mark.parametrize(
    ("advance", "implementation"), ROUTES.values(), ids=ROUTES.keys()
)
def test_a_rate_of_0_moves_no_master(dtype, advance, implementation):
    tx = weights_only(
        optax.sgd(0.0),
        TOWARD_ZERO,
        min_size=0,
        implementation=implementation,
    )
    params, state = lowbit_optax.from_master(tx, masters(), dtype, None)
    assert_still(tx, params, state, advance)


def accumulated(tx):
    """Wraps an inner transformation that is a chain around this package's."""
    return lowbit_optax.accumulate_gradients(optax.chain(optax.clip(9.0), tx), 4)


def loss_scaled(tx):
    return lowbit_optax.with_loss_scale(
        tx, lowbit_optax.loss_scaling.backoff_scale(2.0**15)
    )


# Wrappers in optax give +0 when they skip a step, and optax adds it to -0.
WAITING = {
    "MultiSteps": (lambda tx: optax.MultiSteps(tx, 4), update),
    "apply_if_finite": (
        lambda tx: optax.apply_if_finite(matching_grad_dtype(tx), 4),
        update,
    ),
    "accumulate_gradients": (
        lambda tx: lowbit_optax.accumulate_gradients(tx, 4),
        sum_outside,
    ),
    "accumulate_gradients of a chain": (accumulated, sum_outside),
    "loss scale": (loss_scaled, update),
    "loss scale, optax's sum": (loss_scaled, sum_outside),
    "loss scale, direct": (loss_scaled, direct),
}


@each_of(NARROWER)
@pytest.mark.parametrize(("wrap", "advance"), WAITING.values(), ids=WAITING.keys())
def test_a_step_without_an_update_moves_no_master(dtype, wrap, advance):
    tx = wrap(weights_only(optax.sgd(0.5), TOWARD_ZERO, min_size=0))
    params, state = lowbit_optax.from_master(tx, masters(), dtype, None)
    grads = jnp.resize(jnp.float32([1, -1]), params.shape)
    if isinstance(state, lowbit_optax.loss_scaling.LossScaleState):
        grads *= jnp.inf
    if isinstance(state, optax.ApplyIfFiniteState):
        grads = (grads * jnp.inf).astype(dtype)
    before = lowbit_optax.master_weights(params, state)
    for _ in range(2):
        params, state = advance(tx, params, state, grads)
        assert_same(lowbit_optax.master_weights(params, state), before)


# Training.


@each_of(DTYPES)
@each_rounding
@pytest.mark.parametrize("implementation", [None, "pallas"])
def test_updates_take_masters_through_zero_as_steps_do(dtype, rounding, implementation):
    # Use masters and updates of the size of the dtype's smallest numbers.
    smallest = max(float(ml_dtypes.finfo(dtype).smallest_subnormal), 2.0**-20)
    rng = np.random.default_rng(3)
    start = jnp.asarray(smallest * rng.normal(size=256), jnp.float32)
    series = rng.normal(size=(24, 256)).astype(np.float32)
    tx = weights_only(
        optax.sgd(smallest / 4),
        extra_bits(8, rounding=rounding),
        min_size=0,
        implementation=implementation,
    )

    def trained(advance):
        @jax.jit
        def run(params, state, series):
            one = lambda carry, grads: (advance(tx, *carry, grads), None)
            return jax.lax.scan(one, (params, state), series)[0]

        return run(*lowbit_optax.from_master(tx, start, dtype, None), series)

    params, state = trained(update)
    wanted, wanted_state = trained(lowbit_optax.step)
    assert_same(params, wanted)
    got = lowbit_optax.master_weights(params, state)
    assert_same(got, lowbit_optax.master_weights(wanted, wanted_state))
    control = start - smallest / 4 * series.sum(0)
    assert np.mean(np.sign(control) != np.sign(start)) > 0.1
    unit = smallest / 2**8  # a step's rounding error is within one unit
    bound = 24 * unit if dtype != jnp.bfloat16 else smallest * 2.0**-10
    np.testing.assert_allclose(got, control, rtol=0, atol=bound)
