"""The division of leaves into programs, lanes and rows, and their sizes and strides.

A kernel runs as *programs*, the instances of Pallas's grid. A program is a block of
threads with Triton, and a warpgroup with Mosaic GPU. A program's arrays have one
element per *lane*. Each lane processes several *rows*, one element per row. A *chunk*
is a group of rows that the kernel's code unrolls; if a program has several chunks, it
loops over them. There are two tilings:

- *Flat*, for leaves without packed fields and blocks: the lanes of a row are
  consecutive in memory.
- *By blocks*: a thread has 4 lanes, which are neighboring columns, and processes 8
  rows, or 16 or 32 if the bit offsets of fields repeat only then. It therefore has all
  words of its fields, at static bit offsets. It also has whole tiles of
  :mod:`pallas_kernels.layout`, so it can compute their maxima without other threads. It
  loads and stores 4 elements at once if the number of columns is a multiple of 4. The
  tiles of a block are in Z-order, so every smaller block is a run of tiles, and a leaf
  may have blocks of several sizes.

Offsets into arrays are int32, so an array must have fewer than 2^31 elements. The
*index* of an element is its row-major position in the leaf, modulo 2^32. In a shard, it
is the index of the shard's first element plus a distance computed with the leaf's
strides.

The sizes and strides of a leaf that its kernel needs are called *numbers* here. They
are constants if all leaves of a kernel have equal shapes. Leaves with different shapes
share a kernel that reads each leaf's numbers from a table. The text of such a kernel
does not depend on any shape, and XLA compiles kernels with equal texts once. For each
divisor, the table has a multiplier and a shift, so the kernel needs no division
instruction. Compilers use the same method to divide by constants.
"""

import dataclasses
import functools
import itertools
import math
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.fused_update.gpu.instructions import Instructions
from pallas_kernels.fused_update.spec import MAX_ELEMENTS_OF_SMALL_LEAF, Shard
from pallas_kernels.layout import (
    FOLD,
    TILE_COLUMNS,
    TILE_ROWS,
    TILE_SIZE,
    WORD,
    Layout,
    block_shape,
    layout_of,
    period,
    word_rows,
)

Scalar = jax.Array | np.int32


@dataclasses.dataclass(frozen=True)
class Number:
    """A size or stride. Divisors are from 1 to 2^31 - 1, other numbers below 2^32.

    Args:
      value: the size or stride.
      multiple: a common divisor of this number in all leaves of the kernel. It is
        static, so the compiler can use it.
      divides: whether kernels divide by the number.
    """

    value: int
    multiple: int = 1
    divides: bool = False

    @property
    def words(self) -> tuple[int, ...]:
        """The words that store the number in a table."""
        word = self.value // self.multiple
        return (word, *_reciprocal(self.value)) if self.divides else (word,)


