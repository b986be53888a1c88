"""The kernel of ``axis_sums`` adds all elements of an array, and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import platforms
from pallas_kernels.fused_update.axis_sums import axis_sums
from tests.helpers.optimizers import normal

NOTHING = jnp.zeros(1, jnp.uint32)
SHAPES = [(1, 1), (2, 3), (64, 512), (65, 513), (3, 130, 700), (2, 2, 40, 1024)]


@pytest.fixture(autouse=True)
def by_triton(monkeypatch):
    """Run the kernel in every version of JAX; there is none for Mosaic."""
    monkeypatch.setattr(platforms, "DEFAULT_LAUNCHER", "triton")


def _plus_one(x, scalars):
    # Elements outside of the array must not count, though this is not 0 for them.
    return x.astype(jnp.float32) + scalars[0].astype(jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_kernel_has_the_sums_of_xla(shape, dtype):
    x, one = normal(0, shape, dtype), jnp.ones(1, jnp.uint32)
    want = np.asarray(x, np.float64) + 1
    for implementation in ("pallas", "xla"):
        (found,) = axis_sums(_plus_one, [x], one, implementation)
        for got, axis in zip(found, (-1, -2), strict=True):
            near = dict(rtol=1e-5, atol=1e-4)
            np.testing.assert_allclose(got, want.sum(axis, keepdims=True), **near)


@pytest.mark.parametrize("shape", [(65, 513), (3, 130, 700)])
def test_arrays_that_share_a_kernel_have_the_bits_of_each_alone(shape):
    square = lambda x, _: x.astype(jnp.float32) ** 2
    arrays = [normal(seed, shape, jnp.bfloat16) for seed in range(3)]
    sums = functools.partial(axis_sums, square, implementation="pallas")
    shared = sums(arrays, NOTHING)
    for found, x in zip(shared, arrays, strict=True):
        (want,) = sums([x], NOTHING)
        jax.tree.map(np.testing.assert_array_equal, found, want)


def test_derivatives_and_batches_are_those_of_xla():
    x = normal(0, (3, 20, 30))

    def loss(x, implementation):
        square = lambda x, _: x * x
        ((rows, columns),) = axis_sums(square, [x], NOTHING, implementation)
        return jnp.sum(rows**2) + jnp.sum(columns)

    run = lambda name: functools.partial(loss, implementation=name)
    got, want = (jax.vmap(jax.grad(run(name)))(x) for name in ("pallas", "xla"))
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("axis_type", list(jax.sharding.AxisType)[:2])
@pytest.mark.parametrize(
    "spec", [jax.P("x"), jax.P(None, "x"), jax.P("x", "y"), jax.P(), jax.P("y", "x")]
)
def test_shards_are_summed_where_they_are(spec, axis_type):
    if jax.__version_info__ < (0, 11) and spec != jax.P():
        pytest.skip("interpreted kernels on several devices can deadlock")
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    x = normal(0, (128, 96), jnp.bfloat16)
    square = lambda x, _: x.astype(jnp.float32) ** 2
    (want,) = axis_sums(square, [x], NOTHING, "xla")
    with jax.set_mesh(mesh):
        there = jax.device_put(x, jax.NamedSharding(mesh, spec))
        run = jax.jit(lambda x: axis_sums(square, [x], NOTHING, "pallas")[0])
        found = run(there)
        assert "all-gather" not in run.lower(there).compile().as_text()
    for got, expected in zip(found, want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("axis_type", list(jax.sharding.AxisType)[:2])
def test_arrays_with_other_shardings_are_summed_where_they_are(axis_type):
    if jax.__version_info__ < (0, 11):
        pytest.skip("interpreted kernels on several devices can deadlock")
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    specs = [jax.P("x"), jax.P("y", "x"), jax.P("x")]
    arrays = [normal(seed, (128, 96), jnp.bfloat16) for seed in range(3)]
    square = lambda x, _: x.astype(jnp.float32) ** 2
    want = axis_sums(square, arrays, NOTHING, "xla")
    with jax.set_mesh(mesh):
        places = (jax.NamedSharding(mesh, spec) for spec in specs)
        there = [*map(jax.device_put, arrays, places)]
        run = jax.jit(lambda x: axis_sums(square, x, NOTHING, "pallas"))
        found = run(there)
        assert "all-gather" not in run.lower(there).compile().as_text()
    near = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    jax.tree.map(near, found, want)
