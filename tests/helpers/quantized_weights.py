"""Quantized weights, and gradients with which every product in a step is exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import lowbit_optax
from lowbit_optax._numerics import linear_code


@functools.cache
def quantizer(bits, **options):
    """A jitted ``quantize_params``; without jit, each operation compiles per shape."""
    quantize = functools.partial(
        lowbit_optax.lpmm.quantize_params, bits=bits, **options
    )
    return jax.jit(quantize)


values_of = jax.jit(lowbit_optax.lpmm.dequantize, static_argnums=1)


def quantised(shape, bits, block_size):
    """Weights whose steps are powers of two, even after the weights shrink a little."""
    weights = np.random.default_rng(0).standard_normal(shape).clip(-1, 1) * 0.9
    # One number per tile, and therefore in every block, and in every folded row of 32.
    weights.reshape(-1)[::32] = 1.0
    weights.reshape(-1, shape[-1])[::8, ::4] = 1.0
    weights *= linear_code.largest_code(bits) * 2.0**-bits
    params = {"kernel": jnp.asarray(weights, jnp.float32)}
    return lowbit_optax.lpmm.quantize_params(
        params, bits=bits, block_size=block_size, min_size=0
    )


def shrinking(params, seed):
    """Dyadic gradients that move numbers closer to 0.

    The largest numbers from :func:`quantised` lose a 16th at a rate of 0.25. They keep
    their step size, although a new one would be smaller. (Weights with few bits lose
    less, because otherwise they would need a new step size.)
    """
    random = np.random.default_rng(seed)

    def draw(weight):
        value = np.asarray(weight.dequantize())
        size = random.integers(0, 2**10, weight.shape) * 2.0**-18
        if weight.bits > 6:
            largest = linear_code.largest_code(weight.bits) * 2.0**-weight.bits
            size += np.where(np.abs(value) > 0.95 * largest, 2.0**-3, 0.0)
        return jnp.asarray(np.sign(value) * size, jnp.float32)

    is_weight = lambda x: isinstance(x, lowbit_optax.lpmm.QuantizedTensor)
    return jax.tree.map(draw, params, is_leaf=is_weight)
