"""The number of dequantised layers in scans over them, compiled for an H200."""

import functools

import jax
import jax.numpy as jnp
import pytest

import lowbit_optax
from lowbit_optax import release
from lowbit_optax.lpmm import value_and_grad
from tools import hlo
from tools.gpu_program.release_steps import MIB, Model, compile_step
from tools.gpu_program.steps import bytes_of, leaf, quantized_like
from tools.gpu_program.targets import compile_for, gpu_mesh

BF16 = jnp.bfloat16
LAYERS, SIDE, BATCH = 12, 2048, 32
LAYER = 2 * SIDE * SIDE  # bytes of a layer, dequantised in bfloat16


def through(layers, x):
    """The result of a scan over quantised layers."""

    @jax.checkpoint
    def body(x, layer):
        return jnp.tanh(x @ lowbit_optax.lpmm.dequantize(layer, BF16)), None

    return jax.lax.scan(body, x, layers)[0].astype(jnp.float32)


@functools.cache
def temporary(lazy):
    """Temporary bytes, counted in dequantised layers."""
    params = quantized_like(leaf(LAYERS, SIDE, SIDE, dtype=jnp.float32))
    loss_fn = lambda layers, x: jnp.sum(through(layers, x))
    fn = value_and_grad(loss_fn, BF16, lazy=lazy)
    compiled = compile_for(gpu_mesh(), fn, params, leaf(BATCH, SIDE))
    memory = hlo.memory(compiled)
    # The gradients of a stack are one result, and not temporary memory.
    assert memory.output_size_in_bytes >= LAYERS * LAYER
    return memory.temp_size_in_bytes / LAYER


def test_lazily_one_layer_is_dequantised_at_a_time_and_otherwise_all():
    # One layer and its gradient in bfloat16, and its words, sliced out of the stack.
    assert temporary(lazy=True) < 3
    assert temporary(lazy=False) > LAYERS


@pytest.mark.parametrize("stack", [(), (LAYERS,)], ids=["alone", "in a stack"])
@pytest.mark.parametrize("bits", [4, 6, 8, 12, 16])
def test_weights_are_dequantised_in_one_pass(bits, stack):
    def dequantised(weights, layer):
        if stack:
            take = jax.lax.dynamic_index_in_dim
            weights = jax.tree.map(lambda x: take(x, layer, 0, False), weights)
        return weights.dequantize(BF16)

    weights = quantized_like(leaf(*stack, SIDE, SIDE, dtype=jnp.float32), bits)
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    program = compile_for(gpu_mesh(), dequantised, weights, layer)
    assert hlo.memory(program).temp_size_in_bytes < 0.001 * SIDE**2
    if not stack:
        moved = sum(size for _, size in hlo.kernels(program)) / SIDE**2
        assert moved < 2 + bits / 8 + 0.01


def test_released_quantised_layers_keep_one_gradient_beside_the_activations():
    width = 4096

    loss_fn = lambda params, x: jnp.mean(through(params["layers"], x) ** 2)
    stack = leaf(LAYERS, width, width, dtype=jnp.float32)
    params = quantized_like({"layers": stack})
    rows = leaf(512, width)
    model = Model(loss_fn, params, rows, bytes_of(rows), LAYERS)
    make_step = functools.partial(release.value_and_update, grad_dtype=BF16)
    step = compile_step(make_step, model, lowbit_optax.lpmm_adam(1e-3))
    # Codes of weights and moments; one dequantised layer, whose memory its gradient
    # reuses; the layer's codes, copied out of their stacks; the batch; and the
    # activations: 12 arrays of 4 MiB are kept, and three are in use.
    assert step.stored / MIB < 12 * 16 * 3.57
    layer = step.stored / MIB / LAYERS
    assert step.temporary / MIB < 12 * 4 + 32 + layer + 3 * 4 + 0.1
    assert step.peak / MIB < 781 + layer
