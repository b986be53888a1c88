"""Transformations can be copied, pickled and mapped over like those in optax.

Standard pickle stores functions by name only, so it cannot pickle most of optax's
transformations, which consist of local functions. If an inner transformation can be
pickled, ``lowbit`` with it must be too. cloudpickle must work for all of them.
"""

import copy
import functools
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.extend import core

import lowbit_optax
from tests.helpers.exact_steps import apply_any
from tests.helpers.optimizers import assert_same_bits

pytestmark = pytest.mark.standard_promotion

TRANSFORMATIONS = {
    "lowbit": lowbit_optax.lowbit(optax.adamw(0.01)),
    "kahan_adamw": lowbit_optax.kahan_adamw(0.01),
    "extra_bits_sgd": lowbit_optax.extra_bits_sgd(0.01, 0.9, bits=8, min_size=0),
    "lpmm_sgd": lowbit_optax.lpmm_sgd(0.01),
    "with_loss_scale": lowbit_optax.with_loss_scale(
        lowbit_optax.kahan_sgd(0.01), lowbit_optax.loss_scaling.backoff_scale()
    ),
    "accumulate_gradients": lowbit_optax.accumulate_gradients(
        lowbit_optax.kahan_sgd(0.01), 2
    ),
}
AROUND = {
    "direct_updates": lowbit_optax.direct_updates(lowbit_optax.kahan_sgd(0.01)),
    "chain": optax.chain(optax.clip(1.0), lowbit_optax.kahan_sgd(0.01)),
}

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "tree.map": lambda tx: jax.tree.map(lambda x: x, tx),
    "flattened": lambda tx: jax.tree.unflatten(
        jax.tree.structure(tx), jax.tree.leaves(tx)
    ),
    "_replace": lambda tx: tx._replace(init=tx.init),
    "init and update": lambda tx: optax.GradientTransformationExtraArgs(*tx),
    "cloudpickle": lambda tx: cloudpickle.loads(cloudpickle.dumps(tx)),
}


def _params():
    return {"w": jnp.linspace(-2, 2, 64 * 8).reshape(64, 8).astype(jnp.bfloat16)}


def _grads():
    return {"w": jnp.full((64, 8), 0.3, jnp.bfloat16)}


def _program(function, tx):
    """Returns a step's operations in order, which differ between step and update."""
    params = _params()
    state = jax.eval_shape(tx.init, params)
    jaxpr = jax.make_jaxpr(functools.partial(function, tx))(params, state, _grads())
    return list(_operations(jaxpr.jaxpr))


def _operations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name, [str(x.aval) for x in equation.outvars]
        for inner in core.jaxprs_in_params(equation.params):
            yield from _operations(inner)


@pytest.mark.parametrize("tx", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_it_is_a_plain_optax_transformation(tx):
    assert type(tx) is optax.GradientTransformationExtraArgs
    assert len(repr(tx)) < 200  # without the bound methods' arrays and options
    init, update = tx
    assert tx.init == init
    assert tx.update == update
    assert optax.with_extra_args_support(tx) is tx


@pytest.mark.parametrize(
    "tx", [*TRANSFORMATIONS.values(), *AROUND.values()], ids=[*TRANSFORMATIONS, *AROUND]
)
def test_a_deep_copy_of_what_holds_it_is_equal_and_not_traced_again(tx):
    model = nnx.Linear(8, 64, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    state = train_state.TrainState.create(apply_fn=None, params=_params(), tx=tx)
    again = copy.deepcopy(state)
    assert again.tx == tx
    assert hash(again.tx) == hash(tx)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    traces = []

    @jax.jit
    def train_step(state):
        traces.append(None)
        return state.step + 1

    train_step(state)
    train_step(again)
    assert len(traces) == 1
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    assert nnx.graphdef(copy.deepcopy(optimizer)) == nnx.graphdef(optimizer)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("tx", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_a_copy_steps_by_the_same_program(tx, copied):
    other = copied(tx)
    assert type(other) is optax.GradientTransformationExtraArgs
    step = lowbit_optax.step
    assert _program(step, other) == _program(step, tx)
    assert _program(apply_any, other) == _program(apply_any, tx)


def test_a_replaced_update_is_the_one_that_step_calls():
    tx = TRANSFORMATIONS["kahan_adamw"]

    def frozen(updates, state, params=None, **extra_args):
        del params, extra_args
        return jax.tree.map(jnp.zeros_like, updates), state

    still = tx._replace(update=frozen)
    params, state = _params(), tx.init(_params())
    moved, after = lowbit_optax.step(still, params, state, _grads())
    assert_same_bits(moved, params)
    assert_same_bits(after, state)


def _init(params):
    return jax.tree.map(jnp.zeros_like, params)


def _update(updates, state, params=None):
    del params
    state = jax.tree.map(lambda m, g: m * 0.5 + g, state, updates)
    return jax.tree.map(lambda m: m * -0.25, state), state


def _update_with_extra_args(updates, state, params=None, **extra_args):
    del extra_args
    return _update(updates, state, params)


PICKLED_BY_OPTAX = {
    "plain": optax.GradientTransformation(_init, _update),
    "extra args": optax.GradientTransformationExtraArgs(_init, _update_with_extra_args),
}


@pytest.mark.parametrize("inner", PICKLED_BY_OPTAX.values(), ids=PICKLED_BY_OPTAX)
@pytest.mark.parametrize(
    "around",
    [
        lambda inner: lowbit_optax.lowbit(inner, weights=lowbit_optax.kahan()),
        lambda inner: lowbit_optax.with_loss_scale(
            lowbit_optax.lowbit(inner), lowbit_optax.loss_scaling.static_scale(1.0)
        ),
    ],
    ids=["lowbit", "with_loss_scale"],
)
def test_pickled_transformations_are_pickled_inside_lowbit_too(inner, around):
    pickle.loads(pickle.dumps(inner))
    tx = around(inner)
    other = pickle.loads(pickle.dumps(tx))
    params = _params()
    state = tx.init(params)
    got = lowbit_optax.step(other, params, state, _grads())
    assert_same_bits(got, lowbit_optax.step(tx, params, state, _grads()))
    assert np.count_nonzero(got[0]["w"] != params["w"])
