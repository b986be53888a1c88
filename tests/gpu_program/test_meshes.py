"""Every format's step compiles for meshes, and its shards exchange no data."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit_optax
from lowbit_optax._step.state import NO_RESIDUAL, NOT_HELD
from tests.helpers.gpu_steps import STEPS
from tools.gpu_program.steps import leaf, lower_lpmm_step, lower_step
from tools.gpu_program.targets import compile_lowered, gpu_mesh
from tools.hlo import collectives, entry, text

IN_BLOCKS = lowbit_optax.lowbit(optax.adamw(1e-3), weights=lowbit_optax.extra_bits(16))
ALL = STEPS | {"16 bits, blocks": IN_BLOCKS}
PLACES = {(512, 96): P("d"), (64, 256): P(None, "d"), (64, 160): P()}
# A leaf sharded by columns has a kernel of its own. A leaf sharded by rows and a whole
# leaf share one, except in these formats: no leaf is packed and one is small, or fields
# have 5 bits.
ALL_ALONE = {"5 bits", "kahan", "stochastic rounding"}


def place(x):
    """The PartitionSpec of an array of a leaf, which its number of columns identifies.

    An array has as many columns as the leaf, or one for 4 of them, or for 32 with LPMM.
    Blanks, which nothing reads, have other shapes.
    """
    if x.dtype in (NO_RESIDUAL, NOT_HELD):
        return jax.P()
    wide, four, block = zip(*([n, n // 4, n // 32] for _, n in PLACES), strict=True)
    for columns in wide, four, block:
        if x.shape[1] in columns:
            return list(PLACES.values())[columns.index(x.shape[1])]
    raise AssertionError(x)


@pytest.mark.parametrize("axis", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_shards_by_rows_and_columns_and_whole_leaves_exchange_nothing(name, axis):
    lower = lower_lpmm_step if name.startswith("lpmm") else lower_step
    leaves = [leaf(*shape, dtype=jnp.bfloat16) for shape in PLACES]
    step = lower(ALL[name], leaves, mesh=gpu_mesh(8, axis), spec=place)
    assert step.fused_launches == (3 if name in ALL_ALONE else 2)
    assert not collectives(step.compiled)
    # Only scalars, keys and tables of sizes, and no arrays of leaves.
    outside = [x for x in entry(step.compiled) if x.op != "custom-call"]
    assert sum(x.moved for x in outside) < 512


@pytest.mark.parametrize("check_vma", [True, False])
def test_kernels_run_in_the_users_shard_map(check_vma):
    # If types distinguish shards from whole leaves, kernels draw different random bits.
    tx, mesh = STEPS["lowbit"], gpu_mesh(8)
    params = {"rows": leaf(512, 64), "whole": leaf(64, 64)}
    arguments = params, jax.eval_shape(tx.init, params), params
    spec = lambda path, _: P("d") if "rows" in jax.tree_util.keystr(path) else P()
    specs = jax.tree_util.tree_map_with_path(spec, arguments)
    placed = jax.tree.map(lambda x: NamedSharding(mesh, x), specs)
    step = jax.shard_map(
        lambda params, state, grads: lowbit_optax.step(tx, params, state, grads),
        mesh=mesh,
        in_specs=specs,
        out_specs=specs[:2],
        check_vma=check_vma,
    )
    with jax.set_mesh(mesh):
        jitted = jax.jit(step, in_shardings=placed, out_shardings=placed[:2])
        lowered = jitted.lower(*arguments)
    compiled = compile_lowered(lowered)
    launches = ("__gpu$xla.gpu.triton", "mosaic_gpu_v2")
    assert sum(map(text(compiled).count, launches)) == (2 if check_vma else 1)
    assert not collectives(compiled)
