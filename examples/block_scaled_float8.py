"""Trains float8 weights with a scale for every 32 values (MXFP8).

    python examples/block_scaled_float8.py

The forward pass multiplies the codes and scales directly. The optimizer state stores 8
more bits of each weight.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

import lowbit_optax
from lowbit_optax import block_scaling, lpmm


@jax.custom_vjp
def product(x, values, codes, scales):
    """Returns x @ w for float8 codes and scales of w; ``values`` is w in bfloat16."""
    x = block_scaling.block_scale(x, axis=-1, min_size=0)
    return jax.lax.scaled_dot(x.codes, codes, lhs_scale=x.scales, rhs_scale=scales)


def forward(x, values, codes, scales):
    return product(x, values, codes, scales), (x, values)


def backward(saved, y):
    # For float8, scale along the other axis: block_scale(values.T, axis=-2).
    x, values = saved
    return y @ values.T, x.T @ y, None, None


product.defvjp(forward, backward)


def loss_fn(params, x):
    w = params["w"]
    out = product(x, w.dequantize(jnp.bfloat16), w.codes, w.scales)
    return jnp.mean(out.astype(jnp.float32) ** 2)


tx = lowbit_optax.lowbit_adamw(1e-2)
master = {"w": jnp.full((64, 64), 0.1)}
like = jax.eval_shape(block_scaling.block_scale, master)
params, state = lowbit_optax.from_master(tx, master, like)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, state, x):
    differentiate = lpmm.value_and_grad(loss_fn, jnp.bfloat16, lazy=True)
    loss, grads = differentiate(params, x)
    return loss, *lowbit_optax.step(tx, params, state, grads)


x = jnp.ones((8, 64), jnp.bfloat16)
for _ in range(3):
    loss, params, state = train_step(params, state, x)
    print(f"loss {loss:.1f}")
w: Any = params["w"]
print(f"codes {w.codes.dtype}{w.codes.shape}, scales {w.scales.dtype}{w.scales.shape}")
