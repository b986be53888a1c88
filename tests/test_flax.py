"""flax TrainState, nnx.Optimizer, equinox's filtered trees, and odd containers."""

import functools
import typing

import chex
import equinox
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict, freeze
from flax.training import train_state
from optimizers import (
    ALIASES,
    VARIANTS,
    assert_same_bits,
    each,
    gradient_series,
    model_params,
    spec_of,
    train,
)

import lowbit_optax
from lowbit_optax import training

pytestmark = pytest.mark.standard_promotion

FEW = {
    name: (ALIASES | VARIANTS)[name]
    for name in ("kahan_adamw", "sr_sgd", "extra_bits_adamw_8")
}

TWO = {name: FEW[name] for name in ("kahan_adamw", "sr_sgd")}


class _Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)(x))
        x = nn.LayerNorm(param_dtype=jnp.float32, dtype=jnp.bfloat16)(x)
        return nn.Dense(4, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)(x)


def _batch():
    random = np.random.default_rng(0)
    inputs = jnp.asarray(random.standard_normal((64, 16)), jnp.bfloat16)
    return inputs, jnp.tanh(inputs[:, :4].astype(jnp.float32))


@jax.jit
def _linen_loss(params):
    inputs, outputs = _batch()
    predicted = _Network().apply({"params": params}, inputs)
    return jnp.mean(jnp.square(predicted.astype(jnp.float32) - outputs))


@functools.cache
def _linen_params():
    return jax.jit(_Network().init)(jax.random.key(0), _batch()[0])["params"]


@each(FEW)
def test_train_states_agree_in_every_bit(optimizer):
    params = model_params()
    series = gradient_series(params, 5, jnp.bfloat16)
    ends = []
    for make in (train_state.TrainState.create, training.TrainState.create):
        state = make(apply_fn=None, params=params, tx=optimizer())
        advance = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
        for grads in series:
            state = advance(state, grads)
        ends.append(state)
    theirs, ours = ends
    assert_same_bits(ours.params, theirs.params)
    assert_same_bits(ours.opt_state, theirs.opt_state)
    assert int(ours.step) == int(theirs.step) == 5


@each(TWO)
def test_a_linen_model_learns_with_train_state(optimizer):
    params = _linen_params()
    state = training.TrainState.create(apply_fn=None, params=params, tx=optimizer())

    @jax.jit
    def advance(state):
        return state.apply_gradients(grads=jax.grad(_linen_loss)(state.params))

    for _ in range(20):
        state = advance(state)
    assert spec_of(state.params) == spec_of(params)
    assert _linen_loss(state.params) < 0.9 * _linen_loss(params)


def test_train_state_runs_optax_transformations_too():
    params = model_params(jnp.float32)
    states = [
        make(apply_fn=None, params=params, tx=optax.adamw(0.01)).apply_gradients(
            grads=gradient_series(params, 1)[0]
        )
        for make in (train_state.TrainState.create, training.TrainState.create)
    ]
    assert_same_bits(states[1].params, states[0].params)


def test_train_state_overwrites_what_flax_float8_layers_hand_over():
    params = {
        "params": {"kernel": jnp.ones((32, 8), jnp.bfloat16)},
        "_overwrite_with_gradient": {"scale": jnp.ones(3)},
    }
    grads = {
        "params": {"kernel": jnp.full((32, 8), 0.5)},
        "_overwrite_with_gradient": {"scale": jnp.full(3, 7.0)},
    }
    states = [
        make(
            apply_fn=None, params=params, tx=lowbit_optax.kahan_sgd(0.5)
        ).apply_gradients(grads=grads)
        for make in (train_state.TrainState.create, training.TrainState.create)
    ]
    assert_same_bits(states[1].params, states[0].params)
    assert_same_bits(states[1].opt_state, states[0].opt_state)
    np.testing.assert_array_equal(
        states[1].params["_overwrite_with_gradient"]["scale"], 7
    )


class _Model(nnx.Module):
    """bfloat16 layers with a float32 normalisation between them."""

    def __init__(self, rngs, norm_dtype):
        half = dict(param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, rngs=rngs)
        self.hidden = nnx.Linear(16, 32, **half)
        self.norm = nnx.LayerNorm(32, param_dtype=norm_dtype, rngs=rngs)
        self.out = nnx.Linear(32, 4, **half)

    def __call__(self, x):
        return self.out(self.norm(nnx.relu(self.hidden(x))).astype(jnp.bfloat16))


@nnx.jit
def _nnx_loss(model):
    inputs, outputs = _batch()
    return jnp.mean(jnp.square(model(inputs).astype(jnp.float32) - outputs))


