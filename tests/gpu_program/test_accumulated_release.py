"""Accumulation of gradients in a model without a scan, compiled for an H200: memory."""

import functools

import pytest

import lowbit_optax
from lowbit_optax import release

pytest.importorskip("jax_plugins.xla_cuda12", reason="needs the gpu-program extra")

from tools.gpu_program.release_steps import MIB, compile_step, plain
from tools.gpu_program.unrolled import unrolled_matrices

ACCUMULATED = lowbit_optax.accumulate_gradients(lowbit_optax.lowbit_adamw(1e-3), 4)
LAYERS, WIDTH = 4, 512
ONE_GRADIENT = 2 * WIDTH**2


@functools.cache
def compiled(make_step):
    model = unrolled_matrices(LAYERS, WIDTH, batch=64)
    step = compile_step(make_step, model, ACCUMULATED)
    above = step.temporary - model.layers * model.carry
    print(
        f"{make_step.__name__}: temporary {step.temporary / MIB:.2f} MiB, above the "
        f"activations {above / ONE_GRADIENT:.2f} gradients",
        flush=True,
    )
    return step, above


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
