"""Scans over quantised layers, compiled for an H200: how many are dequantised."""

import functools

import jax
import jax.numpy as jnp
import pytest

import lowbit_optax
from lowbit_optax.lpmm import value_and_grad

pytest.importorskip("jax_plugins.xla_cuda12", reason="needs the gpu-program extra")

from tools.gpu_program.h200 import compile_for, h200_mesh
from tools.gpu_program.steps import leaf

BF16 = jnp.bfloat16
LAYERS, SIDE, BATCH = 12, 2048, 32
LAYER = 2 * SIDE * SIDE  # bytes of one, dequantised in bfloat16


def loss_fn(layers, x):
    @jax.checkpoint
    def body(x, layer):
        return jnp.tanh(x @ lowbit_optax.dequantize(layer, BF16)), None

    return jnp.sum(jax.lax.scan(body, x, layers)[0].astype(jnp.float32))


@functools.cache
def temporary(lazy):
    """Temporary bytes, counted in dequantised layers."""
    layers = leaf(LAYERS, SIDE, SIDE, dtype=jnp.float32)
    params = jax.eval_shape(lowbit_optax.quantize_params, layers)
    fn = value_and_grad(loss_fn, BF16, lazy=lazy)
    compiled = compile_for(h200_mesh(), fn, params, leaf(BATCH, SIDE))
    memory = compiled.memory_analysis()
    # The gradients of a stack come out in one piece, and are no temporary memory.
    assert memory.output_size_in_bytes >= LAYERS * LAYER
    return memory.temp_size_in_bytes / LAYER


def test_lazily_one_layer_is_dequantised_at_a_time_and_otherwise_all():
    # One layer in bfloat16, and its codes as uint32 beside it, which XLA does not fuse.
    assert temporary(lazy=True) < 3.3
    assert temporary(lazy=False) > LAYERS
