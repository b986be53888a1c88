"""Released steps with a loss scale, compiled for H200s: memory."""

import functools

import jax
import pytest

import lowbit_optax
from lowbit_optax import release
from tools.gpu_program.release_steps import (
    MIB,
    CompiledStep,
    compile_step,
    in_float16,
    matrices,
    plain_scaled,
)
from tools.gpu_program.steps import bytes_of
from tools.gpu_program.unrolled import unrolled_matrices

MODELS = {"scanned": matrices, "unrolled": unrolled_matrices}
ADAMW = lowbit_optax.with_loss_scale(
    lowbit_optax.lowbit_adamw(1e-3), lowbit_optax.loss_scaling.backoff_scale()
)


def gradient(model) -> int:
    """Bytes of one layer's."""
    return sum(map(bytes_of, jax.tree.leaves(model.params))) // model.layers


@functools.cache
def compiled(model: str, plain: bool = False, **options) -> CompiledStep:
    make = functools.partial(release.value_and_update, **options)
    return compile_step(
        plain_scaled if plain else make, in_float16(MODELS[model]()), ADAMW
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("options", "gradients"),
    [
        ({"overflow": "exact"}, 2),
        ({"overflow": "layer"}, 2),
        # A clipped gradient is in float32, as large as two.
        ({"max_grad_norm": 1.0}, 3.25),
    ],
    ids=["exact", "layer", "clipped"],
)
def test_beside_activations_two_gradients_are_alive(name, options, gradients):
    model, step = MODELS[name](), compiled(name, **options)
    activations = model.layers * model.carry
    # A layer of a stack is copied out of it for its update.
    copied = step.stored / model.layers if name == "scanned" else 0
    most = activations + gradients * gradient(model) + copied + MIB / 8
    assert step.temporary <= most
    other = compiled(name, plain=True)
    assert other.temporary >= activations + (model.layers - 2) * gradient(model)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_state_are_written_in_place(name):
    step = compiled(name, overflow="exact")
    assert step.program.memory_analysis().alias_size_in_bytes == step.stored
