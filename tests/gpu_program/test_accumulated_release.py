"""Accumulation of gradients in a model without a scan, compiled for an H200: memory."""

import lowbit_optax
from lowbit_optax import release
from tools.gpu_program.release_steps import compile_step, plain
from tools.gpu_program.unrolled import unrolled_matrices

ACCUMULATED = lowbit_optax.accumulate_gradients(lowbit_optax.lowbit_adamw(1e-3), 4)
LAYERS, WIDTH = 4, 512
ONE_GRADIENT = 2 * WIDTH**2


def compiled(make_step):
    """The step, and its temporary bytes above the activations."""
    model = unrolled_matrices(LAYERS, WIDTH, batch=64)
    step = compile_step(make_step, model, ACCUMULATED)
    return step, step.temporary - model.layers * model.carry


def test_one_layer_is_accumulated_at_a_time():
    # The gradient of a layer, and what its backward pass computes with: 3.0 gradients.
    step, above = compiled(release.value_and_update)
    assert above <= 3.1 * ONE_GRADIENT
    assert step.program.memory_analysis().alias_size_in_bytes == step.stored


def test_the_usual_step_holds_no_float32_sums():
    # 2.25 gradients per layer: one, and what the backward pass computes with.
    _, above = compiled(plain)
    assert above <= 2.4 * LAYERS * ONE_GRADIENT
