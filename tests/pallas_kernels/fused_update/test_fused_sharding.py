"""With kernels on eight devices, ``fused_update`` gives one device's bits, in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import (
    Operand,
    Result,
    Scalars,
    fused_update,
    fused_update_many,
)
from tests.helpers.blocks import BlockMixture
from tests.helpers.kernels import (
    QUICK,
    TABLE,
    Mixture,
    assert_equal,
    assert_layer_written,
    index_of,
    stacks_of,
)
from tests.helpers.packing import pack, unpack
from tools.hlo import collectives

U32 = jnp.uint32
LAST = [int(x) for x in TABLE[2]]
AXES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)


def mesh_of(*sizes, axis_type=AxisType.Auto):
    names = ("x", "y")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(axis_type,) * len(sizes))


def assert_placed(arrays, sharding):
    for number, x in enumerate(arrays):
        assert x.sharding.is_equivalent_to(sharding, x.ndim), f"result {number}"
        local = {shard.data.shape for shard in x.addressable_shards}
        assert local == {sharding.shard_shape(x.shape)}


# Every device has whole words and whole blocks: units of 8 rows (32 at odd widths) by 4
# columns, or larger units for larger blocks.
WHOLE = {
    "rows": ((256, 6), (8,), P("x"), (8,)),
    "8 rows": ((64, 6), (8,), P("x"), (8,)),
    "rows, two widths": ((64, 6), (8,), P("x"), (16, 4)),
    "rows, odd width": ((256, 6), (8,), P("x"), (5,)),
    "columns": ((64, 16), (8,), P(None, "x"), (8,)),
    "replicated": ((64, 6), (8,), P(), (8,)),
    "leading axis": ((8, 40, 6), (8,), P("x"), (8,)),
    "vector": ((2048,), (8,), P("x"), (8,)),
    "both axes": ((128, 6), (4, 2), P("x", "y"), (8,)),
    "two mesh axes": ((256, 3), (4, 2), P(("x", "y")), (8,)),
    "three axes": ((4, 64, 5), (4, 2), P("x", "y"), (16,)),
    "heads": ((16, 4, 5), (2, 4), P("x", "y"), (8,)),
    "folded axis": ((2, 3, 1024), (2, 4), P("x", None, "y"), (8,)),
    "plain rows": ((16, 5), (8,), P("x"), ()),
    "plain columns": ((3, 16), (8,), P(None, "x"), ()),
    "plain middle": ((3, 8, 5), (4, 2), P(None, ("x", "y")), ()),
    "blocks in rows": ((64, 6), (8,), P("x"), (8,), 32),
    "blocks in rows, odd width": ((256, 6), (8,), P("x"), (5,), 32),
    "blocks in columns": ((10, 32), (8,), P(None, "x"), (8,), 32),
    "blocks in heads": ((64, 8, 10), (8,), P(None, "x"), (12,), 32),
    "blocks in a leading axis": ((8, 40, 6), (8,), P("x"), (8,), 32),
    "blocks in rows before heads": ((64, 3, 10), (8,), P("x"), (8,), 32),
    "blocks in columns after heads": ((20, 3, 32), (8,), P(None, None, "x"), (8,), 32),
    "blocks in a vector": ((2048,), (8,), P("x"), (8,), 32),
    "large blocks": ((128, 36), (8,), P("x"), (8,), 256),
    "columns of large blocks": ((70, 256), (8,), P(None, "x"), (8,), 2048),
}


def mixture_of(widths, block_size=None):
    return BlockMixture(widths, block_size) if block_size else Mixture(widths)


@AXES
@pytest.mark.parametrize("name", WHOLE)
def test_shards_of_whole_words_and_blocks_need_no_communication(name, axis_type):
    shape, sizes, spec, *kind = WHOLE[name]
    mixture = mixture_of(*kind)
    arrays, held = mixture.arrays(shape)
    mesh = mesh_of(*sizes, axis_type=axis_type)
    sharding = NamedSharding(mesh, spec)
    options = dict(scalars=Scalars(jnp.asarray(TABLE), jnp.array([2], U32)))
    with jax.set_mesh(mesh):
        arrays = jax.device_put(arrays, sharding)
        options = jax.device_put(options, NamedSharding(mesh, P()))
        update = mixture.jitted(shape, "pallas").lower(arrays, options).compile()
        assert not collectives(update)
        got = update(arrays, options)
    assert_placed(got, sharding)
    # The index in the results counts elements of the whole array.
    assert_equal(got, mixture.want(held, LAST, index_of(shape)))


# Shards have parts of words, or whole words and parts of blocks.
SPLIT = {
    "half words": ((16, 6), (8,), P("x"), (8,)),
    "rest on the last": ((24, 6), (8,), P("x"), (8,)),
    "odd width": ((64, 6), (8,), P("x"), (5,)),
    "half words and columns": ((8, 8), (4, 2), P("x", "y"), (8,)),
    "blocks in rows": ((32, 6), (8,), P("x"), (8,), 32),
    "blocks in columns": ((16, 16), (8,), P(None, "x"), (8,), 32),
    "rows of large blocks": ((64, 36), (8,), P("x"), (8,), 256),
    "blocks in a vector": ((1024,), (8,), P("x"), (8,), 32),
}


@AXES
@pytest.mark.parametrize("name", SPLIT)
def test_shards_that_split_words_or_blocks_give_the_same_numbers(name, axis_type):
    shape, sizes, spec, *kind = SPLIT[name]
    mixture = mixture_of(*kind)
    arrays, held = mixture.arrays(shape)
    mesh = mesh_of(*sizes, axis_type=axis_type)
    whole, spread = (NamedSharding(mesh, each) for each in (P(), spec))
    with jax.set_mesh(mesh):
        # Rows of words are also divisible, but arrays with values per block are not.
        placed = [
            jax.device_put(
                x, spread if spec[0] is None or x.shape[0] % sizes[0] == 0 else whole
            )
            for x in arrays[:2]
        ]
        placed += [jax.device_put(x, whole) for x in arrays[2:]]
        update = mixture.jitted(shape, "pallas")
        got = update(placed, dict(scalars=jnp.asarray(TABLE[2])))
    if axis_type == AxisType.Explicit:
        # A new array is placed like the first operand.
        for x, like in zip(got, [*placed, placed[0]], strict=False):
            assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
    assert_equal(got, mixture.want(held, LAST, index_of(shape)))


@pytest.mark.slow_to_compile
@AXES
@pytest.mark.parametrize(
    ("stack", "spec", "widths"),
    [
        ((3, 256, 2), P(None, "x"), (8,)),
        ((2, 8, 40, 2), P(None, "x"), (8,)),
        ((2, 3, 16), P(None, None, "x"), ()),
    ],
)
def test_a_layer_of_a_sharded_stack_is_updated_in_its_place(
    stack, spec, widths, axis_type
):
    layers, *shape = stack
    mixture, shape = Mixture(widths), tuple(shape)
    stacks, held = stacks_of(mixture, shape, layers)
    mesh = mesh_of(8, axis_type=axis_type)
    sharding = NamedSharding(mesh, spec)
    with jax.set_mesh(mesh):
        placed = jax.device_put(stacks, sharding)
        options = dict(scalars=jnp.asarray(TABLE[2]), layer=jnp.int32(1))
        options = jax.device_put(options, NamedSharding(mesh, P()))
        update = mixture.jitted(shape, "pallas").lower(placed, options).compile()
        assert not collectives(update)
        got = update(placed, options)
    count = len(widths) + 1
    assert_placed(got[:count], sharding)
    assert_placed(got[count:], NamedSharding(mesh, P(*spec[1:])))
    want = mixture.want(held[1], LAST, index_of(stack)[1])
    assert_layer_written(got, stacks, 1, want)


COLUMNS = P(None, "x")
SHAPES = [(64,), (16, 16), (8, 3)]
MANY = {
    "pieces": (SHAPES, (P("x"), P("x"), P()), ()),
    "columns": (SHAPES, (P("x"), COLUMNS, P("x")), ()),
    "packed": ([(256, 32)] * 3, (P("x"),) * 3, (8,)),
    # Different shards have different kernels.
    "packed, several shards": ([(256, 32)] * 3, (P("x"), COLUMNS, P()), (8,)),
}


@AXES
@pytest.mark.parametrize("name", MANY)
def test_many_leaves_stay_where_they_are(name, axis_type):
    shapes, specs, widths = MANY[name]
    mixture, rows = Mixture(widths), (1, 0, 2)
    mesh = mesh_of(8, axis_type=axis_type)
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    arrays, held = zip(
        *(mixture.arrays(shape, seed) for seed, shape in enumerate(shapes)), strict=True
    )
    run = mixture.jitted_many(shapes, "pallas")
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(x, s) for x, s in zip(arrays, shardings, strict=True)]
        shared = jnp.asarray(TABLE), jnp.array(rows, U32)
        shared = jax.device_put(shared, NamedSharding(mesh, P()))
        update = run.lower(arrays, *shared).compile()
        assert not collectives(update)
        got = update(arrays, *shared)
    expected = zip(got, held, shapes, rows, shardings, strict=True)
    for own, each, shape, row, sharding in expected:
        assert_placed(own, sharding)
        scalars = [int(x) for x in TABLE[row]]
        assert_equal(own, mixture.want(each, scalars, index_of(shape)))


@pytest.mark.parametrize(
    ("widths", "shapes"),
    [((), [(512, 3)]), ((8,), [(512, 3)]), ((), [(16, 3), (64,)])],
)
def test_in_the_users_shard_map_a_shard_is_a_leaf_of_its_own(widths, shapes):
    mesh, mixture, table = mesh_of(8), Mixture(widths), jnp.asarray(TABLE)
    arrays, held = zip(*map(mixture.arrays, shapes), strict=True)
    local = [(shape[0] // 8, *shape[1:]) for shape in shapes]

    def update(arrays):
        scalars = Scalars(table, jnp.full(len(shapes), 2, U32))
        return fused_update_many(
            mixture,
            mixture.leaves(arrays, local),
            scalars=scalars,
            implementation="pallas",
        )

    specs = dict(in_specs=P("x"), out_specs=P("x"))
    run = jax.shard_map(update, mesh=mesh, check_vma=False, **specs)
    sharding = NamedSharding(mesh, P("x"))
    with jax.set_mesh(mesh):
        arrays = jax.device_put(arrays, sharding)
        compiled = jax.jit(run).lower(arrays).compile(QUICK)
        assert not collectives(compiled)
        got = compiled(arrays)
    for own, each, shape in zip(got, held, local, strict=True):
        assert_placed(own, sharding)
        index = np.tile(index_of(shape), (8, *[1] * (len(shape) - 1)))
        assert_equal(own, mixture.want(each, LAST, index))


def test_unknown_placements_are_settled_by_the_operands_that_are_overwritten():
    # A gradient on other devices is moved to its parameter, and not the reverse.
    mesh = mesh_of(8)
    rows, columns = (NamedSharding(mesh, s) for s in (P("x"), P(None, "x")))
    param, grad = jnp.arange(512.0).reshape(64, 8), jnp.ones((64, 8))

    @jax.jit
    def run(param, grad):
        return fused_update(
            lambda values, *_: [values[1] - values[0]],
            [Operand(grad), Operand(param)],
            [Result("float32", overwrites=1)],
            implementation="pallas",
        )

    (got,) = run(jax.device_put(param, columns), jax.device_put(grad, rows))
    assert_placed([got], columns)
    np.testing.assert_array_equal(got, param - grad)


@AXES
def test_packed_words_lie_beside_their_fields(axis_type):
    sharding = NamedSharding(mesh_of(8, axis_type=axis_type), P("x"))
    fields = jnp.asarray(index_of((256, 4)) % 256)
    words = pack(fields, 8, implementation="xla")
    options = dict(implementation="pallas")
    there = lambda x: pack(x, 8, **options)
    back = lambda x: unpack(x, 8, fields.shape, **options)
    for given, run, want in ((fields, there, words), (words, back, fields)):
        with jax.set_mesh(sharding.mesh):
            got = jax.jit(run)(jax.device_put(given, sharding))
        np.testing.assert_array_equal(got, want)
        assert_placed([got], sharding)
