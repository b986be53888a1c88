"""Stacks with more elements than int32 can count, compiled for H200s."""

import jax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lowbit_optax
from tools.gpu_program.steps import applied, fast, leaf, lower_step
from tools.gpu_program.targets import gpu_mesh
from tools.hlo import collectives

LLAMA_70B = leaf(80, 8192, 28672)
"""The gate weights of all layers of Llama 70B: 18.8 billion elements."""


@pytest.mark.parametrize("axis", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("make_step", [fast, applied], ids=["step", "update"])
def test_kernels_update_a_large_stack_in_place(make_step, axis):
    tx = lowbit_optax.lowbit_adamw(1e-3)
    step = lower_step(
        tx, LLAMA_70B, make_step, mesh=gpu_mesh(8, axis), spec=P(None, "d")
    )
    # `update` returns float32 updates, and reads the old parameters.
    extra = 0 if make_step is fast else 4
    assert step.fused_launches == 1
    assert not collectives(step.compiled)
    # JAX 0.10 copies a layer's gradient; with JAX 0.12, kernels read it in its stack.
    of_layer = 2 / LLAMA_70B.shape[0] if jax.__version_info__ < (0, 12) else 0
    assert step.temporary * 8 < extra + of_layer + 0.01


def test_a_large_stack_that_is_sharded_over_its_layers_has_no_loop():
    tx = lowbit_optax.extra_bits_sgd(1e-3, bits=8, warn=False)
    mesh = gpu_mesh(8, AxisType.Explicit)
    step = lower_step(tx, LLAMA_70B, mesh=mesh, spec=P("d"))
    assert not collectives(step.compiled)
    assert step.fused_launches == 0
