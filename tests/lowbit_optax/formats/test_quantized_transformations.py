"""Transformations other than Adam: 8-bit moments train as float32 moments do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import lowbit_optax

pytestmark = pytest.mark.standard_promotion

SHAPE = (128, 64)
CODED = {
    "adagrad": (lambda: optax.adagrad(0.1), {"sum_of_squares"}),
    "adan": (lambda: optax.adan(0.02), {"m", "v", "n", "g"}),
    "amsgrad": (lambda: optax.amsgrad(0.02), {"mu", "nu", "nu_max"}),
    # Its nu - mu^2, of coded moments, would be negative.
    "centered_rmsprop": (
        lambda: optax.rmsprop(0.02, momentum=0.9, centered=True),
        {"trace"},
    ),
    "lamb": (lambda: optax.lamb(0.02), {"mu", "nu"}),
    "lion": (lambda: optax.lion(0.005), {"mu"}),
    "rmsprop": (lambda: optax.rmsprop(0.02), {"nu"}),
    # Its z are weights, which 8 bits are too few for.
    "schedule_free": (lambda: optax.contrib.schedule_free_adamw(0.05), {"nu"}),
}


@functools.cache
def transformation(name: str, is_coded: bool):
    make, fields = CODED[name]
    inner = make()
    moments = dict.fromkeys(fields, lowbit_optax.block_quantized(8))
    return lowbit_optax.lowbit(
        inner,
        moments=moments if is_coded else "float32",
        weights=lowbit_optax.extra_bits(16),
    )


@functools.cache
def losses(name: str, is_coded: bool) -> np.ndarray:
    """A noisy quadratic's loss at every step, in units of the one at the start."""
    tx = transformation(name, is_coded)
    target = jax.random.normal(jax.random.key(0), SHAPE)
    start = jnp.ones(SHAPE) * jnp.float32(3)

    def one(carry, step):
        params, state = carry
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(1), step), SHAPE)
        grads = params - target + noise
        params, state = lowbit_optax.step(tx, params, state, grads)
        return (params, state), jnp.mean((params - target) ** 2)

    run = jax.jit(lambda carry: lax.scan(one, carry, jnp.arange(300)))
    _, found = run((start, tx.init(start)))
    return np.asarray(found) / np.mean((start - target) ** 2)


@pytest.mark.parametrize("name", CODED)
def test_eight_bit_moments_train_as_float32_ones_do(name):
    want, got = losses(name, False), losses(name, True)
    assert want[-1] < 0.5
    np.testing.assert_allclose(got[10:], want[10:], rtol=0.1, atol=2e-3)
