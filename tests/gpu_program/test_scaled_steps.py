"""Loss-scaled steps, compiled for H200s: in place, without a branch on the host."""

import re

import jax.numpy as jnp
import optax
import pytest
from optimizers import weights_only

import lowbit_optax
from tools.gpu_program.machine_code import program
from tools.gpu_program.steps import leaf, lower_step

pytestmark = pytest.mark.usefixtures("by_triton")

PARAMS = {"a": leaf(2048, 2048, dtype=jnp.float16), "b": leaf(8192, dtype=jnp.float16)}
OPTIMIZERS = {
    "optax_adamw": optax.adamw(1e-3),
    "kahan_adamw": lowbit_optax.kahan_adamw(1e-3),
    "kahan_adamw_xla": lowbit_optax.kahan_adamw(1e-3, implementation="xla"),
    "lowbit_adamw": lowbit_optax.lowbit_adamw(1e-3),
    "master_copy": weights_only(optax.adamw(1e-3), lowbit_optax.master_copy()),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_scaled_step_copies_neither_parameters_nor_state_nor_gradients(name):
    inner = OPTIMIZERS[name]
    tx = lowbit_optax.with_loss_scale(inner, lowbit_optax.loss_scaling.backoff_scale())
    plain, scaled = lower_step(inner, PARAMS), lower_step(tx, PARAMS)
    assert scaled.in_place
    assert scaled.temporary < 0.05
    # Float16 gradients are read once more, to find overflows.
    assert scaled.moved < plain.moved + 2.1
    assert scaled.fused_launches == plain.fused_launches
    # XLA:GPU runs these by asking the device and waiting.
    assert not re.search(r" (conditional|while)\(", scaled.compiled.as_text())


@pytest.mark.usefixtures("disassembler")
@pytest.mark.parametrize("name", ["kahan_adamw", "lowbit_adamw"])
def test_a_scaled_kernel_spills_no_registers_and_is_hardly_longer(name):
    inner = OPTIMIZERS[name]
    tx = lowbit_optax.with_loss_scale(inner, lowbit_optax.loss_scaling.backoff_scale())

    def fused(tx):
        kernels = program(lower_step(tx, PARAMS).lowered).kernels.values()
        return {k.name: k for k in kernels if k.name.startswith("fused_update")}

    plain, scaled = fused(inner), fused(tx)
    assert plain.keys() == scaled.keys()
    for kernel, k in scaled.items():
        assert k.registers <= plain[kernel].registers + 8
        assert k.stack == k.spill_stores == k.spill_loads == 0
        # The factor, and whether there is a step.
        assert k.instructions < 1.05 * plain[kernel].instructions
