"""The cost of marking changed weights in a step, compiled for an H200."""

import jax.numpy as jnp
import pytest

import lowbit_optax
from lowbit_optax import patches
from tools.gpu_program.machine_code import instructions_per_parameter
from tools.gpu_program.steps import fast, leaf, lower_step
from tools.gpu_program.targets import gpu_mesh

OPTIMIZERS = {
    "lowbit_adamw": (lowbit_optax.lowbit_adamw(1e-3), 3.0),
    "sr_adamw": (lowbit_optax.sr_adamw(1e-3), 1.5),
    "kahan_adamw": (lowbit_optax.kahan_adamw(1e-3), 1.5),
}
"""Optimizers, and the most instructions that marking may add."""


def _marking(tx):
    return lambda params, state, grads: patches.step(tx, params, state, grads)


def _cost(tx, make_step):
    """Return bytes moved, temporary bytes and instructions per parameter."""
    like = leaf(2048, 4096, dtype=jnp.bfloat16)
    step = lower_step(tx, like, make_step=make_step, mesh=gpu_mesh())
    (kernel,) = (
        x for name, x in step.machine_code.items() if name.startswith("fused_update")
    )
    assert kernel.spill_stores == kernel.spill_loads == 0
    assert kernel.registers <= 216
    instructions = instructions_per_parameter(kernel, step.parameters)
    return step.moved, step.temporary, instructions


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_marking_moves_an_eighth_of_a_byte_and_needs_few_instructions(name):
    tx, most = OPTIMIZERS[name]
    plain, marking = (_cost(tx, x) for x in (fast, _marking))
    assert marking[0] - plain[0] == pytest.approx(0.125, abs=0.001)
    assert marking[1] < 0.001
    assert marking[2] - plain[2] <= most
