"""equinox: parameters that its apply_updates made float32.

That its models train, ``tests/trainers/test_equinox_updates.py`` tests.
"""

import equinox
import jax
import jax.numpy as jnp
import optax
import pytest

import lowbit_optax

pytestmark = pytest.mark.standard_promotion


def _model():
    return jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if equinox.is_array(x) else x,
        equinox.nn.MLP(16, 4, 32, 1, key=jax.random.key(0)),
    )


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
