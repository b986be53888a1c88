"""How a kernel walks over a leaf: lanes side by side, rows one after the other.

There are two tilings:

- *Flat*, for leaves of which nothing is packed: a row is consecutive in memory, and
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

from pallas_kernels.bitfields import period
from pallas_kernels.layout import (
    FOLD,
    TILE_COLUMNS,
    TILE_ROWS,
    TILE_SIZE,
    Layout,
    block_shape,
    layout_of,
    word_rows,
)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The lanes and rows of a leaf, or of a shard of it.

    Args:
      shape: of the array on this device.
      leaf_shape: shape of the leaf that it is a shard of.
      packed: widths of the packed fields, empty if nothing is packed.
      block_sizes: of the blocks that arrays have an element each for.
      flat_width, flat_rows: lanes and rows of a program of a flat tiling.
      lanes: of a program of the other tiling, each of them 4 columns wide.
    """

    shape: tuple[int, ...]
    leaf_shape: tuple[int, ...]
    packed: tuple[int, ...]
    block_sizes: tuple[int, ...]
    flat_width: int
    flat_rows: int
    lanes: int

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

    @property
    def row_stride(self) -> int:
        """Elements from one row to the next."""
        if self.layout.is_folded:
            return FOLD
        return math.prod(self.shape[self.layout.row_axis + 1 :])

    @property
    def lead_stride(self) -> int:
        """Elements from one matrix to the next."""
        return math.prod(self.shape[self.layout.row_axis :])

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
        """The same of words."""
        lengths = self.row_stride, self.pieces[1]
        return 1 if any(length % TILE_COLUMNS for length in lengths) else TILE_COLUMNS

    @property
    def blocks_at_once(self) -> int:
        """Largest blocks of a program."""
        return self.lanes // self.tiles

    @property
    def programs(self) -> int:
        """Programs of the kernel."""
        if self.is_flat:
            return math.ceil(self.size / (self.flat_width * self.flat_rows))
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
            return self.flat_rows
        return math.lcm(TILE_ROWS, *(period(bits)[0] for bits in self.packed))

    @property
    def chunk_rows(self) -> int:
        """Rows that a loop's body unrolls; see :mod:`.words`."""
        return min(self.lane_rows, TILE_ROWS)

    def word_rows(self, bits: int) -> int:
        """Rows of words of one matrix."""
        return self._share(word_rows(self.layout.rows, bits))

    def block_rows(self, block_size: int) -> int:
        """Rows of blocks of a size of one matrix."""
        return self._share(math.ceil(self.layout.rows / block_shape(block_size)[0]))

    def _share(self, of_leaf: int) -> int:
        axis = self.layout.row_axis
        return of_leaf * self.shape[axis] // self.leaf_shape[axis]

    def index_stride(self, axis: int) -> int:
        """The row-major stride of an axis in the leaf, modulo 2^32."""
        return math.prod(self.leaf_shape[axis + 1 :]) % 2**32