@pytest.mark.parametrize(
    ("optimizer", "norm_dtype"),
    [(FEW["kahan_adamw"], jnp.bfloat16), *((tx, jnp.float32) for tx in FEW.values())],
    ids=["kahan_adamw all bfloat16", *FEW],
)
def test_nnx_optimizer_trains_as_update_and_apply_do(optimizer, norm_dtype):
    model = _Model(nnx.Rngs(0), norm_dtype)
    tx = optimizer()
    nnx_optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    series = gradient_series(params, 3)
    want, _ = train(tx, params, tx.init(params), series)

    @nnx.jit
    def advance(model, nnx_optimizer, grads):
        state = nnx.state(model, nnx.Param)
        nnx.replace_by_pure_dict(state, grads)
        nnx_optimizer.update(model, state)

    for grads in series:
        advance(model, nnx_optimizer, grads)
    got = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert_same_bits(got, want)
    assert got["norm"]["scale"].dtype == norm_dtype
    assert got["hidden"]["kernel"].dtype == jnp.bfloat16


@each(TWO)
def test_a_model_learns_with_nnx_optimizer(optimizer):
    model = _Model(nnx.Rngs(0), jnp.float32)
    start = _nnx_loss(model)
    nnx_optimizer = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

    @nnx.jit
    def advance(model, nnx_optimizer):
        nnx_optimizer.update(model, nnx.grad(_nnx_loss)(model))

    for _ in range(20):
        advance(model, nnx_optimizer)
    assert _nnx_loss(model) < 0.9 * start


def test_nnx_optimizer_state_is_the_transformations_own():
    model = _Model(nnx.Rngs(0), jnp.float32)
    nnx_optimizer = nnx.Optimizer(model, lowbit_optax.kahan_adamw(1e-3), wrt=nnx.Param)
    assert isinstance(nnx_optimizer.opt_state, lowbit_optax.LowbitState)
    compensation = nnx_optimizer.opt_state.residual.compensation
    assert compensation["hidden"]["kernel"][...].dtype == jnp.bfloat16
    assert compensation["norm"]["scale"].get_value() is None


@each(TWO)
def test_equinox_partitioned_trees_with_none_train(optimizer):
    model = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if equinox.is_array(x) else x,
        equinox.nn.MLP(16, 4, 32, 1, key=jax.random.key(0)),
    )
    params, static = equinox.partition(model, equinox.is_inexact_array)
    tx = optimizer()

    @equinox.filter_jit
    def loss(params):
        inputs, outputs = _batch()
        predicted = jax.vmap(equinox.combine(params, static))(inputs)
        return jnp.mean(jnp.square(predicted.astype(jnp.float32) - outputs))

    @equinox.filter_jit
    def advance(params, state):
        grads = equinox.filter_grad(loss)(params)
        # equinox.apply_updates would return float32 parameters.
        updates, state = tx.update(grads, state, params)
        return lowbit_optax.apply_updates(params, updates), state

    start, first = loss(params), params
    state = tx.init(params)
    for _ in range(10):
        params, state = advance(params, state)
    assert loss(params) < start
    assert spec_of(params) == spec_of(first)
    masters = lowbit_optax.master_weights(params, state)
    assert jax.tree.structure(masters) == jax.tree.structure(params)


@each(FEW)
def test_other_containers_train_as_a_dict_does(optimizer):
    tx = optimizer()
    params = model_params()
    series = gradient_series(params, 3)
    want, _ = train(tx, params, tx.init(params), series)

    frozen = freeze(params)
    got, _ = train(tx, frozen, tx.init(frozen), [freeze(g) for g in series])
    assert isinstance(got, FrozenDict)
    assert_same_bits(got.unfreeze(), want)


@each(FEW)
def test_a_bare_array_trains(optimizer):
    tx = optimizer()
    params = jnp.linspace(-2, 2, 64, dtype=jnp.bfloat16)
    state = tx.init(params)
    moved, state = train(tx, params, state, [jnp.sign(params)] * 20)
    assert moved.dtype == jnp.bfloat16
    masters = lowbit_optax.master_weights(moved, state)
    assert masters.shape == (64,)
    # Every step is toward zero, by at least 20 times half the learning rate.
    gone = jnp.abs(params.astype(jnp.float32)) - jnp.abs(masters)
    far = jnp.abs(params) > 1.5
    assert (gone[far] > 10 * optimizer.peak).all()


class _Pair(typing.NamedTuple):
    left: jax.Array
    right: jax.Array


@chex.dataclass
class _Layer:
    weight: jax.Array


def test_tuples_lists_and_dataclasses_of_parameters_train():
    leaf = jnp.ones((32, 4), jnp.bfloat16)
    params = ([leaf, {"a": leaf}], _Pair(leaf, leaf), _Layer(weight=leaf))
    tx = lowbit_optax.extra_bits_adamw(0.1, bits=8, min_size=0)
    grads = jax.tree.map(jnp.ones_like, params)
    moved, state = train(tx, params, tx.init(params), [grads, grads])
    assert spec_of(moved) == spec_of(params)
    assert spec_of(lowbit_optax.master_weights(moved, state))[0] == spec_of(params)[0]
