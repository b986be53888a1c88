"""Stacks with more elements than int32 can count, compiled for TPUs."""

import jax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lowbit_optax

pytest.importorskip("libtpu", reason="needs the tpu-program extra")

from tools.gpu_program.steps import bytes_of, fast, leaf
from tools.gpu_program.targets import lower_for
from tools.hlo import COLLECTIVES, memory, text
from tools.tpu_program.targets import tpu_mesh

GATES = leaf(40, 8192, 28672)
"""The gate weights of half of the layers of Llama 70B: 9.4 billion elements."""


def test_kernels_update_a_large_stack_in_place():
    tx = lowbit_optax.lowbit_adamw(1e-3)
    mesh = tpu_mesh("v6e:2x4", (8,), axis=AxisType.Explicit)
    state = jax.eval_shape(tx.init, GATES)
    lowered = lower_for(
        mesh, fast(tx), GATES, state, GATES, spec=P(None, "d"), donate=(0, 1)
    )
    with jax.set_mesh(mesh):
        compiled = lowered.compile()
    found, own = memory(compiled), GATES.size / 8
    assert text(compiled).count("tpu_custom_call") == 1
    assert not any(kind in text(compiled) for kind in COLLECTIVES)
    assert found.temp_size_in_bytes <= 2.01 * own / 40  # one layer's gradient
    assert found.alias_size_in_bytes * 8 >= bytes_of(GATES, state) * 0.9999
