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
    # A branch's results are written beside its operands: of a layer 6 bytes per
    # parameter, and the gradient. The rest is what the branch computes with.
    step, above = compiled(release.value_and_update)
    assert above <= 6 * ONE_GRADIENT
    assert step.program.memory_analysis().alias_size_in_bytes == step.stored


def test_the_usual_step_holds_no_float32_sums():
    # 5.4 gradients per layer. With sums and means outside the branches it was 7.5, of
    # 12 layers of 2048 x 2048.
    _, above = compiled(plain)
    assert above <= 6 * LAYERS * ONE_GRADIENT
