"""First moments relative to the root of the second moment follow float32's AdamW.

Updates are compared element by element with float32's, for gradients of many sizes in
one block. Moments with a single scale per block fail on these gradients.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exact_steps import both
from moment_updates import compared, transformation, updates
from optimizers import apply, assert_same_bits

import lowbit_optax
from lowbit_optax import block_quantized
from lowbit_optax.formats.block_quantized import QuantizedMoment, RelativeMoment

pytestmark = pytest.mark.standard_promotion

SHAPE = (64, 128)
RATE = 1e-3
EIGHT = block_quantized(8)
FOUR = (("mu", block_quantized(4)), ("nu", EIGHT))
LOW = "low"
EIGHT_RELATIVE = (("mu", block_quantized(8, relative_to="nu")), ("nu", EIGHT))
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
@pytest.mark.parametrize(
    "moments", [EIGHT, FOUR, LOW], ids=["8 bits", "4-bit mu", "low"]
)
def test_updates_of_gradients_of_one_size_are_longer_by_noise_alone(moments, case):
    signs = np.random.default_rng(0).choice(np.float32([-1, 1]), (1200, *SHAPE))
    grads = jnp.asarray(signs if case == "random signs" else np.abs(signs))
    got, want = (np.asarray(updates(x, grads)) for x in (moments, "float32"))
    sizes = np.abs(got) / np.abs(want).max()
    assert sizes.max() <= (1.2 if case == "random signs" else 1.7)
    assert np.mean(sizes > 1.5) < 1e-5
    assert np.mean(sizes > 1.1) < 0.3
    assert abs(np.linalg.norm(got) / np.linalg.norm(want) - 1) <= 0.06


# Bounds on the largest update, on the norm of all updates, and on the cosine.
BOUNDS = {
    "4-bit mu": (FOUR, 1.1, (0.96, 1.08), 0.93),
    "8 bits": (EIGHT, 1.4, (0.9, 1.1), 0.95),
    "8 bits, relative": (EIGHT_RELATIVE, 1.4, (0.9, 1.1), 0.95),
}


def _cases():
    for name in BOUNDS:
        for case in CASES:
            is_long = name.startswith("8") and case != "rows of 1,000"
            marks = [pytest.mark.exhaustive] if is_long else []
            yield pytest.param(name, case, marks=marks)


@pytest.mark.parametrize(("name", "case"), list(_cases()))
def test_updates_follow_float32_beside_values_of_any_size(name, case):
    moments, most, (least_size, most_size), least_cosine = BOUNDS[name]
    both = (updates_beside(x, case) for x in (moments, "float32"))
    largest, size, cosine = compared(*both)
    assert largest <= most
    assert least_size <= size <= most_size
    assert cosine >= least_cosine


def adam_state(moments):
    tx = transformation(moments, optax.adam(RATE))
    return jax.eval_shape(tx.init, jnp.zeros(SHAPE)).inner_state[0]


def test_eight_bits_are_relative_on_request():
    assert isinstance(adam_state(EIGHT).mu, QuantizedMoment)
    state = adam_state(block_quantized(8, relative_to="nu"))
    assert isinstance(state.mu, RelativeMoment)
    assert isinstance(state.nu, QuantizedMoment)


@pytest.mark.slow_to_compile
@pytest.mark.parametrize("advance", [lowbit_optax.step, apply], ids=["step", "update"])
@pytest.mark.parametrize("shape", [(64, 72), (70, 65)], ids=["even", "ragged"])
@pytest.mark.parametrize("moments", [FOUR, LOW], ids=["4-bit mu", "low"])
def test_kernels_give_the_same_bits(moments, shape, advance):
    # With these hyperparameters, all roots and products are exact.
    inner = optax.adamw(2.0**-9, b1=0.5, b2=0.75, eps=0.0, weight_decay=2.0**-7)
    random = np.random.default_rng(0)
    params = {"w": jnp.asarray(random.standard_normal(shape), jnp.bfloat16)}
    signs, exponents = random.choice([-1.0, 1.0], shape), random.integers(-12, 3, shape)
    grads = {"w": jnp.asarray(signs * 2.0**exponents, jnp.float32)}
    moments = dict(moments) if moments is FOUR else moments
    options = dict(inner=inner, weights=None, moments=moments, min_size=0)
    assert_same_bits(*both(params, [grads], advance=advance, **options))


def keeps_mu_of_zeros(inner):
    """Adam that keeps mu but still updates nu when all gradients are zero."""

    def update(updates, state, params=None):
        new, (adam, *rest) = inner.update(updates, state, params)
        is_zero = jnp.all(updates == 0)
        mu = jnp.where(is_zero, state[0].mu, adam.mu)
        return new, (adam._replace(mu=mu), *rest)

    return optax.GradientTransformation(inner.init, update)


def test_a_step_that_keeps_mu_and_changes_nu_stores_mu_for_the_new_nu():
    inner = keeps_mu_of_zeros(optax.adam(RATE, b2=0.5))
    params, grads = jnp.zeros(SHAPE), jnp.asarray(normal(1))[0]
    sizes = []
    for moments in (FOUR, "float32"):
        tx = transformation(moments, inner)
        step = jax.jit(tx.update)
        _, state = step(grads, tx.init(params), params)
        for _ in range(4):
            updates, state = step(jnp.zeros(SHAPE), state, params)
        sizes.append(np.linalg.norm(updates))
    assert abs(sizes[0] / sizes[1] - 1) <= 0.1
