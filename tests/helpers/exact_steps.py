"""Steps that are exact in float32, so all implementations give the same bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from lowbit_optax import extra_bits, lowbit
from lowbit_optax.formats.quantized_tensor import is_quantized
from tests.helpers.kernels import QUICK
from tests.helpers.optimizers import initial

MOMENTUM = optax.sgd(0.25, momentum=0.5)


def normal(shape, dtype=jnp.bfloat16, seed=0):
    numbers = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(numbers, jnp.float32).astype(dtype)


def dyadic_series(params, steps, bits=16):
    """Gradients with few bits; sums of these are exact in float32 but not narrower."""
    largest = 2 ** (bits - 1)

    def draw(leaf, seed):
        numbers = np.random.default_rng(seed).integers(-largest, largest, leaf.shape)
        return jnp.asarray(numbers / (4 * largest), jnp.float32)

    return [
        jax.tree.map(lambda leaf, seed=seed: draw(leaf, seed), params)
        for seed in range(steps)
    ]


FLOAT32 = {"inner": MOMENTUM, "weights": extra_bits(16), "moments": "float32"}


def trained(
    implementation, params, series, advance=lowbit_optax.step, make=None, **options
):
    """Parameters and state after jitted steps."""
    make = make or functools.partial(lowbit, **(FLOAT32 | options))
    tx = make(implementation=implementation)
    state = initial(tx, params)
    run = jax.jit(
        lambda grads, state, params: advance(tx, params, state, grads),
        compiler_options=QUICK,
    )
    for grads in series:
        params, state = run(grads, state, params)
    return params, state


def apply_any(tx, params, state, grads):
    """A step that calls ``update``, and also adds updates to float8 parameters."""
    updates, state = tx.update(grads, state, params)
    return lowbit_optax.apply_updates(params, updates), state


def both(params, series, others="pallas", **options):
    """Parameters and state from kernels, and from XLA, which move every leaf."""
    results = [trained(name, params, series, **options) for name in (others, "xla")]
    masters = lowbit_optax.master_weights(*results[1])
    olds = jax.tree.leaves(params, is_leaf=is_quantized)
    for old, new in zip(olds, jax.tree.leaves(masters), strict=True):
        old = old.dequantize() if is_quantized(old) else old
        assert old.size == 0 or np.any(np.float32(old) != new)
    return results
