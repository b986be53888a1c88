"""With direct updates, `optax.apply_updates` returns the parameters of `step`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import direct_updates, kahan_sgd, lowbit_adamw
from lowbit_optax.transformations import DirectUpdate
from tests.helpers.optimizers import (
    ALIASES,
    apply,
    assert_same_bits,
    each,
    gradient_series,
    model_params,
    train,
)

pytestmark = pytest.mark.standard_promotion


def _run(advance, tx, params, series):
    return train(tx, params, tx.init(params), series, advance)


@each(ALIASES)
def test_every_alias_gives_the_bits_of_step(optimizer):
    params = model_params()
    series = gradient_series(params, 3)
    want = _run(lowbit_optax.step, optimizer(), params, series)
    assert_same_bits(_run(apply, direct_updates(optimizer()), params, series), want)


def _kernels(params):
    return {name: name == "kernel" for name in params}


def _others(params):
    return {name: name != "kernel" for name in params}


# With a power of two, fusing a product by a traced rate with a sum changes nothing.
RATE = 2.0**-4
AROUND = {
    "chain": lambda make: optax.chain(optax.clip(1.0), make(RATE)),
    "multi_steps": lambda make: optax.MultiSteps(make(RATE), 2),
    "masked": lambda make: optax.chain(
        optax.masked(optax.sgd(RATE), _others), optax.masked(make(RATE), _kernels)
    ),
    "partition": lambda make: optax.partition(
        {True: make(RATE), False: optax.sgd(RATE)}, _kernels
    ),
    "inject_hyperparams": lambda make: optax.inject_hyperparams(
        make, hyperparam_dtype=jnp.float32
    )(learning_rate=RATE),
    "loss_scale": lambda make: lowbit_optax.with_loss_scale(
        make(RATE), lowbit_optax.loss_scaling.static_scale(1.0)
    ),
}


@each(AROUND)
@pytest.mark.parametrize("advance", [apply, lowbit_optax.step])
def test_inside_and_around_wrappers_it_gives_the_bits_of_step(optimizer, advance):
    wrap, params = optimizer, model_params()
    alias = lambda learning_rate: lowbit_optax.extra_bits_adamw(learning_rate)
    series = gradient_series(params, 4)
    want = _run(lowbit_optax.step, wrap(alias), params, series)
    outside = direct_updates(wrap(alias))
    assert_same_bits(_run(advance, outside, params, series), want)
    inside = wrap(lambda learning_rate: direct_updates(alias(learning_rate)))
    assert_same_bits(_run(advance, inside, params, series), want)


def test_sums_of_gradients_step_directly():
    tx = lowbit_optax.accumulate_gradients(lowbit_adamw(RATE), 2)
    params = model_params()
    series = gradient_series(params, 4)
    want = _run(lowbit_optax.step, tx, params, series)
    assert_same_bits(_run(apply, direct_updates(tx), params, series), want)


@pytest.mark.parametrize("boundary", ["jit", "eager", "cond"])
def test_a_boundary_between_update_and_sum_changes_no_bit(boundary):
    tx = direct_updates(lowbit_adamw(0.1))
    params = model_params()
    # Include zeros of both signs, and a weight that falls by more bits than float32
    # has.
    params["kernel"] = (
        params["kernel"].at[0, :3].set(jnp.array([1e30, 0.0, -0.0], jnp.bfloat16))
    )
    series = gradient_series(params, 3)
    outer = (lambda f: f) if boundary == "eager" else jax.jit
    step = outer(functools.partial(lowbit_optax.step, tx))
    want = params, tx.init(params)
    for grads in series:
        want = step(*want, grads)

    def update(grads, state, params):
        if boundary != "cond":
            return tx.update(grads, state, params)
        do = lambda: tx.update(grads, state, params)
        return jax.lax.cond(state.count < 100, do, do)

    update = outer(update)
    state = tx.init(params)
    for grads in series:
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert_same_bits((params, state), want)


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_loss_scale_skips_a_step(is_inside):
    scale = lowbit_optax.loss_scaling.backoff_scale(2.0**8)
    scaled = lambda tx: lowbit_optax.with_loss_scale(tx, scale)
    inner = lowbit_adamw(0.1)
    tx = direct_updates(scaled(inner)) if is_inside else scaled(direct_updates(inner))
    params = model_params()
    series = gradient_series(params, 3)
    series[1] = jax.tree.map(lambda x: x.at[..., 0].set(jnp.inf), series[1])
    want = _run(lowbit_optax.step, scaled(inner), params, series)
    assert_same_bits(_run(apply, tx, params, series), want)


def test_the_sum_with_a_copy_is_exactly_the_new_weight():
    """Covers full cancellation, a zero of the other sign, and infinity."""
    old = jnp.array([1.0, 1e30, 0.0, 1.0, jnp.inf], jnp.bfloat16)
    new = jnp.array([1e-9, -3e-5, -0.0, jnp.inf, 2.0], jnp.bfloat16)
    assert_same_bits(jnp.array(old) + DirectUpdate(new, old), new)


def test_the_sum_with_another_parameter_adds_the_difference():
    update = DirectUpdate(jnp.float32([2.0, 5.0]), jnp.float32([1.0, 1.0]))
    np.testing.assert_array_equal(jnp.float32([1.0, 3.0]) + update, [2.0, 7.0])
    np.testing.assert_array_equal(np.float32([1.0, 3.0]) + update, [2.0, 7.0])
    half = jax.tree.map(lambda x: x / 2, update)
    np.testing.assert_array_equal(jnp.float32([1.0, 1.0]) + half, [1.5, 3.0])


def test_apply_if_finite_goes_inside():
    make = lambda tx: optax.apply_if_finite(tx, 3)
    alias, params = lowbit_optax.extra_bits_adamw(RATE), model_params()
    series = gradient_series(params, 3)
    want = _run(lowbit_optax.step, make(alias), params, series)
    assert_same_bits(_run(apply, direct_updates(make(alias)), params, series), want)
    assert_same_bits(
        _run(lowbit_optax.step, make(direct_updates(alias)), params, series), want
    )
    with pytest.raises(TypeError, match="DirectUpdate"):
        _run(apply, make(direct_updates(alias)), params, series)


def test_computing_with_direct_updates_raises_an_error():
    tx, params = direct_updates(kahan_sgd(0.5)), {"w": jnp.ones(4, jnp.bfloat16)}
    grads = {"w": jnp.ones(4, jnp.bfloat16)}
    updates, _ = tx.update(grads, tx.init(params), params)
    with pytest.raises(TypeError):
        _ = updates["w"] * 2
    with pytest.raises(TypeError):
        jnp.square(updates["w"])
    with pytest.raises(ValueError, match="DirectUpdate"):  # as in equinox.apply_updates
        jax.tree.map(lambda u, p: p + u, updates, params)
    decayed = optax.chain(tx, optax.add_decayed_weights(0.1))
    with pytest.raises(ValueError, match="DirectUpdate"):
        decayed.update(grads, decayed.init(params), params)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), updates)
    with pytest.raises(TypeError, match=r"float32\[4\].*bfloat16\[4\]"):
        optax.apply_updates(params, wide)
