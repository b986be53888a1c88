"""A released step gives the ordinary step's numbers, whatever a layer computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import released
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from optimizers import assert_same_bits
from released import (
    RATE,
    SGD,
    dense,
    head_loss,
    normal,
    simple_body,
    simple_loss,
    simple_params,
)

import lowbit_optax
from lowbit_optax import release

pytestmark = pytest.mark.standard_promotion

LAYERS = "['layers']"
model = released.Models()


@model(LAYERS)
def checkpointed_body(params, x):
    body = jax.checkpoint(simple_body)
    return simple_loss(params, x, body)


@model(LAYERS)
def named_residuals(params, x):
    def named(x, w):
        return jnp.tanh(checkpoint_name(x @ w, "product")), None

    policy = jax.checkpoint_policies.save_only_these_names("product")
    body = jax.checkpoint(named, policy=policy)
    return simple_loss(params, x, body)


@jax.custom_vjp
def doubled_backwards(x):
    return x * 1.0


doubled_backwards.defvjp(lambda x: (x * 1.0, None), lambda _, ct: (2 * ct,))


@model(LAYERS)
def custom_derivatives_in_the_body(params, x):
    def body(x, w):
        return jax.nn.relu(doubled_backwards(x @ doubled_backwards(w))), None

    return simple_loss(params, x, body)


@model(LAYERS)
def a_layer_whose_gradient_is_stopped(params, x):
    def body(x, w):
        return dense(x, lax.stop_gradient(w)), None

    return simple_loss(params, x * params["head"], body)


@model(waits="the loss does not depend on it")
def a_stack_that_nothing_reads(params, x):
    return head_loss(params, x)


@model(LAYERS)
def a_body_that_ignores_its_layer(params, x):
    body = lambda x, w: (x * 2, None)
    return simple_loss(params, x, body)


@model(LAYERS)
def complex_numbers_in_the_carry(params, x):
    def body(z, w):
        y = dense(z.real + z.imag, w)
        return lax.complex(y, y * 0.5), None

    z, _ = jax.lax.scan(body, lax.complex(x, x), params["layers"])
    return head_loss(params, z.real)


@model(LAYERS)
def complex_numbers_closed_over(params, x):
    rotation = lax.complex(params["head"], params["head"])

    def body(x, w):
        return dense(x, w) + (rotation * (1 + 2j)).imag, None

    return jnp.mean(jax.lax.scan(body, x, params["layers"])[0] ** 2)


@model(LAYERS)
def complex_numbers_out_of_the_scan(params, x):
    def body(x, w):
        x = dense(x, w)
        return x, lax.complex(x, 2 * x)

    _, ys = jax.lax.scan(body, x * params["head"], params["layers"])
    return jnp.sum(ys.real * ys.imag)


@pytest.mark.parametrize("name", model)
def test_released_steps_are_ordinary_ones(name):
    model.check(name)


def test_effects_in_the_body_happen_once_a_layer():
    seen = []

    def loss_fn(params, x):
        def body(x, w):
            jax.debug.callback(lambda v: seen.append(float(v)), jnp.sum(w))
            return dense(x, w), None

        return simple_loss(params, x, body)

    params, (x,) = simple_params(), released.batches(1)[0]
    step = jax.jit(release.value_and_update(loss_fn, SGD))
    jax.block_until_ready(step(params, SGD.init(params), x))
    jax.effects_barrier()
    want = np.asarray(jnp.sum(params["layers"], axis=(1, 2)))
    np.testing.assert_allclose(sorted(seen), sorted(want), rtol=1e-4, atol=1e-4)


def _quantized_loss(params, x):
    @jax.checkpoint
    def body(x, w):
        return jnp.tanh(x @ lowbit_optax.lpmm.dequantize(w, jnp.float32)), None

    return simple_loss(params, x, body)


LPMM = {
    "sgd": lowbit_optax.lpmm_sgd(RATE, 0.5),
    "adam": lowbit_optax.lpmm_adam(RATE, b1=0.5, b2=0.5, eps=2.0**-10),
}


@pytest.mark.parametrize("name", LPMM)
def test_quantised_layers_are_stepped_as_by_lazy_gradients(name):
    tx = LPMM[name]
    layers = lowbit_optax.lpmm.quantize_params(
        released.weights(3), bits=12, block_size=64
    )
    params = {"layers": layers, "head": normal(64)}
    batches = released.batches(5)

    def step(params, state, x):
        differentiate = lowbit_optax.lpmm.value_and_grad(_quantized_loss, lazy=True)
        loss, grads = differentiate(params, x)
        return loss, *lowbit_optax.step(tx, params, state, grads)

    found = released.updated_in_loop(_quantized_loss, tx, params, *batches[0])
    assert found == released.SIMPLE_IN_LOOP
    want = released.run(step, tx, params, batches)
    step = release.value_and_update(_quantized_loss, tx)
    assert_same_bits(released.run(step, tx, params, batches), want)
