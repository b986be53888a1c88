"""Steps in a user's ``jax.shard_map`` draw separate random bits for each shard."""

import functools
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lowbit_optax
from lowbit_optax import cast, lowbit, stochastic_rounding
from tests.helpers.optimizers import assert_same_bits

pytestmark = pytest.mark.standard_promotion

SPECS = {"rows": P("a"), "both": P("a", "b"), "whole": P()}
SHAPE = 16, 128  # shape of every shard


def steps(params, implementation=None):
    """Runs two steps in which shards differ only in their random bits."""
    tx = lowbit(
        optax.adamw(0.01),
        weights=stochastic_rounding(),
        moments=cast(jnp.bfloat16),
        implementation=implementation,
    )
    # Set the seed, which otherwise depends on the parameters.
    state = tx.init(params)._replace(seed=jnp.uint32(7))
    grads = jax.tree.map(lambda x: jnp.full_like(x, 0.1), params)
    for _ in range(2):
        params, state = lowbit_optax.step(tx, params, state, grads)
    return params, optax.tree.get(state, "mu")


@functools.cache
def sharded(implementation, check_vma=True, devices=(4, 2), shape=SHAPE):
    """Returns parameters after steps in a ``shard_map``, and each leaf's shards."""
    automatic = (AxisType.Auto,) * 2
    mesh = jax.make_mesh(
        devices,
        ("a", "b"),
        axis_types=automatic,
        devices=jax.devices()[: prod(devices)],
    )
    shards = {"rows": (devices[0], 1), "both": devices, "whole": (1, 1)}
    ones = {k: jnp.ones(np.multiply(shape, n), jnp.bfloat16) for k, n in shards.items()}
    run = jax.shard_map(
        lambda params: steps(params, implementation)[0],
        mesh=mesh,
        in_specs=(SPECS,),
        out_specs=SPECS,
        check_vma=check_vma,
    )
    params = jax.jit(run)(ones)
    return params, {
        name: [np.asarray(x.data) for x in leaf.addressable_shards]
        for name, leaf in params.items()
    }


def different(shards):
    return len({x.tobytes() for x in shards})


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_shards_draw_different_bits_and_replicas_the_same(implementation):
    _, shards = sharded(implementation)
    counts = {name: different(each) for name, each in shards.items()}
    assert counts == {"rows": 4, "both": 8, "whole": 1}
    # Two shards agree in about half of their roundings by chance.
    first, second, *_ = shards["both"]
    assert 0.2 < np.mean(first != second) < 0.8


def test_the_choice_by_platform_draws_the_same_bits():
    assert_same_bits(sharded(None)[0], sharded("xla")[0])


@pytest.mark.slow_to_compile
def test_kernels_for_tpus_draw_the_same_bits():
    # Smaller leaves have no kernel.
    of = functools.partial(sharded, devices=(2, 1), shape=(256, 256))
    got, shards = of("tpu")
    assert different(shards["rows"]) == 2
    assert_same_bits(got, of("xla")[0])


def test_untyped_shards_draw_the_same_bits_as_they_may_be_replicas():
    _, shards = sharded("xla", check_vma=False)
    assert all(different(x) == 1 for x in shards.values())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.MultiSteps(tx, 2),
        lambda tx: optax.conditionally_mask(tx, lambda count: count % 2 == 1),
    ],
    ids=["MultiSteps", "conditionally_mask"],
)
def test_wrappers_with_conditionals_step_on_each_shard(wrap):
    tx = wrap(lowbit_optax.kahan_sgd(0.5, 0.9, moments="float32"))
    params = {"w": jnp.linspace(-1, 1, 32, dtype=jnp.bfloat16).reshape(8, 4)}
    state = tx.init(params)
    mesh = jax.make_mesh((2,), ("a",), (AxisType.Auto,), devices=jax.devices()[:2])
    specs = jax.tree.map(lambda x: P("a") if x.ndim else P(), (params, state))

    def two_steps(params, state):
        for _ in range(2):
            params, state = lowbit_optax.step(tx, params, state, params)
        return params, state

    run = lambda is_typed: jax.jit(
        jax.shard_map(
            two_steps,
            mesh=mesh,
            in_specs=specs,
            out_specs=specs,
            check_vma=is_typed,
        )
    )(params, state)
    got = run(is_typed=True)
    assert_same_bits(got, run(is_typed=False))
    assert (got[0]["w"] != params["w"]).any()


def test_min_size_counts_the_elements_of_all_shards():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    tx, found = lowbit(optax.adamw(0.01)), {}

    def start(params):
        state = tx.init(params)
        found.update(dict(jax.tree_util.tree_leaves_with_path(state)))
        return jax.tree.map(lambda x: x, params)

    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    jax.eval_shape(
        jax.shard_map(start, mesh=mesh, in_specs=P("a"), out_specs=P("a")), params
    )
    packed = [x for x in found.values() if x.dtype == jnp.uint32 and x.ndim]
    assert len(packed) == 3  # the residual, mu and nu
    assert not [x for x in found.values() if x.dtype == jnp.float32]
