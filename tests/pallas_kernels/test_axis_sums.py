"""The kernel of ``axis_sums`` adds all elements of an array, and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fused_update.axis_sums import axis_sums
from tests.helpers.optimizers import normal

NOTHING = jnp.zeros(1, jnp.uint32)
SHAPES = [(1, 1), (2, 3), (64, 512), (65, 513), (3, 130, 700), (2, 2, 40, 1024)]


def _plus_one(x, scalars):
    # Elements outside of the array must not count, though this is not 0 for them.
    return x.astype(jnp.float32) + scalars[0].astype(jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_kernel_has_the_sums_of_xla(shape, dtype):
    x, one = normal(0, shape, dtype), jnp.ones(1, jnp.uint32)
    want = np.asarray(x, np.float64) + 1
    for implementation in ("pallas", "xla"):
        found = axis_sums(_plus_one, x, one, implementation)
        for got, axis in zip(found, (-1, -2), strict=True):
            near = dict(rtol=1e-5, atol=1e-4)
            np.testing.assert_allclose(got, want.sum(axis, keepdims=True), **near)


def test_derivatives_and_batches_are_those_of_xla():
    x = normal(0, (3, 20, 30))

    def loss(x, implementation):
        rows, columns = axis_sums(lambda x, _: x * x, x, NOTHING, implementation)
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
    want = axis_sums(square, x, NOTHING, "xla")
    with jax.set_mesh(mesh):
        there = jax.device_put(x, jax.NamedSharding(mesh, spec))
        run = jax.jit(lambda x: axis_sums(square, x, NOTHING, "pallas"))
        found = run(there)
        assert "all-gather" not in run.lower(there).compile().as_text()
    for got, expected in zip(found, want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