def _reciprocal(by: int) -> tuple[int, int]:
    """Return ``(m, s)`` with ``x // by == (2 * x * m >> 32) >> s`` if 0 <= x < 2^31."""
    shift = (by - 1).bit_length()
    return -(-(2 ** (31 + shift)) // by), shift


@dataclasses.dataclass(frozen=True)
class Divisor:
    """A divisor of non-negative int32 arrays.

    Args:
      by: the divisor.
      reciprocal: uint32 scalars, see :func:`_reciprocal`; None to divide by ``by``.
      instructions: the launcher's instructions, which the reciprocal needs.
    """

    by: Scalar
    reciprocal: tuple[jax.Array, jax.Array] | None = None
    instructions: Instructions | None = None

    def divide(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the quotient and the remainder."""
        if not isinstance(self.by, jax.Array) and self.by == 1:
            return x, jnp.zeros_like(x)
        by = jnp.full_like(x, self.by)
        if self.reciprocal is None or self.instructions is None:
            return lax.div(x, by), lax.rem(x, by)
        multiplier, shift = (jnp.full_like(x, y, jnp.uint32) for y in self.reciprocal)
        twice = x.astype(jnp.uint32) << jnp.uint32(1)
        quotient = self.instructions.high_product(twice, multiplier) >> shift
        quotient = quotient.astype(jnp.int32)
        return quotient, x - quotient * by


class SizeNumbers(typing.NamedTuple):
    """The numbers for blocks of one size; see :class:`BlockNumbers`.

    Args:
      rows: number of rows of blocks in a matrix; None if the kernel does not need it.
      blocks: number of blocks in a piece of a row.
    """

    rows: typing.Any
    blocks: typing.Any


class BlockNumbers(typing.NamedTuple):
    """The numbers of a :class:`BlockTiling`, which defines steps and pieces.

    Each field is a :class:`Number` outside of kernels, and a scalar or a
    :class:`Divisor` in a kernel. Fields that a kernel does not need are None.

    Args:
      blocks: number of largest blocks in a piece of a row.
      all_blocks: number of largest blocks in the whole array; None if all programs have
        their full number of blocks.
      row_stride: distance between consecutive rows, in elements; None for a folded
        vector.
      pieces: number of pieces in a row; None if it is 1.
      columns: number of columns in a piece; None if no lane needs it.
      steps: number of steps in a matrix; None if all matrices count as one.
      lead_stride: distance between consecutive matrices, in elements; None if all
        matrices count as one.
      rows: number of rows in a matrix, or of elements in a folded vector; None if the
        last step has all its rows.
      word_rows: number of rows of words in a matrix, keyed by field width.
      by_size: :class:`SizeNumbers`, keyed by block size.
      row_index, lead_index, piece_index: the distances between the indices of
        consecutive rows, matrices and pieces, modulo 2^32; None if indices follow from
        offsets.
    """

    blocks: typing.Any
    all_blocks: typing.Any
    row_stride: typing.Any
    pieces: typing.Any
    columns: typing.Any
    steps: typing.Any
    lead_stride: typing.Any
    rows: typing.Any
    word_rows: dict[int, typing.Any]
    by_size: dict[int, SizeNumbers]
    row_index: typing.Any
    lead_index: typing.Any
    piece_index: typing.Any


Numbers = Number | Scalar | None | BlockNumbers
"""The numbers of a leaf. In a flat tiling, this is the number of elements in the array,
or None if every lane has an element."""


def constants(numbers: Numbers) -> Numbers:
    """Return the sizes and strides of equal leaves as constants, for fast divisions.

    Numbers of 2^31 or more, such as indices, are reinterpreted as int32.
    """

    def constant(number: Number) -> Scalar | Divisor:
        value = np.uint32(number.value).view(np.int32)
        return Divisor(value) if number.divides else value

    return jax.tree.map(constant, numbers)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table with the numbers of several leaves, in which a program finds its leaf.

    Args:
      entries: for each number of a leaf, a :class:`Number` with value 0 that describes
        how the table stores it.
      structure: the tree structure of a leaf's numbers.
      leaves: the number of leaves.
    """

    entries: tuple[Number, ...]
    structure: typing.Any
    leaves: int

    @classmethod
    def of(cls, numbers: Sequence[Numbers]) -> "Table":
        """Return a table for leaves whose numbers have the same tree structure."""
        first, structure = jax.tree.flatten(numbers[0])
        entries = tuple(dataclasses.replace(x, value=0) for x in first)
        return cls(entries, structure, len(numbers))

    @staticmethod
    def words(numbers: Sequence[Numbers], programs: Sequence[int]) -> jax.Array:
        """Return the uint32 words of the table.

        They are the index at which each leaf's programs end, followed by all numbers.
        """
        rows = [word for x in jax.tree.leaves(list(numbers)) for word in x.words]
        words = [*itertools.accumulate(programs), *rows]
        # Functions with custom_partitioning only support scalar constants, so XLA
        # concatenates them.
        return lax.concatenate([lax.full((1,), x, jnp.uint32) for x in words], 0)

    def find(self, ref, program: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return ``(leaf, program, exists)``, with the program's index in its leaf.

        Args:
          ref: reference to the words of the table.
          program: int32 scalar, the index of the program in the kernel.
        """
        ends = [ref[np.int32(i)].astype(jnp.int32) for i in range(self.leaves)]
        leaf, first = jnp.int32(0), jnp.int32(0)
        for end in ends[:-1]:
            is_beyond = program >= end
            leaf = leaf + is_beyond.astype(jnp.int32)
            first = jnp.where(is_beyond, end, first)
        return leaf, program - first, program < ends[-1]

    def read(self, ref, leaf: jax.Array, instructions: Instructions | None) -> Numbers:
        """Read the numbers of a leaf from the table."""
        width = sum(3 if entry.divides else 1 for entry in self.entries)
        first = np.int32(self.leaves) + leaf * np.int32(width)
        words = (ref[first + np.int32(i)] for i in range(width))
        found = []
        for entry in self.entries:
            value = next(words).astype(jnp.int32) * np.int32(entry.multiple)
            if entry.divides:
                value = Divisor(value, (next(words), next(words)), instructions)
            found.append(value)
        return jax.tree.unflatten(self.structure, found)


@dataclasses.dataclass(frozen=True)
class ProgramSize:
    """The size of a launcher's programs.

    Args:
      flat_width, flat_rows: number of lanes and of rows in flat tilings.
      small_width: number of lanes in flat tilings of small leaves that share a kernel;
        these tilings have one row.
      lanes: number of groups of 4 lanes, each as wide as a tile, in tilings by blocks.
      cost_of_two: compile time of a load or store if a leaf has blocks of two sizes,
        relative to a leaf with blocks of one size.
      aligned: the largest alignment to use in flat tilings, in elements.
    """

    flat_width: int
    flat_rows: int
    small_width: int
    lanes: int
    cost_of_two: int = 1
    aligned: int = TILE_COLUMNS

    def tiling(self, shard: Shard) -> "Tiling":
        """Return the tiling of a shard."""
        leaf, shape = shard.leaf, shard.shape
        if not leaf.has_words_or_blocks and shape[1:] == leaf.shape[1:]:
            return FlatTiling(self, shape)
        return BlockTiling(self, shape, leaf.shape, leaf.packed, leaf.block_sizes)


@dataclasses.dataclass(frozen=True)
class FlatTiling:
    """The tiling of a contiguous leaf or shard without packed fields and blocks.

    Args:
      program: the size of programs.
      shape: shape of the array on this device.
    """

    program: ProgramSize
    shape: tuple[int, ...]
    # A flat tiling has no blocks, and no loop over chunks.
    chunks: typing.ClassVar[int] = 1
    tiles: typing.ClassVar[int] = 1

    @property
    def size(self) -> int:
        """The number of elements in the array."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """The size of aligned groups of lanes whose elements are neighbors.

        Either all lanes of a group exist, or none.
        """
        return math.gcd(self.program.aligned, self.size)

    @property
    def row_stride(self) -> int:
        """The distance between consecutive rows, in elements."""
        return self.program.flat_width

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The shape of an array with an element for each lane of a program."""
        return (self.program.flat_width,)

    @property
    def chunk_rows(self) -> int:
        """The number of rows in a program, which has one chunk."""
        return self.program.flat_rows

    @property
    def program_size(self) -> int:
        return self.row_stride * self.chunk_rows

    @property
    def programs(self) -> int:
        """The number of programs for the leaf."""
        return math.ceil(self.size / self.program_size)

    @property
    def is_small(self) -> bool:
        """Whether launching a kernel for the leaf takes longer than its update."""
        return self.size <= MAX_ELEMENTS_OF_SMALL_LEAF

    @property
    def is_below_2_30(self) -> bool:
        """Whether every offset of an element is below 2^30."""
        return self.size <= 2**30

    def numbers(self, are_equal: bool) -> Number | None:
        """Return the number of elements, or None if every lane has an element.

        Args:
          are_equal: whether all leaves of the kernel have this tiling.
        """
        if are_equal and self.size % self.program_size == 0:
            return None
        return Number(self.size, self.width)


@dataclasses.dataclass(frozen=True)
class BlockTiling:
    """The tiling of a leaf with words or blocks, or of a shard that is not contiguous.

    The axes before the rows enumerate *matrices*. Each matrix is divided into *steps*
    of :attr:`step_rows` rows. Each row is divided into *pieces*, which consist of the
    largest blocks, or of tiles if there are no blocks. A program updates
    :attr:`blocks_at_once` of these blocks.

    Args:
      program: the size of programs.
      shape: shape of the array on this device.
      leaf_shape: shape of the whole leaf.
      packed: widths of the packed fields; empty if no array is packed.
      block_sizes: the block sizes of the arrays with one element per block.
    """

    program: ProgramSize
    shape: tuple[int, ...]
    leaf_shape: tuple[int, ...]
    packed: tuple[int, ...]
    block_sizes: tuple[int, ...]
    chunk_rows: typing.ClassVar[int] = TILE_ROWS
    is_small: typing.ClassVar[bool] = False

    @functools.cached_property
    def layout(self) -> Layout:
        """The leaf's layout."""
        return layout_of(self.leaf_shape)

    @functools.cached_property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape on this device, with a folded axis split into rows and columns."""
        return Layout(self.shape, self.layout.axis).matrix_shape

    @property
    def lead(self) -> int:
        """The number of matrices."""
        return math.prod(self.shape[: self.layout.row_axis])

    @property
    def rows(self) -> int:
        """The number of rows in a matrix."""
        return self.matrix_shape[self.layout.row_axis]

    @functools.cached_property
    def row_stride(self) -> int:
        """The distance between consecutive rows, in elements."""
        return math.prod(self.matrix_shape[self.layout.row_axis + 1 :])

    def index_stride(self, axis: int) -> int:
        """Return the row-major stride of an axis in the leaf, modulo 2^32."""
        return math.prod(self.leaf_shape[axis + 1 :]) % 2**32

    @functools.cached_property
    def pieces(self) -> tuple[int, int]:
        """``(count, columns)``: the numbers of pieces in a row and columns in a piece.

        A row is one piece if no tile or block crosses the end of the leaf's last axis.
        """
        after = self.layout.row_axis + 1
        *between, columns = self.matrix_shape[after:]
        count = math.prod(between)
        is_whole = self.shape[after:] == self.leaf_shape[after:]
        if is_whole and columns % self.block_shape[1] == 0:
            return 1, count * columns
        return count, columns

    @property
    def block_size(self) -> int:
        """The size of the largest blocks, or of a tile if there are no blocks."""
        return max(self.block_sizes, default=TILE_SIZE)

    @property
    def block_shape(self) -> tuple[int, int]:
        """The number of rows and columns in a largest block."""
        return block_shape(self.block_size)

    @property
    def tiles(self) -> int:
        """The number of tiles in a largest block."""
        return self.block_size // TILE_SIZE

    @property
    def blocks(self) -> int:
        """The number of largest blocks in a piece of a row."""
        return self.blocks_of(self.block_size)

    def blocks_of(self, block_size: int) -> int:
        """Return the number of blocks of this size in a piece of a row."""
        return math.ceil(self.pieces[1] / block_shape(block_size)[1])

    @functools.cached_property
    def width(self) -> int:
        """The size of aligned groups of neighboring lanes; see :class:`FlatTiling`."""
        if self.layout.is_folded and self.shape[-1] % TILE_COLUMNS:
            return 1
        return self.word_width

    @property
    def word_width(self) -> int:
        """Like :attr:`width`, for the words of packed fields."""
        lengths = self.row_stride, self.pieces[1]
        return 1 if any(length % TILE_COLUMNS for length in lengths) else TILE_COLUMNS

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The shape of an array with an element for each lane of a program."""
        return self.program.lanes, TILE_COLUMNS

    @property
    def blocks_at_once(self) -> int:
        """The number of largest blocks in a program."""
        return self.program.lanes // self.tiles

    @property
    def programs(self) -> int:
        """The number of programs for the leaf."""
        return math.ceil(self.all_blocks / self.blocks_at_once)

    @property
    def all_blocks(self) -> int:
        """The number of largest blocks in all pieces, steps and matrices."""
        return self.lead * self.steps * self.pieces[0] * self.blocks

    @functools.cached_property
    def lane_rows(self) -> int:
        """The number of rows that a lane processes."""
        return math.lcm(TILE_ROWS, *(period(bits)[0] for bits in self.packed))

    @property
    def chunks(self) -> int:
        """The number of chunks in a lane; see :class:`.program.Packed`.

        Leaves with several chunks do not share kernels, because each iteration of the
        loop over chunks would branch.
        """
        return self.lane_rows // self.chunk_rows

    @property
    def step_rows(self) -> int:
        """The number of rows in a lane or a largest block, whichever has more rows."""
        return max(self.lane_rows, self.block_shape[0])

    @property
    def steps(self) -> int:
        """The number of steps in a matrix. The last step may have fewer rows."""
        return math.ceil(self.rows / self.step_rows)

    def word_rows(self, bits: int) -> int:
        """Return the number of rows of words in a matrix."""
        return self._share(word_rows(self.layout.rows, bits))

    def block_rows(self, block_size: int) -> int:
        """Return the number of rows of blocks in a matrix."""
        return self._share(math.ceil(self.layout.rows / block_shape(block_size)[0]))

    def _share(self, rows: int) -> int:
        """Return the shard's share of the leaf's rows of words or blocks."""
        axis = self.layout.row_axis
        return rows * self.shape[axis] // self.leaf_shape[axis]

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether indices and offsets in plain arrays differ only by a constant.

        It is False for several chunks, because a loop that increments both the index
        and the offset needs fewer registers.
        """
        return self.chunks == 1 and self.shape[1:] == self.leaf_shape[1:]

    @functools.cached_property
    def is_one_matrix(self) -> bool:
        """Whether all matrices are treated as one matrix, one below the other."""
        if self.cuts_rows or self.chunks > 1:
            # Dividing by the number of steps gives a bounded remainder. The bounds let
            # masks and loops use fewer registers.
            return False
        if self.lead == 1:
            return True
        cuts = (
            *map(self.cuts_words, self.packed),
            *map(self.cuts_block_rows, self.block_sizes),
        )
        return self.is_whole and not any(cuts)

    @functools.cached_property
    def cuts_rows(self) -> bool:
        """Whether the last step lacks rows."""
        if self.layout.is_folded:
            return self.shape[-1] % (FOLD * self.step_rows) > 0
        return self.rows % self.step_rows > 0

    def cuts_words(self, bits: int) -> bool:
        """Return whether the last step lacks rows of words."""
        rows = self.steps * self.step_rows
        return rows * bits != self.word_rows(bits) * WORD

    def cuts_block_rows(self, block_size: int) -> bool:
        """Return whether the last step lacks rows of blocks."""
        rows = self.steps * self.step_rows
        return rows != self.block_rows(block_size) * block_shape(block_size)[0]

    def cuts_blocks(self, block_size: int) -> bool:
        """Return whether a row's last largest block lacks blocks of this size."""
        wide = self.blocks * self.block_shape[1]
        return self.blocks_of(block_size) * block_shape(block_size)[1] != wide

    @property
    def cuts_columns(self) -> bool:
        """Whether the last block in a row lacks columns."""
        return self.blocks * self.block_shape[1] != self.pieces[1]

    @functools.cached_property
    def is_below_2_30(self) -> bool:
        """Whether every offset of an element is below 2^30."""
        rows = max([self.rows, *map(self.word_rows, self.packed)])
        return self.lead * rows * self.row_stride <= 2**30

    @functools.cached_property
    def has_linear_index(self) -> bool:
        """Whether matrices, and pieces of a row, are evenly spaced in the leaf."""
        row_axis = self.layout.row_axis
        within = (*range(1, row_axis), *range(row_axis + 2, len(self.shape) - 1))
        return all(self.shape[axis] == self.leaf_shape[axis] for axis in within)

    def numbers(self, are_equal: bool) -> BlockNumbers:
        """Return the sizes and strides that lanes need.

        Args:
          are_equal: whether all leaves of the kernel have this tiling.
        """
        is_folded, row_axis = self.layout.is_folded, self.layout.row_axis
        count, columns = self.pieces
        are_full = are_equal and self.all_blocks % self.blocks_at_once == 0
        has_matrices, has_pieces = not self.is_one_matrix, count > 1
        has_index = not self.is_whole
        row_index = FOLD if is_folded else self.index_stride(row_axis)

        def number(is_counted: bool, value: int, multiple: int = 1, **options):
            return Number(value, multiple, **options) if is_counted else None

        return BlockNumbers(
            blocks=Number(self.blocks, divides=True),
            all_blocks=number(not are_full, self.all_blocks),
            row_stride=number(not is_folded, self.row_stride, self.word_width),
            pieces=number(has_pieces, count, divides=True),
            columns=number(has_pieces or self.cuts_columns, columns, self.word_width),
            steps=number(has_matrices, self.steps, divides=True),
            lead_stride=number(
                has_matrices, math.prod(self.shape[row_axis:]), self.width
            ),
            rows=number(self.cuts_rows, self.shape[-1] if is_folded else self.rows),
            word_rows={
                bits: number(
                    has_matrices or self.cuts_words(bits), self.word_rows(bits)
                )
                for bits in self.packed
            },
            by_size={
                size: SizeNumbers(
                    number(
                        has_matrices or self.cuts_block_rows(size),
                        self.block_rows(size),
                    ),
                    Number(self.blocks_of(size)),
                )
                for size in self.block_sizes
            },
            row_index=number(has_index, row_index),
            lead_index=number(
                has_index and has_matrices, self.index_stride(row_axis - 1)
            ),
            piece_index=number(
                has_index and has_pieces, self.index_stride(len(self.shape) - 2)
            ),
        )


Tiling = FlatTiling | BlockTiling
