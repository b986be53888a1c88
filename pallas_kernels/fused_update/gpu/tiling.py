"""The division of leaves into programs, lanes and rows, defined in :mod:`.kernel`."""

import dataclasses
import functools
import math
import typing

from pallas_kernels.fused_update.gpu.numbers import (
    BlockNumbers,
    Number,
    SizeNumbers,
)
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
        """The number of chunks in a lane; see :class:`.operands.Packed`.

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
