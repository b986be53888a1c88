"""How leaves are divided into programs, lanes and rows (defined in :mod:`.kernel`)."""

import dataclasses
import functools
import math
import typing

from pallas_kernels.fused_update.gpu.numbers import (
    BlockNumbers,
    FlatNumbers,
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
      flat_width, flat_rows: lanes and rows in flat tilings.
      small_width: lanes in flat tilings of small leaves that share a kernel; these have
        one row.
      lanes: groups of 4 lanes in tilings by blocks; each group is one tile wide.
      cost_of_two: compile time of a load or store for blocks of two sizes, relative to
        blocks of one size.
      aligned: the largest alignment of a flat leaf, in elements.
    """

    flat_width: int
    flat_rows: int
    small_width: int
    lanes: int
    cost_of_two: int = 1
    aligned: int = TILE_COLUMNS

    def tiling(self, shard: Shard) -> "Tiling":
        """The tiling of a leaf's shard."""
        leaf, shape = shard.leaf, shard.shape
        if not leaf.has_words_or_blocks and shape[1:] == leaf.shape[1:]:
            return FlatTiling(self, shape)
        return BlockTiling(self, shape, leaf.shape, leaf.packed, leaf.block_sizes)


@dataclasses.dataclass(frozen=True)
class FlatTiling:
    """The tiling of a leaf, or of a shard contiguous in it, without words and blocks.

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
        """Elements of the array."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """The number of neighbouring lanes with neighbouring elements, aligned to it.

        Either all of these lanes exist, or none.
        """
        return math.gcd(self.program.aligned, self.size)

    @property
    def row_stride(self) -> int:
        """Elements from one row to the next."""
        return self.program.flat_width

    @property
    def chunk_rows(self) -> int:
        """Rows of a program, which are one chunk."""
        return self.program.flat_rows

    @property
    def program_size(self) -> int:
        return self.row_stride * self.chunk_rows

    @property
    def programs(self) -> int:
        """Programs of the leaf."""
        return math.ceil(self.size / self.program_size)

    @property
    def is_small(self) -> bool:
        """Whether launching a kernel for the leaf takes longer than its update."""
        return self.size <= MAX_ELEMENTS_OF_SMALL_LEAF

    @property
    def is_below_2_30(self) -> bool:
        """Whether every offset of an element is below 2^30."""
        return self.size <= 2**30

    def numbers(self, are_equal: bool) -> FlatNumbers:
        """The numbers of the shape that lanes need.

        Args:
          are_equal: whether all leaves of the kernel have this tiling.
        """
        if are_equal and self.size % self.program_size == 0:
            return FlatNumbers(None)
        return FlatNumbers(Number(self.size, self.width))


@dataclasses.dataclass(frozen=True)
class BlockTiling:
    """The tiling of a leaf with words or blocks, or of a shard that is not contiguous.

    The axes before the rows enumerate *matrices*. Each matrix is divided into *steps*
    of :attr:`step_rows` rows, and its rows into *pieces*, which consist of the largest
    blocks (tiles if nothing is per block). A program has :attr:`blocks_at_once` of
    these blocks.

    Args:
      program: the size of programs.
      shape: shape of the array on this device.
      leaf_shape: shape of the whole leaf.
      packed: widths of the packed fields, empty if nothing is packed.
      block_sizes: sizes of the blocks for which arrays have one element each.
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

    @property
    def lead(self) -> int:
        """The number of matrices."""
        return math.prod(self.shape[: self.layout.row_axis])

    @property
    def rows(self) -> int:
        """Rows of one matrix."""
        length = self.shape[self.layout.row_axis]
        return math.ceil(length / FOLD) if self.layout.is_folded else length

    @functools.cached_property
    def row_stride(self) -> int:
        """Elements from one row to the next."""
        if self.layout.is_folded:
            return FOLD
        return math.prod(self.shape[self.layout.row_axis + 1 :])

    def index_stride(self, axis: int) -> int:
        """The row-major stride of an axis in the leaf, modulo 2^32."""
        return math.prod(self.leaf_shape[axis + 1 :]) % 2**32

    @functools.cached_property
    def pieces(self) -> tuple[int, int]:
        """``(count, columns)``: the pieces of a row, and the columns of a piece.

        Rows are one piece if no tile or block crosses the end of the leaf's last axis.
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
        """Elements of the largest blocks, or of a tile if there are none."""
        return max(self.block_sizes, default=TILE_SIZE)

    @property
    def block_shape(self) -> tuple[int, int]:
        """Rows and columns of the largest blocks."""
        return block_shape(self.block_size)

    @property
    def tiles(self) -> int:
        """Tiles in one of the largest blocks."""
        return self.block_size // TILE_SIZE

    @property
    def blocks(self) -> int:
        """Largest blocks in one piece of a row."""
        return self.blocks_of(self.block_size)

    def blocks_of(self, block_size: int) -> int:
        """Blocks of this size in one piece of a row."""
        return math.ceil(self.pieces[1] / block_shape(block_size)[1])

    @functools.cached_property
    def width(self) -> int:
        """The number of neighbouring lanes with neighbouring elements, aligned to it.

        Either all of these lanes exist, or none.
        """
        if self.layout.is_folded and self.shape[-1] % TILE_COLUMNS:
            return 1
        return self.word_width

    @property
    def word_width(self) -> int:
        """The same number for words; see :attr:`width`."""
        lengths = self.row_stride, self.pieces[1]
        return 1 if any(length % TILE_COLUMNS for length in lengths) else TILE_COLUMNS

    @property
    def blocks_at_once(self) -> int:
        """Largest blocks in one program."""
        return self.program.lanes // self.tiles

    @property
    def programs(self) -> int:
        """Programs of the leaf."""
        return math.ceil(self.all_blocks / self.blocks_at_once)

    @property
    def all_blocks(self) -> int:
        """Largest blocks in all pieces, steps and matrices."""
        return self.lead * self.steps * self.pieces[0] * self.blocks

    @functools.cached_property
    def lane_rows(self) -> int:
        """Rows of a lane."""
        return math.lcm(TILE_ROWS, *(period(bits)[0] for bits in self.packed))

    @property
    def chunks(self) -> int:
        """The chunks of a lane's rows; if there are several, a loop updates them.

        See :class:`.operands.Packed`. Leaves with several chunks do not share kernels,
        because each iteration of the loop would branch.
        """
        return self.lane_rows // self.chunk_rows

    @property
    def step_rows(self) -> int:
        """Rows of a step: the rows of a lane, or of a largest block if it is higher."""
        return max(self.lane_rows, self.block_shape[0])

    @property
    def steps(self) -> int:
        """The number of steps in one matrix; the last may have fewer rows."""
        return math.ceil(self.rows / self.step_rows)

    def word_rows(self, bits: int) -> int:
        """Rows of words in one matrix."""
        return self._share(word_rows(self.layout.rows, bits))

    def block_rows(self, block_size: int) -> int:
        """Rows of blocks in one matrix."""
        return self._share(math.ceil(self.layout.rows / block_shape(block_size)[0]))

    def _share(self, rows: int) -> int:
        """The shard's share of the leaf's rows of words or blocks."""
        axis = self.layout.row_axis
        return rows * self.shape[axis] // self.leaf_shape[axis]

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether indices differ from offsets in plain arrays only by a constant.

        False for several chunks: a loop needs fewer registers if it counts both.
        """
        return self.chunks == 1 and self.shape[1:] == self.leaf_shape[1:]

    @functools.cached_property
    def is_one_matrix(self) -> bool:
        """Whether its matrices, one below the other, count as one matrix."""
        if self.cuts_rows or self.chunks > 1:
            # The remainder of a division by the number of steps has bounds, with which
            # masks and loops need fewer registers.
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
        """Whether the last step lacks rows of words."""
        rows = self.steps * self.step_rows
        return rows * bits != self.word_rows(bits) * WORD

    def cuts_block_rows(self, block_size: int) -> bool:
        """Whether the last step lacks rows of blocks."""
        rows = self.steps * self.step_rows
        return rows != self.block_rows(block_size) * block_shape(block_size)[0]

    def cuts_blocks(self, block_size: int) -> bool:
        """Whether the last of the largest blocks in a row lacks blocks of this size."""
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
        """The numbers of the shape that lanes need.

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
