"""``fused_update`` with values per block equals a numpy model, bit for bit.

The model numbers the blocks of :mod:`pallas_kernels.layout` by its definition: it
computes each element's block from the element's place.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import Maxima, blocks_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kernels import (
    EACH,
    Mixture,
    assert_equal,
    assert_layer_written,
    fields_of,
    index_of,
    row_major,
    stacks_of,
    words_of,
)

from pallas_kernels import Operand, Result

U32 = jnp.uint32


@dataclasses.dataclass(frozen=True)
class BlockMixture(Mixture):
    """A body of integers: each result depends on the maxima over the element's block.

    Operands are fields, a plain array, and one value per block. Results are their new
    versions, in their places, and the index.
    """

    block_size: int

    @property
    def bits(self):
        return self.widths[0]

    @property
    def rounds(self):
        return [[self.block_size] * 2]

    kept = 2

    def before(self, block_values):
        (old,) = block_values
        return (old * U32(5),)

    def statistics(self, number, values, scalars, index, multiply_add, before, after):
        del multiply_add
        field, plain = values
        mixed = (field ^ plain ^ before[0] ^ scalars[0]) & U32(0xFFFF)
        # The second is below 0 in half of the smallest blocks, and counts as 0 there.
        return mixed.astype(jnp.int32), mixed.astype(jnp.int32) - 0xFA00

    def after(self, maxima, block_values, scalars):
        del block_values, scalars
        first, second = (x.astype(U32) for x in maxima)
        return [first * U32(3) + second], (first, second)

    def __call__(self, values, scalars, index, multiply_add, before, after):
        del multiply_add
        field, plain = values
        first, second = after
        index = row_major(index, plain)
        new = (field * U32(3) + first + before[0]) & U32(2**self.bits - 1)
        return [new, plain ^ (first + second * U32(7) + scalars[1]), index]

    def operands(self, arrays):
        words, plain, old = arrays
        return [
            Operand(words, self.bits),
            Operand(plain),
            Operand(old, None, self.block_size),
        ]

    @property
    def results(self):
        return [
            Result(U32, self.bits, 0),
            Result(U32, None, 1),
            Result(U32, None, 2, self.block_size),
            Result(U32),
        ]

    def arrays(self, shape, seed=0):
        """The operands, and the numbers that they hold."""
        count, _ = blocks_of(shape, self.block_size)
        held = [
            fields_of(shape, self.bits, seed),
            fields_of(shape, 32, seed),
            fields_of(count, 32, seed + 1),
        ]
        words = words_of(held[0], self.bits)
        return [jnp.asarray(x) for x in (words, *held[1:])], held

    def want(self, held, scalars, index):
        """The results as they are stored, computed in numpy."""
        field, plain, old = (x.astype(np.uint32) for x in held)
        _, places = blocks_of(field.shape, self.block_size)
        before = (old * np.uint32(5))[places]
        mixed = ((field ^ plain ^ before ^ scalars[0]) & 0xFFFF).astype(np.int32)
        first, second = np.zeros(old.shape, np.int32), np.zeros(old.shape, np.int32)
        np.maximum.at(first, places, mixed)
        np.maximum.at(second, places, mixed - 0xFA00)
        first, second = first.astype(np.uint32), second.astype(np.uint32)
        new = field * np.uint32(3) + first[places] + before
        new = new & np.uint32(2**self.bits - 1)
        mixed = first[places] + second[places] * np.uint32(7) + scalars[1]
        of_blocks = first * np.uint32(3) + second
        return [words_of(new, self.bits), plain ^ mixed, of_blocks, index]


SCALARS = np.array([0x12345678, 0x9ABCDEF0], np.uint32)

CASES = [
    ((64, 512), 32, 8),
    ((70, 33), 32, 8),
    ((70, 33), 32, 5),
    ((9, 5), 32, 12),
    ((1, 1), 32, 8),
    ((1000,), 32, 8),
    ((33,), 32, 12),
    ((5, 40, 24), 32, 16),
    ((3, 40, 9), 32, 5),
    ((12, 13, 40), 32, 8),
    ((24, 3, 10), 32, 8),
    ((3, 3, 3, 64), 32, 4),
    ((2, 3, 16, 2, 9), 32, 8),
    ((70, 33), 64, 5),
    ((1000,), 64, 8),
    ((70, 33), 128, 8),
    ((20, 3, 40), 256, 12),
    ((1000,), 256, 8),
    ((130, 70), 2048, 8),
    ((3000,), 2048, 8),
    ((24, 3, 10), 2048, 4),
    ((70, 2, 2, 2, 40), 2048, 8),
]


@EACH
@pytest.mark.parametrize(("shape", "block_size", "bits"), CASES, ids=str)
def test_results_are_those_of_the_model(shape, block_size, bits, implementation):
    mixture = BlockMixture((bits,), block_size)
    arrays, held = mixture.arrays(shape)
    update = mixture.jitted(shape, implementation)
    got = update(arrays, dict(scalars=jnp.asarray(SCALARS)))
    assert_equal(got, mixture.want(held, SCALARS, index_of(shape)))


# Units of 8 rows (32 at odd widths) by 4 columns, or more where blocks are larger.
WHOLE_BLOCKS = {
    "rows": ((64, 6), P("x"), 32, 8),
    "rows, odd width": ((256, 6), P("x"), 32, 5),
    "columns": ((10, 32), P(None, "x"), 32, 8),
    "heads": ((64, 8, 10), P(None, "x"), 32, 12),
    "leading axis": ((8, 40, 6), P("x"), 32, 8),
    "rows before heads": ((64, 3, 10), P("x"), 32, 8),
    "columns after heads": ((20, 3, 32), P(None, None, "x"), 32, 8),
    "vector": ((2048,), P("x"), 32, 8),
    "large blocks": ((128, 36), P("x"), 256, 8),
    "columns of large blocks": ((70, 256), P(None, "x"), 2048, 8),
}


AXES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])


@AXES
@pytest.mark.parametrize("name", WHOLE_BLOCKS)
def test_shards_of_whole_blocks_have_the_bits_of_the_whole(name, axis_type):
    shape, spec, block_size, bits = WHOLE_BLOCKS[name]
    mixture = BlockMixture((bits,), block_size)
    arrays, held = mixture.arrays(shape)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    sharding = NamedSharding(mesh, spec)
    options = dict(scalars=jnp.asarray(SCALARS))
    with jax.set_mesh(mesh):
        arrays = jax.device_put(arrays, sharding)
        update = mixture.jitted(shape, "pallas")
        compiled = update.lower(arrays, options).compile()
        text = compiled.as_text() or ""
        assert not any(name in text for name in ("all-gather", "all-to-all"))
        got = compiled(arrays, options)
    for x in got:
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    assert_equal(got, mixture.want(held, SCALARS, index_of(shape)))


# Shards hold whole words, but not whole blocks.
SPLIT_BLOCKS = {
    "rows": ((32, 6), P("x"), 32, 8),
    "columns": ((16, 16), P(None, "x"), 32, 8),
    "rows of large blocks": ((64, 36), P("x"), 256, 8),
    "vector": ((1024,), P("x"), 32, 8),
}


@pytest.mark.slow_to_compile
@AXES
@pytest.mark.parametrize("name", SPLIT_BLOCKS)
def test_shards_that_split_blocks_give_the_same_numbers(name, axis_type):
    shape, spec, block_size, bits = SPLIT_BLOCKS[name]
    mixture = BlockMixture((bits,), block_size)
    arrays, held = mixture.arrays(shape)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    whole, spread = (NamedSharding(mesh, each) for each in (P(), spec))
    with jax.set_mesh(mesh):
        words, plain, old = arrays
        placed = [jax.device_put(x, spread) for x in (words, plain)]
        placed.append(jax.device_put(old, whole))
        update = mixture.jitted(shape, "pallas")
        got = update(placed, dict(scalars=jnp.asarray(SCALARS)))
    if axis_type == AxisType.Explicit:
        places = [*(x.sharding for x in placed), spread]  # a new array is like the leaf
        for x, place in zip(got, places, strict=True):
            assert x.sharding.is_equivalent_to(place, x.ndim)
    assert_equal(got, mixture.want(held, SCALARS, index_of(shape)))


@EACH
def test_a_layer_of_a_stack_is_updated_in_its_place(implementation):
    mixture, shape = BlockMixture((8,), 32), (20, 9)
    stacks, held = stacks_of(mixture, shape)
    options = dict(scalars=jnp.asarray(SCALARS), layer=jnp.int32(1))
    got = mixture.jitted(shape, implementation)(stacks, options)
    # The index is the one in the whole stack.
    want = mixture.want(held[1], SCALARS, index_of((3, *shape))[1])
    assert_layer_written(got, stacks, 1, want)


def test_blocks_higher_than_a_tile_beside_odd_widths_are_left_to_the_reference():
    shape, block_size = (70, 33), 128
    mixture = BlockMixture((5,), block_size)
    arrays, held = mixture.arrays(shape)
    options = dict(scalars=jnp.asarray(SCALARS))
    got = mixture.jitted(shape, None)(arrays, options)
    assert_equal(got, mixture.want(held, SCALARS, index_of(shape)))
    with pytest.raises(
        ValueError, match=r"fields of \[5\] bits with blocks of \[128\]"
    ):
        mixture.jitted(shape, "pallas")(arrays, options)


# Blocks of several sizes.


BLOCKS = [
    ((128, 64), (32, 2048)),
    ((100, 70), (64, 1024)),
    ((70, 261), (32, 128, 2048)),
    ((5, 72, 24), (512, 256)),
    ((3, 3, 24, 40), (2048, 64)),
    ((3000,), (32, 256)),
    ((3, 2), (32, 2048)),
]


@EACH
@pytest.mark.parametrize(("shape", "sizes"), BLOCKS)
def test_maxima_are_those_of_blocks_of_each_size(shape, sizes, implementation):
    body = Maxima(sizes)
    arrays = body.arrays(shape)
    assert_equal(body.jitted(implementation)(arrays), body.want(arrays))
