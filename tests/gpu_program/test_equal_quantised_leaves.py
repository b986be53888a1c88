"""Equal quantised leaves share a kernel, whose PTX gives the reference's bits."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from optimizers import assert_same_bits
from quantised import quantised, shrinking

import lowbit_optax
from lowbit_optax import block_quantized, lowbit

pytest.importorskip("jax_plugins.xla_cuda12", reason="needs the gpu-program extra")

from tools.gpu_program.ptx import compile_program
from tools.gpu_program.targets import gpu_mesh, lower_for

LEAVES = 3


def momentum(block_size, implementation=None):
    return lowbit(
        optax.sgd(0.25, momentum=0.5),
        weights=lowbit_optax.quantized_weights(),
        moments=block_quantized(8, block_size=block_size),
        min_size=0,
        implementation=implementation,
    )


def rolled(weight, places):
    """The same kind of leaf with other values."""
    values = jnp.roll(weight.dequantize(), places, axis=0)
    return lowbit_optax.quantize_params(
        values, bits=weight.bits, block_size=weight.block_size, min_size=0
    )


@pytest.mark.parametrize("shape", [(128, 256), (70, 261)], ids=["even", "ragged"])
@pytest.mark.parametrize("block_size", [32, 128], ids=["two sizes", "one size"])
def test_equal_quantised_leaves_in_one_kernel_have_the_same_bits(shape, block_size):
    weight = quantised(shape, 12, 128)["kernel"]
    params = {f"kernel {i}": rolled(weight, 64 * i) for i in range(LEAVES)}
    tx = momentum(block_size, "xla")
    step = jax.jit(functools.partial(lowbit_optax.step, tx))
    params, state = step(params, tx.init(params), shrinking(params, 0))
    arguments = params, state, shrinking(params, 1)
    by_kernel = functools.partial(lowbit_optax.step, momentum(block_size))
    program = compile_program(
        lower_for(gpu_mesh(), by_kernel, *arguments, donate=(0, 1))
    )
    (name,) = (n for n in program.sources if n.startswith("fused_update"))
    assert name.startswith("fused_update_many")
    assert_same_bits(program.run(*arguments), step(*arguments))
