"""A kernel for GPUs: how it walks over leaves, its arguments, and its results.

A launcher is a module with ``update``, such as :mod:`.triton`. It says how large its
programs are, and calls the kernel. What a program does is in :mod:`.program`.

A program has lanes side by side, and rows of them one after the other. There are two
tilings:

- *Flat*, for leaves in which nothing is packed: a row is consecutive in memory, and
  each element of it is a lane.
- *Tiled*: a lane is 4 neighbouring columns, and goes down 8 rows (16 or 32 where fields
  repeat only after so many). So a thread has all words of its fields, bit offsets are
  static, and it has whole tiles of :mod:`pallas_kernels.layout`, whose maxima need no
  other thread. Its loads and stores are 4 elements wide where the number of columns is
  a multiple of 4. The tiles of a block are in Z-order: every smaller block is then a
  run of them, so leaves may have blocks of several sizes.

Offsets into arrays are int32, so an array has fewer than 2^31 elements. The *index* of
an element is its row-major place in the leaf, modulo 2^32. For a shard it is counted by
the leaf's strides from the index of the shard's first element.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.fused_update.spec import (
    MAX_ELEMENTS_OF_SMALL_LEAF,
    BlockBody,
    Body,
    Call,
    Leaf,
    Shard,
    manual_axes,
    result_shapes,
)
from pallas_kernels.layout import (
    FOLD,
    TILE_COLUMNS,
    TILE_ROWS,
    TILE_SIZE,
    Layout,
    block_shape,
    layout_of,
    period,
)

# Loads and stores of a kernel. The time to compile grows as their square: one of
# Triton's with 240 takes 4 seconds, and one with 480 takes 10.
_MAX_ACCESSES = 250


@dataclasses.dataclass(frozen=True)
class ProgramSize:
    """How large a launcher's programs are.

    Args:
      flat_width, flat_rows: lanes and rows of those of flat tilings.
      small_width: lanes where leaves differ in size; there is one row.
      lanes: of the others, each of them 4 columns wide.
      cost_of_two: how many times as long a load or a store takes to compile where
        blocks are of two sizes.
    """

    flat_width: int
    flat_rows: int
    small_width: int
    lanes: int
    cost_of_two: int = 1

    def tiling(self, shard: Shard) -> "Tiling":
        """The tiling of a leaf's part."""
        leaf = shard.leaf
        return Tiling(self, shard.shape, leaf.shape, leaf.packed, leaf.block_sizes)

    def common_tiling(self, shards: Sequence[Shard]) -> "Tiling":
        """The tiling of leaves that share a kernel; of the longest if sizes differ."""
        tilings = [self.tiling(shard) for shard in shards]
        first, longest = tilings[0], max(tiling.size for tiling in tilings)
        is_small = first.is_flat and longest <= MAX_ELEMENTS_OF_SMALL_LEAF
        are_equal = all(tiling == first for tiling in tilings)
        if are_equal and not (is_small and len(shards) > 1):
            return first
        small = dataclasses.replace(self, flat_width=self.small_width, flat_rows=1)
        return Tiling(small, (longest,), (longest,), (), ())

    def max_leaves(self, leaves: Sequence[Leaf]) -> int:
        """How many of these leaves a kernel should update at most."""
        shards = [Shard(leaf, leaf.shape) for leaf in leaves]
        rows = self.common_tiling(shards).chunk_rows
        accesses = 0
        for x in (*leaves[0].operands, *leaves[0].results):
            if x.block_size is not None:
                accesses += 1
            else:
                accesses += rows if x.bits is None else max(1, rows * x.bits // 32)
        has_two_sizes = len(leaves[0].block_sizes) > 1
        cost = self.cost_of_two if has_two_sizes else 1
        return max(1, _MAX_ACCESSES // (cost * accesses))

    def can_share(self, shards: Sequence[Shard]) -> bool:
        """Whether these leaves, or shards of leaves, can share a kernel.

        Their operands and results are of the same kinds.
        """
        first, *others = [self.tiling(shard) for shard in shards]
        if not others or all(tiling.is_flat for tiling in (first, *others)):
            return True
        # Each step of a loop would load and store by branches.
        is_simple = first.chunk_rows == first.lane_rows
        return is_simple and all(tiling == first for tiling in others)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The lanes and rows of a leaf, or of a shard of it.

    Args:
      program: how large programs are.
      shape: of the array on this device.
      leaf_shape: shape of the leaf that it is a shard of.
      packed: widths of the packed fields, empty if nothing is packed.
      block_sizes: of blocks for which arrays have an element each.
    """

    program: ProgramSize
    shape: tuple[int, ...]
    leaf_shape: tuple[int, ...]
    packed: tuple[int, ...]
    block_sizes: tuple[int, ...]

    @functools.cached_property
    def is_flat(self) -> bool:
        """Whether nothing is packed or per block, and the shard is one piece of it."""
        is_plain = not self.packed and not self.block_sizes
        return is_plain and self.shape[1:] == self.leaf_shape[1:]

    @functools.cached_property
    def layout(self) -> Layout:
        """The leaf's layout."""
        return layout_of(self.leaf_shape)

    @property
    def size(self) -> int:
        """Elements of the array."""
        return math.prod(self.shape)

    @property
    def lead(self) -> int:
        """How many matrices of rows there are."""
        return math.prod(self.shape[: self.layout.row_axis])

    @property
    def rows(self) -> int:
        """Rows of one matrix."""
        length = self.shape[self.layout.row_axis]
        return math.ceil(length / FOLD) if self.layout.is_folded else length

    @functools.cached_property
    def row_stride(self) -> int:
        """Elements from one row to the next."""
        if self.is_flat:
            return self.program.flat_width
        if self.layout.is_folded:
            return FOLD
        return math.prod(self.shape[self.layout.row_axis + 1 :])

    @functools.cached_property
    def row_index_stride(self) -> int:
        """How far the indices of one row are from those of the next, modulo 2^32."""
        if self.is_flat or self.layout.is_folded:
            return self.row_stride
        return self.index_stride(self.layout.row_axis)

    def index_stride(self, axis: int) -> int:
        """The row-major stride of an axis in the leaf, modulo 2^32."""
        return math.prod(self.leaf_shape[axis + 1 :]) % 2**32

    @functools.cached_property
    def pieces(self) -> tuple[int, int]:
        """``(count, columns)``: a row is so many pieces of so many columns.

        It is one piece where tiles and blocks do not end within it.
        """
        if self.layout.is_folded:
            return 1, FOLD
        after = self.layout.row_axis + 1
        count, columns = math.prod(self.shape[after:-1]), self.shape[-1]
        is_whole = self.shape[after:] == self.leaf_shape[after:]
        if is_whole and columns % self.block_shape[1] == 0:
            return 1, count * columns
        return count, columns

    @property
    def block_size(self) -> int:
        """Elements of the largest blocks; of a tile if there are none."""
        return max(self.block_sizes, default=TILE_SIZE)

    @property
    def block_shape(self) -> tuple[int, int]:
        """Rows and columns of the largest blocks."""
        return block_shape(self.block_size)

    @property
    def tiles(self) -> int:
        """Tiles of the largest blocks."""
        return self.block_size // TILE_SIZE

    @property
    def blocks(self) -> int:
        """Largest blocks of one piece of a row."""
        return self.blocks_of(self.block_size)

    def blocks_of(self, block_size: int) -> int:
        """Blocks of a size of one piece of a row."""
        return math.ceil(self.pieces[1] / block_shape(block_size)[1])

    @functools.cached_property
    def width(self) -> int:
        """How many neighbouring lanes have neighbouring elements, aligned to as many.

        They exist together.
        """
        if self.is_flat:
            return TILE_COLUMNS if self.size % TILE_COLUMNS == 0 else 1
        if self.layout.is_folded and self.shape[-1] % TILE_COLUMNS:
            return 1
        return self.word_width

    @property
    def word_width(self) -> int:
        """The same for words."""
        lengths = self.row_stride, self.pieces[1]
        return 1 if any(length % TILE_COLUMNS for length in lengths) else TILE_COLUMNS

    @property
    def blocks_at_once(self) -> int:
        """Largest blocks of a program."""
        return self.program.lanes // self.tiles

    @property
    def programs(self) -> int:
        """Programs of the kernel."""
        if self.is_flat:
            return math.ceil(self.size / (self.row_stride * self.lane_rows))
        return math.ceil(self.all_blocks / self.blocks_at_once)

    @property
    def all_blocks(self) -> int:
        """The blocks at which lanes begin, of all pieces, steps and matrices."""
        return self.lead * self.steps * self.pieces[0] * self.blocks

    @property
    def step_rows(self) -> int:
        """Rows that a block's lanes go down: its own, or more if lanes are longer."""
        return max(self.lane_rows, self.block_shape[0])

    @property
    def steps(self) -> int:
        """How many times one matrix has so many rows, the last time perhaps fewer."""
        return math.ceil(self.rows / self.step_rows)

    @functools.cached_property
    def lane_rows(self) -> int:
        """Rows of a lane."""
        if self.is_flat:
            return self.program.flat_rows
        return math.lcm(TILE_ROWS, *(period(bits)[0] for bits in self.packed))

    @property
    def chunk_rows(self) -> int:
        """Rows that a loop's body unrolls; see :class:`.operands.Packed`."""
        return min(self.lane_rows, TILE_ROWS)

    def share(self, rows: int) -> int:
        """The shard's share of so many rows of the leaf's words or blocks."""
        axis = self.layout.row_axis
        return rows * self.shape[axis] // self.leaf_shape[axis]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a kernel is compiled for.

    Args:
      body, when, interpret: as of :class:`.spec.Call`.
      leaf: the first, without arrays; all have the same kinds of operands and results.
      tiling: of every leaf; of the longest, where sizes are given.
      sizes: elements of each leaf, where they differ.
      leaves: how many there are.
      given: whether the kernel gets the table's rows, the shards' bases, and the layer.
      table_width: scalars in a row of the table.
    """

    body: Body | BlockBody
    leaf: Leaf
    tiling: Tiling
    sizes: tuple[int, ...] | None
    leaves: int
    given: tuple[bool, ...]
    table_width: int
    when: int | None
    interpret: bool

    @property
    def first_array(self) -> int:
        """How many arguments are before the leaves' arrays."""
        return 1 + sum(self.given)

    @property
    def name(self) -> str:
        """As profilers show it."""
        return "fused_update" if self.leaves == 1 else "fused_update_many"

    @property
    def aliases(self) -> dict[int, int]:
        """Which argument each result overwrites, by their numbers."""
        reads, writes = len(self.leaf.operands), len(self.leaf.results)
        return {
            leaf * writes + i: self.first_array + leaf * reads + r.overwrites
            for leaf in range(self.leaves)
            for i, r in enumerate(self.leaf.results)
            if r.overwrites is not None
        }


def prepare(
    size: ProgramSize, call: Call
) -> tuple[Kernel, tuple[jax.ShapeDtypeStruct, ...], list[jax.Array]]:
    """The kernel of a call, what it writes, and its arguments.

    The arguments are what all leaves share, and then all arrays of each leaf. Arrays
    are flat; stacks are of flat layers.
    """
    shards, leaf = call.shards, call.shards[0].leaf
    # What is not given is not replaced by a constant: XLA would launch a kernel of its
    # own to write it.
    given = [call.rows, _bases(shards), call.layer]
    elements = tuple(math.prod(shard.shape) for shard in shards)
    kernel = Kernel(
        body=call.body,
        leaf=leaf.with_arrays([None] * len(leaf.operands)),
        tiling=size.common_tiling(shards),
        sizes=None if len(set(elements)) == 1 else elements,
        leaves=len(shards),
        given=tuple(x is not None for x in given),
        table_width=call.table.shape[-1],
        when=call.when,
        interpret=call.interpret,
    )
    arrays = [
        # A layer is indexed by itself: a stack may have more than 2^31 elements.
        x.reshape((x.shape[0], -1) if i in leaf.in_stacks else -1)
        for shard in shards
        for i, x in enumerate(shard.leaf.arrays)
    ]
    arguments = [*(x for x in given if x is not None), call.table.reshape(-1), *arrays]
    written = tuple(
        jax.ShapeDtypeStruct(
            (shape[0], math.prod(shape[1:]))
            if r.overwrites in leaf.in_stacks
            else (math.prod(shape),),
            r.dtype,
            manual_axis_type=manual_axes(r, shard.leaf.operands),
        )
        for shard in shards
        for r, shape in zip(leaf.results, result_shapes(shard), strict=True)
    )
    return kernel, written, arguments


def shaped(written: Sequence[jax.Array], shards: Sequence[Shard]) -> list[jax.Array]:
    """The same with the shapes that arrays of the leaves have."""
    shapes = [shape for shard in shards for shape in result_shapes(shard)]
    return [x.reshape(shape) for x, shape in zip(written, shapes, strict=True)]


def _bases(shards: Sequence[Shard]) -> jax.Array | None:
    """The indices of the shards' first elements; None if all are 0."""
    bases = [shard.base for shard in shards]
    if all(base is None for base in bases):
        return None
    return jnp.stack([jnp.uint32(0) if base is None else base for base in bases])
