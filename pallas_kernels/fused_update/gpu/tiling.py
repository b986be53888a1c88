"""How leaves are divided into programs, lanes and rows, and counted."""

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
    """How large a launcher's programs are.

    Args:
      flat_width, flat_rows: lanes and rows of those of flat tilings.
      small_width: lanes where leaves differ in size; there is one row.
      lanes: of the others, each of them 4 columns wide.
      cost_of_two: how many times as long a load or a store takes to compile where
        blocks are of two sizes.
      aligned: how many elements of a flat leaf are aligned at most.
    """

    flat_width: int
    flat_rows: int
    small_width: int
    lanes: int
    cost_of_two: int = 1
    aligned: int = TILE_COLUMNS

    def tiling(self, shard: Shard) -> "Tiling":
        """The tiling of a leaf's part."""
        leaf, shape = shard.leaf, shard.shape
        if not leaf.has_words_or_blocks and shape[1:] == leaf.shape[1:]:
            return FlatTiling(self, shape)
        return BlockTiling(self, shape, leaf.shape, leaf.packed, leaf.block_sizes)


@dataclasses.dataclass(frozen=True)
class FlatTiling:
    """The lanes and rows of a leaf, or of one piece of it, without words and blocks.

    Args:
      program: how large programs are.
      shape: of the array on this device.
    """

    program: ProgramSize
    shape: tuple[int, ...]
    # It has no blocks, and so none of several tiles.
    chunks: typing.ClassVar[int] = 1
    tiles: typing.ClassVar[int] = 1

    @property
    def size(self) -> int:
        """Elements of the array."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """How many neighbouring lanes have neighbouring elements, aligned to as many.

        They exist together.
        """
        return math.gcd(self.program.aligned, self.size)

    @property
    def row_stride(self) -> int:
        """Elements from one row to the next."""
        return self.program.flat_width

    @property
    def chunk_rows(self) -> int:
        """Rows of a lane, which are one chunk."""
        return self.program.flat_rows

    @property
    def program_size(self) -> int:
        """Elements of a program."""
        return self.row_stride * self.chunk_rows

    @property
    def programs(self) -> int:
        """Programs of the kernel."""
        return math.ceil(self.size / self.program_size)

    @property
    def is_small(self) -> bool:
        """Whether launching its kernel takes longer than the update."""
        return self.size <= MAX_ELEMENTS_OF_SMALL_LEAF

    @property
    def is_below_2_30(self) -> bool:
        """Whether every offset of an element is below 2^30."""
        return self.size <= 2**30

    def numbers(self, are_equal: bool) -> FlatNumbers:
        """The numbers of the shape that lanes count by.

        Args:
          are_equal: whether all leaves of the kernel have this tiling.
        """
        if are_equal and self.size % self.program_size == 0:
            return FlatNumbers(None)
        return FlatNumbers(Number(self.size, self.width))


@dataclasses.dataclass(frozen=True)
class BlockTiling:
    """The lanes and rows of a leaf with words or blocks, or of a shard of any leaf.

    Lanes begin at the largest blocks. Where nothing is per block, tiles are the blocks.

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
    chunk_rows: typing.ClassVar[int] = TILE_ROWS
    is_small: typing.ClassVar[bool] = False

    @functools.cached_property
    def layout(self) -> Layout:
        """The leaf's layout."""
        return layout_of(self.leaf_shape)

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
        if self.layout.is_folded:
            return FOLD
        return math.prod(self.shape[self.layout.row_axis + 1 :])

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
        return math.ceil(self.all_blocks / self.blocks_at_once)

    @property
    def all_blocks(self) -> int:
        """The blocks at which lanes begin, of all pieces, steps and matrices."""
        return self.lead * self.steps * self.pieces[0] * self.blocks

    @functools.cached_property
    def lane_rows(self) -> int:
        """Rows of a lane."""
        return math.lcm(TILE_ROWS, *(period(bits)[0] for bits in self.packed))

    @property
    def chunks(self) -> int:
        """Chunks of a lane's rows, over which a loop goes if there are several.

        See :class:`.operands.Packed`. Each step of the loop would branch where leaves
        share a kernel.
        """
        return self.lane_rows // self.chunk_rows

    @property
    def step_rows(self) -> int:
        """Rows that a block's lanes go down: its own, or more if lanes are longer."""
        return max(self.lane_rows, self.block_shape[0])

    @property
    def steps(self) -> int:
        """How many times one matrix has so many rows, the last time perhaps fewer."""
        return math.ceil(self.rows / self.step_rows)

    def word_rows(self, bits: int) -> int:
        """Rows of words of one matrix."""
        return self._share(word_rows(self.layout.rows, bits))

    def block_rows(self, block_size: int) -> int:
        """Rows of blocks of one matrix."""
        return self._share(math.ceil(self.layout.rows / block_shape(block_size)[0]))

    def _share(self, rows: int) -> int:
        """The shard's share of so many rows of the leaf's words or blocks."""
        axis = self.layout.row_axis
        return rows * self.shape[axis] // self.leaf_shape[axis]

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether indices, from the first element's, are offsets in plain arrays.

        Loops count both: that takes fewer registers.
        """
        return self.chunks == 1 and self.shape[1:] == self.leaf_shape[1:]

    @functools.cached_property
    def is_one_matrix(self) -> bool:
        """Whether its matrices, one below the other, are one for words and blocks."""
        if self.cuts_rows or self.chunks > 1:
            # A remainder has bounds, by which masks and loops take fewer registers.
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
        """Whether rows are missing in the last step."""
        if self.layout.is_folded:
            return self.shape[-1] % (FOLD * self.step_rows) > 0
        return self.rows % self.step_rows > 0

    def cuts_words(self, bits: int) -> bool:
        """Whether rows of words are missing in the last step."""
        rows = self.steps * self.step_rows
        return rows * bits != self.word_rows(bits) * WORD

    def cuts_block_rows(self, block_size: int) -> bool:
        """Whether rows of blocks are missing in the last step."""
        rows = self.steps * self.step_rows
        return rows != self.block_rows(block_size) * block_shape(block_size)[0]

    def cuts_blocks(self, block_size: int) -> bool:
        """Whether such blocks are missing in the last of the largest ones of a row."""
        wide = self.blocks * self.block_shape[1]
        return self.blocks_of(block_size) * block_shape(block_size)[1] != wide

    @property
    def cuts_columns(self) -> bool:
        """Whether columns are missing in the last block of a row."""
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
        """The numbers of the shape that lanes count by.

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
