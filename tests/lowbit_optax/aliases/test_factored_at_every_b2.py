"""Factored AdamW with a 4-bit first moment follows float32's updates at every b2."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowbit_optax import block_quantized, scale_by_factored_adam
from tests.helpers.moment_updates import compared, updates

pytestmark = pytest.mark.standard_promotion

B2S = (0.9, 0.95, 0.99, 0.999, 0.9999)
SHAPE = (32, 32)
STEPS = 2000
ROW, COLUMN = np.indices(SHAPE)
ONE_OF_EACH_BLOCK = (ROW % 8 == 5) & (COLUMN % 4 == 2)
SOME_ROWS = ROW % 8 < 3
STEP = np.arange(STEPS)[:, None, None]
LATER = STEP >= 200


@functools.cache
def normal():
    return np.random.default_rng(0).standard_normal((STEPS, *SHAPE), np.float32)


def dying_rows():
    halved_in = np.random.default_rng(1).uniform(7, 700, (SHAPE[0], 1))
    after = np.maximum(STEP - 200, 0)
    return normal() * np.where(SOME_ROWS, 2.0 ** (-after / halved_in), 1)


def rarely_touched(among):
    """Returns gradients that are zero outside ``among`` in 999 of 1,000 steps."""
    first = np.random.default_rng(2).integers(0, 1000, (SHAPE[0], 1))
    touched = (STEP - first) % 1000 == 0
    return normal() * (touched | among)


def outliers():
    is_outlier = np.random.default_rng(3).random((STEPS, *SHAPE)) < 1e-3
    return normal() * np.where(is_outlier, 100, 1)


CASES = {
    "normal": normal,
    "outliers": outliers,
    "a dead weight in each block": lambda: normal() * ~(LATER & ONE_OF_EACH_BLOCK),
    "dead rows": lambda: normal() * ~(LATER & SOME_ROWS),
    "dying rows": dying_rows,
    "rare rows": lambda: rarely_touched(ROW < 0),
    "rare rows beside others": lambda: rarely_touched(ROW % 2 == 0),
    "1e6 times as large": lambda: normal() * np.where(LATER, 1e6, 1),
    "1e-6 times as large": lambda: normal() * np.where(LATER, 1e-6, 1),
    "rows 1e6 times as large": lambda: normal() * np.where(LATER & SOME_ROWS, 1e6, 1),
    "rows 1e-6 times as large": lambda: normal() * np.where(LATER & SOME_ROWS, 1e-6, 1),
    "constant": lambda: np.ones((STEPS, *SHAPE)),
    "alternating": lambda: np.ones((STEPS, *SHAPE)) * np.where(STEP % 2, -1, 1),
}


FEW_BITS = (("mu", block_quantized(4)), ("nu", block_quantized(8)))


@functools.cache
def factored(b2):
    adam = scale_by_factored_adam(b2=b2, min_dim_size_to_factor=8)
    return optax.chain(adam, optax.scale(-1.0))


@pytest.mark.parametrize("b2", B2S)
@pytest.mark.parametrize("case", CASES)
def test_four_bits_follow_float32(case, b2):
    grads = jnp.asarray(CASES[case](), jnp.float32)
    both = (updates(x, grads, b2, factored(b2)) for x in (FEW_BITS, "float32"))
    largest, size, cosine = compared(*both)
    assert largest <= 1.05
    assert 0.99 <= size <= 1.05
    assert cosine >= (0.945 if case == "outliers" else 0.955)


def test_a_weight_without_gradients_stops_moving():
    grads = jnp.asarray(CASES["a dead weight in each block"](), jnp.float32)
    got = np.asarray(updates(FEW_BITS, grads, 0.95, factored(0.95)))
    assert not got[500:, ONE_OF_EACH_BLOCK].any()
