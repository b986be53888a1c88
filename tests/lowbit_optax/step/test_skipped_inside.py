"""A step that the inner transformation skips changes no stored bit.

``lowbit`` decodes moments and encodes them again. If the inner transformation returns
them as they were, by a condition, what is stored stays.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import (
    ALL_FORMATS,
    apply,
    assert_same_bits,
    initial,
    jitted,
    train,
)

import lowbit_optax
from lowbit_optax import block_quantized, cast, lowbit

pytestmark = pytest.mark.standard_promotion

MOMENTS = {
    "8 bits": block_quantized(8),
    "4 bits": block_quantized(4),
    "linear": block_quantized(8, code="linear"),
    "2048": block_quantized(8, block_size=2048),
    "bfloat16": cast(jnp.bfloat16),
}


def params_of(shape=(64, 80)):
    x = np.random.default_rng(0).standard_normal(shape)
    x[0] = -0.0
    return {
        "w": jnp.asarray(x, jnp.bfloat16),
        "b": jnp.asarray(x[1], jnp.float32),
    }


def grads_of(params, seed, value=None):
    random = np.random.default_rng(seed)
    grads = {
        name: jnp.asarray(random.standard_normal(x.shape), x.dtype)
        for name, x in params.items()
    }
    if value is not None:
        grads["w"] = grads["w"].at[3, 4].set(value)
    return grads


def trained(tx, advance=lowbit_optax.step):
    """The step, jitted, and parameters and state after some good steps."""
    params = params_of()
    series = [grads_of(params, seed) for seed in range(3)]
    params, state = train(tx, params, initial(tx, params), series, advance)
    return jitted(tx, advance), params, state


def inner_state_of(state):
    return state.inner_state


def assert_skips(tx, advance=lowbit_optax.step, of_inner=inner_state_of):
    """A step of a gradient that is not finite changes nothing, another all of it."""
    step, params, state = trained(tx, advance)
    for bad in (np.nan, -np.inf):
        after, new = step(params, state, grads_of(params, 9, bad))
        assert_same_bits((after, new.residual), (params, state.residual))
        assert_same_bits(of_inner(new.inner_state), of_inner(state.inner_state))
    # So large that the scales of all blocks change.
    large = jax.tree.map(lambda x: 64 * x, grads_of(params, 9))
    moved, new = step(params, state, large)
    assert all((moved[name] != params[name]).any() for name in params)
    before = map(np.asarray, jax.tree.leaves(of_inner(state.inner_state)))
    after = map(np.asarray, jax.tree.leaves(of_inner(new.inner_state)))
    assert all((old != x).any() for old, x in zip(before, after, strict=True))


def finite_only(inner):
    return optax.apply_if_finite(inner, max_consecutive_errors=10)


ADAMW = finite_only(optax.adamw(0.01))
SGD = finite_only(optax.sgd(0.1, momentum=0.9))
# The parameters of this format are rounded at random in every step.
DRAWN = {"weights": ALL_FORMATS["extra_bits_7_stochastic"]}
CASES = {
    **{name: (ADAMW, {"moments": x}, lowbit_optax.step) for name, x in MOMENTS.items()},
    **{
        name: (SGD, {"weights": x}, lowbit_optax.step)
        for name, x in ALL_FORMATS.items()
    },
    "update": (ADAMW, DRAWN, apply),
    "kernel step": (ADAMW, DRAWN | {"implementation": "pallas"}, lowbit_optax.step),
    "kernel update": (ADAMW, DRAWN | {"implementation": "pallas"}, apply),
}


@pytest.mark.parametrize(("inner", "options", "advance"), CASES.values(), ids=CASES)
def test_apply_if_finite_inside_changes_no_bit(inner, options, advance):
    options = {"implementation": "xla", "min_size": 0} | options
    assert_skips(lowbit(inner, **options), advance)


@pytest.mark.slow_to_compile
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_two_conditions_may_both_skip(implementation):
    inner = lowbit(ADAMW, min_size=0, implementation=implementation)
    tx = lowbit_optax.with_loss_scale(inner, lowbit_optax.static_scale(2.0))
    step, params, state = trained(tx)
    after, new = step(params, state, grads_of(params, 9, np.nan))
    assert_same_bits((after, new.inner_state), (params, state.inner_state))
    moved, _ = step(params, state, grads_of(params, 9))
    assert all((moved[name] != params[name]).any() for name in params)


@pytest.mark.slow_to_compile
def test_a_loss_scale_inside_changes_no_moment():
    scaled = lowbit_optax.with_loss_scale(
        optax.adamw(0.01), lowbit_optax.static_scale(2.0)
    )
    assert_skips(lowbit(scaled, min_size=0))


def all_finite(updates):
    leaves = jax.tree.leaves(updates)
    return jnp.all(jnp.stack([jnp.isfinite(x).all() for x in leaves]))


def chosen_elementwise(inner):
    """Skips by selections, and scales its updates afterwards."""

    def update(updates, state, params=None):
        finite = all_finite(updates)
        new, new_state = inner.update(updates, state, params)
        choose = lambda x, old: jnp.where(finite, x, old)
        new = jax.tree.map(lambda x: -choose(x, jnp.zeros_like(x)) * 0.5, new)
        return new, jax.tree.map(choose, new_state, state)

    return optax.GradientTransformation(inner.init, update)


def one_in_three(inner):
    """Skips by one of three branches."""

    def update(updates, state, params=None):
        skip = lambda _: (jax.tree.map(jnp.zeros_like, updates), state)
        branches = [lambda _: inner.update(updates, state, params), skip, skip]
        return jax.lax.switch(jnp.where(all_finite(updates), 0, 2), branches, None)

    return optax.GradientTransformation(inner.init, update)


SKIPPING = {
    "selections": lambda: chosen_elementwise(optax.scale_by_adam()),
    "switch": lambda: one_in_three(optax.adam(0.01)),
    "nested": lambda: one_in_three(chosen_elementwise(optax.adam(0.01))),
}


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@pytest.mark.parametrize("skipping", SKIPPING.values(), ids=SKIPPING.keys())
def test_any_condition_that_keeps_the_state_is_found(skipping, implementation):
    tx = lowbit(skipping(), min_size=0, implementation=implementation)
    assert_skips(tx, of_inner=lambda state: state)


def test_a_condition_around_matrix_products_is_found():
    tx = lowbit(finite_only(optax.contrib.muon(0.01)), min_size=0)
    # Its coefficients are part of its state, and never change.
    moments = lambda state: [
        x for x in jax.tree.leaves(state.inner_state) if x.size not in (1, 3)
    ]
    assert_skips(tx, of_inner=moments)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_multi_steps_inside_changes_only_its_sum_between_updates(implementation):
    tx = lowbit(
        optax.MultiSteps(optax.adamw(0.01), 3).gradient_transformation(),
        min_size=0,
        implementation=implementation,
    )
    step, params, state = trained(tx)
    for i in range(2):
        after, new = step(params, state, grads_of(params, 10 + i))
        assert_same_bits(after, params)
        before = state.inner_state
        assert_same_bits(new.inner_state.inner_opt_state, before.inner_opt_state)
        assert (new.inner_state.acc_grads["w"] != before.acc_grads["w"]).any()
        params, state = after, new
    after, _ = step(params, state, grads_of(params, 12))
    assert (after["w"] != params["w"]).any()


@pytest.mark.slow_to_compile
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_good_steps_are_those_without_the_condition(implementation):
    make = lambda inner: lowbit(inner, min_size=0, implementation=implementation)
    inner = optax.adamw(2.0**-7)
    _, params, _ = trained(make(inner))
    _, guarded, new = trained(make(finite_only(inner)))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=0.01),
        jax.tree.map(lambda x: x.astype(jnp.float32), guarded),
        jax.tree.map(lambda x: x.astype(jnp.float32), params),
    )
    assert int(new.inner_state.total_notfinite) == 0


def test_a_transformation_that_looks_at_values_runs_without_jit():
    def update(updates, state, params=None):
        size = float(jnp.abs(updates["w"]).max())
        return jax.tree.map(lambda g: -g / size, updates), state

    inner = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    tx = lowbit(inner, implementation="xla")
    params = params_of()
    moved, _ = lowbit_optax.step(
        tx,
        params,
        tx.init(params),
        grads_of(params, 0),
    )
    assert (moved["w"] != params["w"]).any()
