"""Kernels that read arrays computed by XLA produce the numbers of XLA's steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from tests.helpers.exact_steps import normal, trained
from tests.helpers.optimizers import apply, gradient_series, spec_of, weights_only

pytestmark = pytest.mark.standard_promotion


def by_means(axis):
    """Multiplies gradients by their means, which are repeated along an axis."""

    def update(updates, state, params=None):
        del params
        scaled = lambda x: x * jnp.mean(x, axis, keepdims=True)
        return jax.tree.map(scaled, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


INNERS = {
    "means of columns": optax.chain(by_means(0), optax.sgd(0.5, 0.5)),
    "means of rows": optax.chain(by_means(1), optax.sgd(0.5, 0.5)),
    "clipped": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.01)),
    "factored": optax.adafactor(0.01, min_dim_size_to_factor=8),
    "factored, momentum": optax.adafactor(0.01, min_dim_size_to_factor=8, momentum=0.9),
    "factored Adam": optax.chain(
        lowbit_optax.scale_by_factored_adam(min_dim_size_to_factor=8), optax.scale(-0.5)
    ),
    "matrices": optax.contrib.muon(0.01),
    "sums": optax.sm3(0.01),
}
# Muon transposes a tall matrix. The norm of a vector is a single element.
SHAPES = [(100, 72), (72, 100), (3, 40, 48), (4100,)]
ADVANCES = {"step": lowbit_optax.step, "update": apply}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("name", INNERS)
def test_a_kernel_reads_what_xla_has_computed(name, shape):
    if name == "means of rows" and len(shape) == 1:
        pytest.skip("a vector has no second axis")
    params = {"kernel": normal(shape, jnp.bfloat16)}
    advance = ADVANCES["update" if len(shape) == 3 else "step"]
    make = functools.partial(lowbit_optax.lowbit, INNERS[name])
    series = gradient_series(params, 2)
    got, want = (
        trained(x, params, series, advance, make=make) for x in ("pallas", "xla")
    )
    assert spec_of(got) == spec_of(want)
    for own, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        # Products may be fused with sums.
        if own.dtype == jnp.float32:
            np.testing.assert_allclose(own, other, rtol=2**-18, atol=2**-22)
        else:
            assert np.mean(np.asarray(own) != np.asarray(other)) <= 0.02


@pytest.mark.parametrize("shape", [(136, 200), (2, 136, 128)])
@pytest.mark.parametrize("bits", [8, 0])
def test_tpu_kernels_read_means_of_rows_and_columns(bits, shape):
    params = {"kernel": normal(shape, jnp.bfloat16)}
    series = gradient_series(params, 2, jnp.bfloat16)
    make = functools.partial(lowbit_optax.factored_adamw, 0.01, bits=bits)
    got, want = (trained(x, params, series, make=make) for x in ("tpu", "xla"))
    for own, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        if own.dtype == jnp.float32:
            np.testing.assert_allclose(own, other, rtol=2**-18)
        else:
            assert np.mean(np.asarray(own) != np.asarray(other)) <= 0.02


@pytest.mark.parametrize("name", ["factored", "factored Adam", "sums"])
@pytest.mark.parametrize(
    "spec", [jax.P("x"), jax.P(None, "x")], ids=["rows", "columns"]
)
def test_kernels_on_shards_read_their_parts(name, spec):
    params = {"kernel": normal((128, 64), jnp.bfloat16)}
    make = functools.partial(lowbit_optax.lowbit, INNERS[name])
    series = gradient_series(params, 2)
    (want, _) = trained("pallas", params, series, make=make)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    params = jax.device_put(params, jax.NamedSharding(mesh, spec))
    (got, _) = trained("pallas", params, series, make=make)
    # Sums over devices have another order.
    differ = np.asarray(got["kernel"]) != np.asarray(want["kernel"])
    assert np.mean(differ) <= 0.01


def test_random_numbers_are_xlas_and_so_is_the_update():
    params = {"kernel": normal((100, 72), jnp.bfloat16)}
    inner = optax.noisy_sgd(0.01, key=0)
    with pytest.raises(ValueError, match=r"erf_inv .* is not among the elementwise"):
        trained("pallas", params, gradient_series(params, 1), inner=inner)


def test_an_update_may_read_ten_scalars():
    """A polynomial uses each of its coefficients differently."""
    numbers = np.float32([0.5, -0.3, 0.7, 0.2, -0.9, 0.4, 0.6, -0.8, 0.1, 0.35])

    def update(updates, state, params=None, *, numbers):
        horner = lambda x: functools.reduce(
            lambda y, n: y * x + n, numbers[1:], numbers[0]
        )
        return jax.tree.map(horner, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    params = jnp.zeros((64, 64), jnp.bfloat16)
    grads = jnp.linspace(-1, 1, 4096).reshape(64, 64)
    for implementation in ("xla", "pallas", "tpu", None):
        tx = weights_only(inner, lowbit_optax.kahan(), implementation=implementation)
        step = jax.jit(functools.partial(lowbit_optax.step, tx))
        held = step(params, tx.init(params), grads, numbers=list(numbers))
        masters = lowbit_optax.master_weights(*held)
        np.testing.assert_allclose(masters, np.polyval(numbers, grads), atol=2e-5)
