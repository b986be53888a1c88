"""equinox: filtered trees, and parameters that its apply_updates made float32."""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import ALIASES, each, spec_of

import lowbit_optax

pytestmark = pytest.mark.standard_promotion


def _batch():
    random = np.random.default_rng(0)
    inputs = jnp.asarray(random.standard_normal((64, 16)), jnp.bfloat16)
    return inputs, jnp.tanh(inputs[:, :4].astype(jnp.float32))


def _model():
    return jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if equinox.is_array(x) else x,
        equinox.nn.MLP(16, 4, 32, 1, key=jax.random.key(0)),
    )


@each({name: ALIASES[name] for name in ("kahan_adamw", "sr_sgd")})
def test_partitioned_trees_with_none_train(optimizer):
    params, static = equinox.partition(_model(), equinox.is_inexact_array)
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


def _kept_by(weights):
    return lowbit_optax.lowbit(optax.sgd(0.1), weights=weights)


WITH_RESIDUALS = {
    "extra_bits": _kept_by(lowbit_optax.extra_bits(8)),
    "kahan": _kept_by(lowbit_optax.kahan()),
    "master_copy": _kept_by(lowbit_optax.master_copy()),
    "loss scale": lowbit_optax.with_loss_scale(
        _kept_by(lowbit_optax.kahan()), lowbit_optax.loss_scaling.static_scale(8.0)
    ),
    "chain": optax.chain(optax.clip(1.0), _kept_by(lowbit_optax.kahan())),
}


CALLS = {
    "update": lambda tx, params, state, grads: tx.update(grads, state, params),
    "step": lowbit_optax.step,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("tx", WITH_RESIDUALS.values(), ids=WITH_RESIDUALS)
def test_parameters_that_became_float32_are_an_error_with_the_remedy(tx, call):
    params, _ = equinox.partition(_model(), equinox.is_inexact_array)
    grads = jax.tree.map(jnp.ones_like, params)
    updates, state = tx.update(grads, tx.init(params), params)
    wide = equinox.apply_updates(params, updates)
    assert {leaf.dtype for leaf in jax.tree.leaves(wide)} == {jnp.dtype("float32")}
    with pytest.raises((TypeError, ValueError)) as error:
        call(tx, wide, state, grads)
    message = str(error.value)
    assert "params.layers[0].weight" in message
    assert "float32" in message
    assert "lowbit_optax.apply_updates" in message
