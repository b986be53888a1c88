"""A penalty on the weights is differentiated at the float32 masters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import extra_bits, lowbit
from lowbit_optax.formats import quantized_weights
from lowbit_optax.transformations import regularize


def elastic(params):
    """Penalizes matrices with weight decay and a pull to zero."""
    w = params["w"]
    return jnp.float32(2.0**-13) * jnp.sum(w * w) + jnp.float32(2.0**-12) * jnp.sum(
        jnp.abs(w)
    )


def orthogonal(params):
    w = params["w"]
    error = w.T @ w - jnp.eye(w.shape[1], dtype=w.dtype)
    return jnp.float32(2.0**-12) * jnp.sum(error * error)


def start(dtype):
    random = np.random.default_rng(0)
    return {
        "w": jnp.asarray(random.standard_normal((64, 80)) / 8, dtype),
        "step": jnp.int32(3),
    }


def gradients(seed):
    random = np.random.default_rng(seed)
    w = jnp.asarray(random.standard_normal((64, 80)), jnp.bfloat16)
    return {"w": w, "step": jnp.int32(0)}


def trained(tx, params, steps=8):
    state = jax.jit(tx.init)(params)
    step = jax.jit(functools.partial(lowbit_optax.step, tx))
    for i in range(steps):
        params, state = step(params, state, gradients(i))
    return params, state


def inner(*first):
    sgd = optax.sgd(2.0**-6, momentum=0.5)
    only_floats = {"w": True, "step": False}
    return optax.chain(*first, optax.masked(sgd, only_floats))


@pytest.mark.standard_promotion
@pytest.mark.parametrize("penalty", [elastic, orthogonal])
def test_it_trains_as_float32_with_the_penalty_in_the_loss(penalty):
    weights = start(jnp.bfloat16)["w"].astype(jnp.float32)
    momentum = jnp.zeros_like(weights)
    for i in range(8):
        grad = gradients(i)["w"].astype(jnp.float32)
        grad = grad + jax.grad(lambda w: penalty({"w": w}))(weights)
        momentum = grad + 0.5 * momentum
        weights = weights - 2.0**-6 * momentum
    tx = lowbit(inner(regularize(penalty)), weights=extra_bits(), moments="float32")
    params, state = trained(tx, start(jnp.bfloat16))
    masters = lowbit_optax.master_weights(params, state)
    np.testing.assert_allclose(masters["w"], weights, rtol=1e-5, atol=1e-6)
    without, state = trained(
        lowbit(inner(), weights=extra_bits(), moments="float32"), start(jnp.bfloat16)
    )
    masters = lowbit_optax.master_weights(without, state)
    assert not np.allclose(masters["w"], weights, rtol=1e-5, atol=1e-6)
    assert int(params["step"]) == 3


def test_quantised_weights_are_seen_by_their_values():
    params = lowbit_optax.lpmm.quantize_params({"w": jnp.ones((64, 64))}, bits=16)
    penalty = lambda params: jnp.sum(params["w"] ** 2)
    tx = lowbit(
        optax.chain(regularize(penalty), optax.sgd(0.25)), weights=quantized_weights()
    )
    zeros = {"w": jnp.zeros((64, 64))}
    params, _ = lowbit_optax.step(tx, params, tx.init(params), zeros)
    np.testing.assert_allclose(params["w"].dequantize(), 0.5, rtol=1e-3)


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_gradients_keep_their_dtype_beside_parameters_of_another(dtypes):
    grads, params = (jnp.full(3, 2.0**-12, dtype) for dtype in dtypes)
    tx = regularize(lambda params: jnp.sum(params).astype(jnp.float32))
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates.dtype == grads.dtype
    np.testing.assert_array_equal(updates, (1 + grads).astype(grads.dtype))
