"""Formats and optimizers for tests that compile their steps for GPUs."""

import jax.numpy as jnp
import optax

import lowbit_optax
from pallas_kernels import Operand, Result, fused_update, platforms
from pallas_kernels.operations import multiply_add

LAUNCHERS = ["triton", "mosaic"] if platforms.has_mosaic() else ["triton"]
"""The GPU launchers that the installed JAX supports."""

WEIGHTS = {
    "nearest": lowbit_optax.nearest(),
    "stochastic_rounding": lowbit_optax.stochastic_rounding(),
    "kahan": lowbit_optax.kahan(),
    "kahan nearest": lowbit_optax.kahan(residual_rounding="nearest"),
    "kahan stochastic": lowbit_optax.kahan(rounding="stochastic"),
    "kahan param": lowbit_optax.kahan(arithmetic="param"),
    "extra_bits 16": lowbit_optax.extra_bits(16),
    "extra_bits 5": lowbit_optax.extra_bits(5, residual_rounding="nearest"),
    "extra_bits 8 toward_zero": lowbit_optax.extra_bits(8, rounding="toward_zero"),
    "extra_bits 11 stochastic": lowbit_optax.extra_bits(11, rounding="stochastic"),
    "master_copy": lowbit_optax.master_copy(),
}

STEPS = {
    "5 bits": lowbit_optax.extra_bits_adamw(1e-3, bits=5),
    "8 bits": lowbit_optax.extra_bits_adamw(1e-3, bits=8),
    "16 bits": lowbit_optax.extra_bits_adamw(1e-3, bits=16),
    "kahan": lowbit_optax.kahan_adamw(1e-3),
    "stochastic rounding": lowbit_optax.sr_adamw(1e-3),
    "lowbit": lowbit_optax.lowbit_adamw(1e-3),
    "lowbit 4": lowbit_optax.lowbit(
        optax.adamw(1e-3), moments=lowbit_optax.block_quantized(4)
    ),
    "error into mu": lowbit_optax.lowbit(
        optax.adamw(1e-3),
        weights=lowbit_optax.stochastic_rounding(error_feedback="mu"),
        moments=lowbit_optax.block_quantized(8),
    ),
    "lpmm_adam": lowbit_optax.lpmm_adam(1e-3),
    "lpmm_sgd": lowbit_optax.lpmm_sgd(1e-3, momentum=0.9),
}


def update_layer(stacks, grad, layer, scalars, implementation=None):
    """Momentum for a layer of stacks of weights, momenta and words of 8-bit fields."""

    def body(values, scalars, index):
        grad, weight, trace, low = values
        half = jnp.full_like(trace, 0.5)
        trace = multiply_add(half, trace, grad.astype(jnp.float32))
        weight = weight.astype(jnp.float32) - trace
        low = low ^ (index & jnp.uint32(255)) ^ scalars[1]
        return [weight.astype(jnp.bfloat16), trace, low]

    weights, traces, words = stacks
    return fused_update(
        body,
        [Operand(grad), Operand(weights), Operand(traces), Operand(words, 8)],
        [
            Result("bfloat16", overwrites=1),
            Result("float32", overwrites=2),
            Result("uint32", 8, 3),
        ],
        shape=grad.shape,
        layer=layer,
        scalars=scalars,
        implementation=implementation,
    )
