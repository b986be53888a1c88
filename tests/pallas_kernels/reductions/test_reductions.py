"""Reductions of many arrays give the numbers that each array alone gives."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kernels import EACH

import lowbit_optax
from pallas_kernels.reductions import largest_magnitudes, sums_of_squares

SHAPES = [(64, 512), (70, 33), (1000,), (), (8192,), (8193,), (3, 20000)]
DTYPES = [jnp.bfloat16, jnp.float32, jnp.float16]


def integers(shape, seed, dtype=jnp.float32):
    """Small integers, whose squares have exact sums in every order."""
    drawn = np.random.default_rng(seed).integers(-9, 10, shape)
    return jnp.asarray(drawn, dtype)


def arrays():
    return [integers(s, i, DTYPES[i % 3]) for i, s in enumerate(SHAPES)]


def exact_sums(arrays):
    return [np.sum(np.asarray(x, np.float64) ** 2) for x in arrays]


@EACH
@pytest.mark.parametrize("factor", [None, 0.5])
def test_sums_of_squares_are_exact_where_they_can_be(factor, implementation):
    given = None if factor is None else jnp.float32(factor)
    got = sums_of_squares(arrays(), given, implementation)
    want = [x * (factor or 1) ** 2 for x in exact_sums(arrays())]
    np.testing.assert_array_equal(got, np.float32(want))
    assert got.dtype == jnp.float32


@EACH
def test_sums_of_many_terms_are_close(implementation):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(300_000), jnp.float32)
    (got,) = sums_of_squares([x], implementation=implementation)
    np.testing.assert_allclose(got, exact_sums([x])[0], rtol=2.0**-20)


@EACH
@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
def test_what_is_not_finite_is_noticed_in_its_own_array(bad, implementation):
    xs = arrays()
    xs[1] = xs[1].at[69, 32].set(bad)
    for reduce in (sums_of_squares, largest_magnitudes):
        got = reduce(xs, implementation=implementation)
        assert not np.isfinite(got[1])
        assert np.isfinite(np.delete(got, 1)).all()
    assert np.isnan(got[1]) == math.isnan(bad)


@EACH
def test_magnitudes_are_the_largest(implementation):
    xs = [-x for x in arrays()]
    got = largest_magnitudes(xs, implementation)
    want = [np.max(np.abs(np.asarray(x, np.float32))) for x in xs]
    np.testing.assert_array_equal(got, want)


@EACH
def test_arrays_without_elements_are_zero(implementation):
    got = sums_of_squares([jnp.ones((0, 3)), jnp.ones(2)], None, implementation)
    np.testing.assert_array_equal(got, [0.0, 2.0])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_shards_are_summed_over_the_mesh(axis_type):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    specs = [P("x"), P("x", "y"), P(), P(None, "x"), P(("y", "x"))]
    shapes = [(64, 3), (8, 16), (7,), (5, 8), (16,)]
    xs = [integers(shape, i) for i, shape in enumerate(shapes)]
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(xs, specs, strict=True)
        ]
        sums = jax.jit(functools.partial(sums_of_squares, implementation="pallas"))
        compiled = sums.lower(placed).compile()
        np.testing.assert_array_equal(compiled(placed), np.float32(exact_sums(xs)))
    text = compiled.as_text()
    assert not any(name in text for name in ("all-gather", "all-to-all"))
    # One for each choice of mesh axes: x, and x with y.
    assert 1 <= text.count(" all-reduce(") <= 2


CLIPPED = {
    "clip_by_global_norm": optax.clip_by_global_norm(2.0**-3),
    "two clips": optax.chain(optax.clip_by_global_norm(4.0), optax.clip(2.0**-6)),
}


@pytest.mark.slow_to_compile
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("clip", CLIPPED)
def test_clipping_by_the_norm_of_many_leaves(clip, scaled):
    # The norm is a power of two, so that clipping is exact.
    params = {f"leaf {i}": jnp.zeros((4, 32), jnp.bfloat16) for i in range(8)}
    grads = jax.tree.map(jnp.ones_like, params)
    inner = optax.chain(CLIPPED[clip], optax.sgd(0.5, momentum=0.5))

    def new(implementation):
        tx = lowbit_optax.lowbit(
            inner, weights=lowbit_optax.extra_bits(16), implementation=implementation
        )
        if scaled:
            tx = lowbit_optax.with_loss_scale(tx, lowbit_optax.static_scale(4.0))
        step = jax.jit(functools.partial(lowbit_optax.step, tx))
        params_, state = step(params, tx.init(params), grads)
        return lowbit_optax.master_weights(params_, state)

    got, want = new("pallas"), new("xla")
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert all(np.all(x < 0) for x in jax.tree.leaves(got))


@EACH
def test_reductions_are_batched_and_differentiated(implementation):
    xs = [integers((3, 40), seed) for seed in range(2)]
    reduce = functools.partial(sums_of_squares, implementation=implementation)
    want = np.stack([np.sum(np.square(x), axis=1) for x in xs], axis=1)
    np.testing.assert_array_equal(jax.vmap(reduce)(xs), want)
    gradient = jax.grad(lambda xs: jnp.sum(reduce(xs)))(xs)
    for got, x in zip(gradient, xs, strict=True):
        np.testing.assert_array_equal(got, 2 * x)


def test_steps_with_clipping_are_batched():
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.5))
    tx = lowbit_optax.lowbit(inner)
    params = {str(i): integers((2, 9, 5), i, jnp.bfloat16) for i in range(9)}
    state = jax.vmap(tx.init)(params)
    step = lambda *args: lowbit_optax.step(tx, *args)
    got, _ = jax.jit(jax.vmap(step))(params, state, params)
    for n in range(2):
        one = jax.tree.map(lambda x, n=n: x[n], params)
        want, _ = jax.jit(step)(one, tx.init(one), one)
        for name in params:
            np.testing.assert_array_equal(got[name][n], want[name])
