"""Gradient release of models without a scan, compiled for H200s: memory."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import lowbit_optax
from lowbit_optax import release
from tools.gpu_program.release_steps import MIB, CompiledStep, compile_step, plain
from tools.gpu_program.steps import bytes_of
from tools.gpu_program.unrolled import resnet18, tied_transformer, unrolled_matrices

ADAMW = lowbit_optax.lowbit_adamw(1e-3)
CLIPPED = functools.partial(release.value_and_update, max_grad_norm=1.0)
MODELS = {"transformer": tied_transformer, "resnet": resnet18}


@functools.cache
def compiled(make_step, make_model) -> CompiledStep:
    return compile_step(make_step, make_model(), ADAMW)


def largest(model) -> int:
    return max(bytes_of(x) for x in jax.tree.leaves(model.params))


@pytest.mark.parametrize(
    "make_step", [release.value_and_update, CLIPPED], ids=["one_pass", "clipped"]
)
def test_beside_activations_two_gradients_of_unrolled_layers_are_alive(make_step):
    model = unrolled_matrices()
    activations = model.layers * model.carry
    step = compiled(make_step, unrolled_matrices)
    assert step.temporary <= activations + 2 * largest(model) + MIB / 8
    assert compiled(plain, unrolled_matrices).temporary > 3 * step.temporary


@pytest.mark.parametrize("name", MODELS)
def test_all_gradients_but_two_are_saved(name):
    if name == "resnet":
        pytest.importorskip("flax")
    model = MODELS[name]()
    step, other = (
        compiled(release.value_and_update, MODELS[name]),
        compiled(plain, MODELS[name]),
    )
    saved = bytes_of(model.params) - 2 * largest(model)
    assert step.temporary <= other.temporary - saved


def small_transformer():
    return tied_transformer(context=64, words=1024)


def test_barriers_keep_the_order_of_a_transformers_updates():
    # 19.8 MiB, and 33.3 without release.
    step = compiled(release.value_and_update, small_transformer)
    assert step.temporary <= 20.5 * MIB


def test_unrolled_parameters_and_state_are_written_in_place():
    step = compiled(release.value_and_update, unrolled_matrices)
    assert step.program.memory_analysis().alias_size_in_bytes == step.stored


def by_hand(_, tx):
    """A step of matrices whose layers are written with the public wrapper."""
    update = functools.partial(lowbit_optax.step, ADAMW)
    del tx

    def loss_fn(params, states, h):
        for w, state in zip(params["layers"], states, strict=True):
            w, h = release.released(update, w, state, h)
            h = jnp.tanh(h @ w)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    def train_step(params, states, h):
        loss, new = jax.value_and_grad(loss_fn, (0, 1))(params, states, h)
        return loss, *new

    return train_step


def test_layers_written_with_the_wrapper_hold_one_gradient_at_a_time():
    init = lambda params: [release.as_floats(ADAMW.init(w)) for w in params["layers"]]
    tx = optax.GradientTransformation(init, lambda *_: None)
    model = unrolled_matrices()
    step = compile_step(by_hand, model, tx)
    activations = model.layers * model.carry
    assert step.temporary <= activations + 2 * largest(model) + MIB / 8
    assert step.program.memory_analysis().alias_size_in_bytes == step.stored
