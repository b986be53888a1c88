"""``fused_update`` by kernels on eight devices gives one device's bits, in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kernels import (
    QUICK,
    TABLE,
    Mixture,
    assert_equal,
    assert_layer_written,
    index_of,
    row_major,
    stacks_of,
)

from pallas_kernels import (
    Leaf,
    Operand,
    Result,
    Scalars,
    fused_update,
    fused_update_many,
    pack,
    unpack,
)

U32 = jnp.uint32
LAST = [int(x) for x in TABLE[2]]


INTERPRETED = pytest.mark.xfail(
    strict=True,
    reason="where new results vary over a mesh, Pallas cannot interpret the kernel: "
    "'Scan carry input and output got mismatched varying manual axes'",
)
AXES = pytest.mark.parametrize(
    "axis_type",
    [
        pytest.param(AxisType.Auto, id="auto"),
        pytest.param(AxisType.Explicit, id="explicit"),
    ],
)


def mesh_of(*sizes, axis_type=AxisType.Auto):
    names = ("x", "y")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(axis_type,) * len(sizes))


def assert_placed(arrays, sharding):
    for number, x in enumerate(arrays):
        assert x.sharding.is_equivalent_to(sharding, x.ndim), f"result {number}"
        local = {shard.data.shape for shard in x.addressable_shards}
        assert local == {sharding.shard_shape(x.shape)}


# Whole words on every device; widths (), (8,), (5,) or (16, 4).
WHOLE_WORDS = {
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
}
CASES = [(name, AxisType.Auto) for name in WHOLE_WORDS] + [
    (name, AxisType.Explicit)
    for name in (
        "rows",
        "heads",
        "columns",
        "both axes",
        "two mesh axes",
        "plain columns",
    )
]


@pytest.mark.parametrize(("name", "axis_type"), CASES)
def test_shards_of_whole_words_need_no_communication(name, axis_type):
    shape, sizes, spec, widths = WHOLE_WORDS[name]
    mixture = Mixture(widths)
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
    # The index among the results is the one in the whole.
    assert_equal(got, mixture.want(held, LAST, index_of(shape)))


SPLIT_WORDS = {
    "half words": ((16, 6), (8,), P("x"), (8,)),
    "rest on the last": ((24, 6), (8,), P("x"), (8,)),
    "odd width": ((64, 6), (8,), P("x"), (5,)),
    "half words and columns": ((8, 8), (4, 2), P("x", "y"), (8,)),
}


SPLIT_CASES = [(name, AxisType.Auto) for name in SPLIT_WORDS] + [
    ("half words", AxisType.Explicit),
    ("half words and columns", AxisType.Explicit),
]


@pytest.mark.parametrize(("name", "axis_type"), SPLIT_CASES)
def test_shards_that_split_words_give_the_same_numbers(name, axis_type):
    shape, sizes, spec, widths = SPLIT_WORDS[name]
    mixture = Mixture(widths)
    arrays, held = mixture.arrays(shape)
    mesh = mesh_of(*sizes, axis_type=axis_type)
    sharding = NamedSharding(mesh, spec)
    with jax.set_mesh(mesh):
        whole = NamedSharding(mesh, P())
        # Words lie where they can: rows of words divide as well.
        placed = [
            jax.device_put(x, sharding if x.shape[0] % sizes[0] == 0 else whole)
            for x in arrays
        ]
        update = mixture.jitted(shape, "pallas")
        got = update(placed, dict(scalars=jnp.asarray(TABLE[2])))
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


def marked(values, scalars, index, multiply_add):
    index = row_major(index, values[0])
    return [values[0] * scalars[0] + index, index]


@AXES
@pytest.mark.parametrize(
    "specs",
    [(P("x"), P("x"), P()), (P("x"), P(None, "x"), P("x"))],
    ids=["pieces", "columns"],
)
def test_many_leaves_stay_where_they_are(specs, axis_type):
    shapes = [(64,), (16, 16), (8, 3)]
    mesh = mesh_of(8, axis_type=axis_type)
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    held = [index_of(shape, start=7) for shape in shapes]
    results = (Result(U32, overwrites=0), Result(U32))

    @jax.jit
    def run(arrays, table, rows):
        leaves = [Leaf((Operand(x),), results, x.shape) for x in arrays]
        return fused_update_many(
            marked, leaves, scalars=Scalars(table, rows), implementation="pallas"
        )

    with jax.set_mesh(mesh):
        arrays = [jax.device_put(x, s) for x, s in zip(held, shardings, strict=True)]
        shared = jnp.asarray(TABLE), jnp.array([1, 0, 2], U32)
        shared = jax.device_put(shared, NamedSharding(mesh, P()))
        update = run.lower(arrays, *shared).compile(QUICK)
        assert not collectives(update)
        got = update(arrays, *shared)
    for own, x, row, sharding in zip(got, held, (1, 0, 2), shardings, strict=True):
        index = index_of(x.shape)
        assert_placed(own, sharding)
        assert_equal(own, [x * TABLE[row, 0] + index, index])


@pytest.mark.slow_to_compile
@AXES
@pytest.mark.parametrize("specs", [[P("x")] * 3, [P("x"), P(None, "x"), P()]], ids=str)
def test_many_packed_leaves_are_updated_where_they_are(specs, axis_type):
    # Where shards differ, each has a kernel of its own.
    shape, mixture = (256, 32), Mixture((8,))
    mesh = mesh_of(8, axis_type=axis_type)
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    arrays, held = zip(*(mixture.arrays(shape, seed) for seed in range(3)), strict=True)

    run = mixture.jitted_many(shape, "pallas")
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(x, s) for x, s in zip(arrays, shardings, strict=True)]
        shared = jnp.asarray(TABLE), jnp.array([1, 0, 2], U32)
        shared = jax.device_put(shared, NamedSharding(mesh, P()))
        update = run.lower(arrays, *shared).compile()
        assert not collectives(update)
        got = update(arrays, *shared)
    for own, each, row, sharding in zip(got, held, (1, 0, 2), shardings, strict=True):
        assert_placed(own, sharding)
        scalars = [int(x) for x in TABLE[row]]
        assert_equal(own, mixture.want(each, scalars, index_of(shape)))


@pytest.mark.parametrize("check_vma", [False, pytest.param(True, marks=INTERPRETED)])
@pytest.mark.parametrize("widths", [(), (8,)])
def test_in_the_users_shard_map_a_shard_is_a_leaf_of_its_own(widths, check_vma):
    shape, local = (512, 3), (64, 3)
    mixture = Mixture(widths)
    arrays, held = mixture.arrays(shape)
    mesh = mesh_of(8)

    def update(*arrays):
        return mixture.update(arrays, local, "pallas", scalars=jnp.asarray(TABLE[2]))

    run = jax.shard_map(
        update, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma
    )
    sharding = NamedSharding(mesh, P("x"))
    with jax.set_mesh(mesh):
        arrays = jax.device_put(arrays, sharding)
        compiled = jax.jit(run).lower(*arrays).compile(QUICK)
        assert not collectives(compiled)
        got = compiled(*arrays)
    assert_placed(got, sharding)
    index = np.tile(index_of(local), (8, 1))
    assert_equal(got, mixture.want(held, LAST, index))


def test_many_leaves_in_the_users_shard_map():
    mesh = mesh_of(8)
    results = (Result(U32, overwrites=0), Result(U32))

    def update(*arrays):
        leaves = [Leaf((Operand(x),), results, x.shape) for x in arrays]
        return fused_update_many(
            marked,
            leaves,
            scalars=Scalars(jnp.asarray(TABLE), jnp.zeros(2, U32)),
            implementation="pallas",
        )

    run = jax.shard_map(update, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    arrays = jnp.ones((16, 3), U32), jnp.ones(64, U32)
    got = jax.jit(run)(*arrays)
    for own, local, reps in zip(got, [(2, 3), (8,)], [(8, 1), (8,)], strict=True):
        index = np.tile(index_of(local), reps)
        assert_equal(own, [1 + index, index])


def test_unknown_placements_are_settled_by_the_operands_that_are_overwritten():
    # A gradient that lies elsewhere is moved to its parameter, and not the reverse.
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
@pytest.mark.parametrize("way", ["pack", "unpack"])
def test_packed_words_lie_beside_their_fields(way, axis_type):
    mesh = mesh_of(8, axis_type=axis_type)
    sharding = NamedSharding(mesh, P("x"))
    fields = jnp.asarray(index_of((256, 4)) % 256)
    words = pack(fields, 8, implementation="xla")
    options = dict(implementation="pallas")
    if way == "pack":
        given, want, run = fields, words, lambda x: pack(x, 8, **options)
    else:
        given, want = words, fields
        run = lambda x: unpack(x, 8, fields.shape, **options)
    with jax.set_mesh(mesh):
        got = jax.jit(run)(jax.device_put(given, sharding))
    np.testing.assert_array_equal(got, want)
    assert_placed([got], sharding)
