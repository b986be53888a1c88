"""8-bit moments follow float32's AdamW, for gradients of many sizes in one block."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from lowbit_optax import block_quantized
from tests.helpers.moment_updates import compared, updates

pytestmark = pytest.mark.standard_promotion

SHAPE = (64, 128)
EIGHT = block_quantized(8)
ROW = np.broadcast_to((np.arange(SHAPE[0]) % 32 == 5)[:, None], SHAPE)
COLUMN = np.broadcast_to(np.arange(SHAPE[1]) % 32 == 5, SHAPE)
NOWHERE = np.zeros(SHAPE, bool)


def normal(steps=200):
    return np.random.default_rng(0).standard_normal((steps, *SHAPE), np.float32)


def many_sizes():
    exponents = np.random.default_rng(7).uniform(-6, 0, SHAPE)
    return normal() * (10.0**exponents).astype(np.float32)


def rarely_touched():
    """Returns rows with a gradient once in 50 to 1,000 steps, as in an embedding."""
    grads, random = normal(500), np.random.default_rng(3)
    every = np.exp(random.uniform(np.log(50), np.log(1000), SHAPE[0]))
    touched = random.random((len(grads), SHAPE[0])) < 1 / every
    return grads * touched[:, :, None]


def spike():
    grads = normal()
    grads[100, ROW] = 1e6
    return grads


# Maps each case to its gradients and to the outliers whose neighbours are compared.
CASES = {
    "normal": (normal, NOWHERE),
    "rows of 30": (lambda: normal() * np.where(ROW, 30, 1), ROW),
    "rows of 100": (lambda: normal() * np.where(ROW, 100, 1), ROW),
    "rows of 1,000": (lambda: normal() * np.where(ROW, 1000, 1), ROW),
    "columns of 1,000": (lambda: normal() * np.where(COLUMN, 1000, 1), COLUMN),
    "six decades": (many_sizes, NOWHERE),
    "rarely touched rows": (rarely_touched, NOWHERE),
    "spike": (spike, ROW),
}


@functools.cache
def updates_beside(moments, case):
    """Returns the updates of every step, without the outliers."""
    make, is_outlier = CASES[case]
    of_all = updates(moments, jnp.asarray(make(), jnp.float32))
    return np.asarray(of_all)[:, ~is_outlier]


@pytest.mark.parametrize("case", ["constant", "random signs"])
def test_updates_of_gradients_of_one_size_are_longer_by_noise_alone(case):
    signs = np.random.default_rng(0).choice(np.float32([-1, 1]), (1200, *SHAPE))
    grads = jnp.asarray(signs if case == "random signs" else np.abs(signs))
    got, want = (np.asarray(updates(x, grads)) for x in (EIGHT, "float32"))
    sizes = np.abs(got) / np.abs(want).max()
    assert sizes.max() <= (1.2 if case == "random signs" else 1.7)
    assert np.mean(sizes > 1.5) < 1e-5
    assert np.mean(sizes > 1.1) < 0.3
    assert abs(np.linalg.norm(got) / np.linalg.norm(want) - 1) <= 0.06


def _cases():
    for case in CASES:
        marks = [] if case == "rows of 1,000" else [pytest.mark.exhaustive]
        yield pytest.param(case, marks=marks)


@pytest.mark.parametrize("case", list(_cases()))
def test_updates_follow_float32_beside_values_of_any_size(case):
    both = (updates_beside(x, case) for x in (EIGHT, "float32"))
    largest, size, cosine = compared(*both)
    assert largest <= 1.4
    assert 0.9 <= size <= 1.1
    assert cosine >= 0.95
