"""Steps compiled for an H200 while JAX's 64-bit types are on."""

import jax
import jax.numpy as jnp
import pytest

import lowbit_optax
from tools.gpu_program.steps import leaf, lower_step

pytestmark = pytest.mark.usefixtures("disassembler")

PARAMS = {
    "matrix": leaf(512, 512),
    "bias": leaf(512),
    "another bias": leaf(256),
    "norm": leaf(768, dtype=jnp.float32),
}


def facts(tx):
    """The fused kernels of a step, and what they consist of."""
    step = lower_step(tx, PARAMS)
    assert step.in_place
    return {
        name: (k.registers, k.spill_stores, k.opcodes())
        for name, k in step.machine_code.items()
        if name.startswith("fused_update")
    }


@pytest.mark.parametrize(
    "alias",
    [
        lowbit_optax.kahan_adamw,
        lowbit_optax.extra_bits_adamw,
        lowbit_optax.lowbit_adamw,
    ],
)
def test_kernels_are_the_same_with_64_bit_types(alias):
    tx = alias(1e-3)
    narrow = facts(tx)
    with jax.enable_x64(True):
        wide = facts(tx)
    # XLA numbers kernels of one name, in different ways.
    assert {name.rstrip("_$0123456789") for name in narrow} == {
        "fused_update",
        "fused_update_many",
    }
    assert wide == narrow
