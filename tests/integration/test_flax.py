"""flax's TrainState and nnx.Optimizer, and unusual containers."""

import typing

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state

import lowbit_optax
from lowbit_optax import training
from tests.helpers.optimizers import (
    ALIASES,
    VARIANTS,
    assert_same_bits,
    gradient_series,
    model_params,
    spec_of,
    train,
)

pytestmark = pytest.mark.standard_promotion

FEW = {
    name: (ALIASES | VARIANTS)[name]
    for name in ("kahan_adamw", "sr_sgd", "extra_bits_adamw_8")
}


LOW = lowbit_optax.extra_bits_adamw(0.01, min_size=0)


def _narrow(x):
    return x.astype(jnp.float16) if x.ndim > 1 else x


def _float32_model():
    """A flax linen network, and its float32 variables."""
    model = nn.Sequential([nn.Dense(32), nn.LayerNorm(), nn.Dense(4)])
    return model, jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 16)))


FLOAT8 = {
    "params": {"kernel": jnp.ones((32, 8), jnp.bfloat16)},
    "_overwrite_with_gradient": {"scale": jnp.ones(3)},
}
AS_FLAXS = {
    **{name: (model_params, make()) for name, make in FEW.items()},
    "optax": (lambda: model_params(jnp.float32), optax.adamw(0.01)),
    "float8 layers": (lambda: FLOAT8, lowbit_optax.kahan_sgd(0.5)),
    "narrow model": (lambda: jax.tree.map(_narrow, _float32_model()[1]), LOW),
}


@pytest.mark.parametrize(("make_params", "tx"), AS_FLAXS.values(), ids=AS_FLAXS)
def test_train_state_is_flaxs_in_every_bit(make_params, tx):
    params = make_params()
    series = gradient_series(params, 5, jnp.bfloat16)
    advance = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    ends = []
    for make in (train_state.TrainState.create, training.TrainState.create):
        state = make(apply_fn=None, params=params, tx=tx)
        for grads in series:
            state = advance(state, grads)
        ends.append(state)
    theirs, ours = ends
    assert_same_bits(ours.params, theirs.params)
    assert_same_bits(ours.opt_state, theirs.opt_state)
    assert int(ours.step) == int(theirs.step) == 5
    key = "_overwrite_with_gradient"
    if key in params:  # from flax's float8 layers
        assert_same_bits(ours.params[key], series[-1][key])


def test_float32_parameters_become_narrow_and_lose_nothing():
    model, variables = _float32_model()
    state = training.TrainState.create(apply_fn=model.apply, params=variables, tx=LOW)
    dtypes = {
        jax.tree_util.keystr(path): str(leaf.dtype)
        for path, leaf in jax.tree_util.tree_flatten_with_path(state.params)[0]
    }
    assert dtypes == {
        "['params']['layers_0']['kernel']": "bfloat16",
        "['params']['layers_0']['bias']": "float32",
        "['params']['layers_1']['scale']": "float32",
        "['params']['layers_1']['bias']": "float32",
        "['params']['layers_2']['kernel']": "bfloat16",
        "['params']['layers_2']['bias']": "float32",
    }
    masters = lowbit_optax.master_weights(state.params, state.opt_state)
    assert_same_bits(masters, variables)
    assert (int(state.step), state.apply_fn, state.tx) == (0, model.apply, LOW)


def test_other_fields_of_a_subclass_are_taken_in_both_ways():
    class WithStatistics(training.TrainState):
        batch_stats: typing.Any = None

    params = {"kernel": jnp.full((64, 64), 0.1)}
    for options in ({}, {"param_dtype": jnp.float16}):
        state = WithStatistics.create(
            apply_fn=None, params=params, tx=LOW, batch_stats=3, **options
        )
        assert type(state) is WithStatistics
        assert state.batch_stats == 3


def test_scales_of_float8_layers_are_not_narrowed():
    params = {
        "params": {"kernel": jnp.full((64, 64), 0.1)},
        "_overwrite_with_gradient": {"scale": jnp.ones((3, 3))},
    }
    state = training.TrainState.create(apply_fn=None, params=params, tx=LOW)
    assert state.params["params"]["kernel"].dtype == jnp.bfloat16
    assert state.params["_overwrite_with_gradient"]["scale"].dtype == jnp.float32
    state = state.apply_gradients(grads=params)
    np.testing.assert_array_equal(state.params["_overwrite_with_gradient"]["scale"], 1)


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
