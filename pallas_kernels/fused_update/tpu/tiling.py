"""Divide a leaf among the programs of a TPU kernel, and into registers.

A leaf is viewed as matrices of rows and columns. A program updates a block of rows and
128 columns. A register has 8 sublanes of 128 lanes. A *group* is a number of rows after
which the bit offsets of fields repeat, for most widths. The program loops over *units*
of its block, and uses one register for each row of a group. The fields of one word are
in different registers, in the sublane and lane of the word. A unit is one of two kinds:

- 8 groups of one matrix. A register contains one row of each of 8 neighboring groups.
- One group of 8 matrices *side by side*, if XLA:TPU stores the axis between rows and
  columns, such as heads or layers, in the sublanes of its tiles. A register contains
  one row of 8 matrices, and a block has 8 or more matrices.

A folded vector is one matrix of 128 columns. In a register, its rows of 32 columns come
from 4 groups. In memory, 4 rows of the same group follow each other, so the quarters of
registers are exchanged; see :func:`.blocks.exchanged`.
"""

import dataclasses
import itertools
import math

from pallas_kernels.fused_update.spec import Leaf, Operand, Result, Shard
from pallas_kernels.layout import FOLD, block_shape, is_unrolled, period

LANES, SUBLANES = 128, 8
REGISTER = (SUBLANES, LANES)
"""The shape of a vector register of 32-bit values."""
_MIN_GROUP, _MAX_GROUP = 4, 8
_MAX_PERIOD = 16
"""Fields with a longer period do not affect the number of rows in a group."""
# Bytes of all blocks of a program, counted twice because the next blocks are loaded
# at the same time.
_MAX_BYTES, _MAX_TRANSPOSED_BYTES = 14 * 2**20, 32 * 2**20
_MAX_ROWS, _MIN_ROWS = 2048, 128
_MAX_UNROLLED = 64
"""Maximum number of an array's registers in an iteration; more compile slowly."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The division of a leaf or a shard among programs.

    Args:
      shape: shape of the shard.
      whole: shape of the leaf, which determines the row-major indices of elements.
      axis: axis of the rows, counted from the end.
      group: number of rows in a group.
      row_unit: number of rows that consist of whole words and blocks.
      column_unit: number of columns that consist of whole blocks.
      block_rows: number of rows of each matrix that a program updates.
      stacked_blocks: number of blocks in a group, along the rows.
      side_by_side: number of matrices side by side in a program; None for one matrix.
      is_merged: whether all axes after the rows are the columns of one matrix.
    """

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    axis: int
    group: int
    row_unit: int
    column_unit: int
    block_rows: int
    stacked_blocks: int = 1
    side_by_side: int | None = None
    is_merged: bool = False

    @property
    def is_folded(self) -> bool:
        """Whether the last axis is folded into rows."""
        return self.axis == -1

    @property
    def matrix_axes(self) -> tuple[int, ...]:
        """The axes along which the leaf has several matrices, counted from the end."""
        if self.is_merged:
            return tuple(range(-len(self.shape), self.axis))
        between = range(self.axis + 1, -1 if self.side_by_side is None else -2)
        return (*range(-len(self.shape), self.axis), *between)

    @property
    def matrices(self) -> int:
        """Number of matrices, without the axis of matrices side by side."""
        return math.prod(self.shape[axis] for axis in self.matrix_axes)

    @property
    def rows(self) -> int:
        """Number of rows of a matrix."""
        if self.is_folded:
            return math.ceil(self.shape[-1] / (LANES * self.group)) * self.group
        return self.shape[self.axis]

    @property
    def columns(self) -> int:
        """Number of columns of a matrix."""
        if self.is_folded:
            return LANES
        return _columns(self.shape, self.axis, self.is_merged)

    @property
    def row_stride(self) -> int:
        """Difference between the indices of neighboring rows of a group."""
        return FOLD if self.is_folded else math.prod(self.whole[self.axis + 1 :])

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """Number of matrices, and of blocks of adjacent matrices, rows and columns."""
        blocks = 1
        if self.side_by_side is not None:
            blocks = self.shape[-2] // self.side_by_side
        rows = math.ceil(self.rows / self.block_rows)
        return self.matrices, blocks, rows, math.ceil(self.columns / LANES)

    @property
    def registers(self) -> int:
        """Number of registers for a row of matrices side by side; 1 for one matrix."""
        return (self.side_by_side or SUBLANES) // SUBLANES

    @property
    def unit_rows(self) -> int:
        """Number of rows of a matrix in a unit."""
        return self.group * (SUBLANES if self.side_by_side is None else 1)

    @property
    def units(self) -> int:
        """Number of units of a program."""
        return self.block_rows // self.unit_rows * self.registers

    @property
    def unroll(self) -> int:
        """Number of units in an iteration of the loop."""
        return math.gcd(self.units, max(_MAX_UNROLLED // self.group, 1))

    @property
    def is_even(self) -> bool:
        """Whether the edges of the matrix cut no word and no block."""
        if self.is_folded:
            return self.shape[-1] % (LANES * self.group) == 0
        return not (self.rows % self.row_unit or self.columns % self.column_unit)

    def block_in_registers(self, block_size: int) -> tuple[int, int]:
        """Return how many sublanes and lanes of a register belong to one block."""
        height, width = block_shape(block_size)
        return max(height // self.group, 1), width


def tiling_of(shard: Shard) -> Tiling:
    """Return the tiling of a shard.

    A program processes whole periods of words and whole blocks of scales, and as many
    rows as fit into memory. If words are stored transposed, it processes whole tiles.
    """
    leaf, axis = shard.leaf, _row_axis(shard.leaf, shard.shape)
    heights, widths = zip((1, 1), *map(block_shape, leaf.block_sizes), strict=True)
    periods = [period(bits)[0] for bits in leaf.packed]
    aside = _side_by_side(leaf, shard.shape)
    group, stacked_blocks = _group(leaf, has_sublanes=aside is None and axis != -1)
    both = (*leaf.operands, *leaf.results)
    max_rows, limit = _MAX_ROWS // (aside or 1), _MAX_BYTES
    bytes_of_both = sum(_bytes_of(like, aside is not None) for like in both)
    bytes_per_row = 2 * LANES * (aside or 1) * bytes_of_both
    if aside is not None:
        unit = math.lcm(group, *periods)
    else:
        # A register covers 8 groups and 8 periods, and one or more blocks.
        unit = max(_MIN_ROWS, *(SUBLANES * rows for rows in (*heights, *periods)))
        unit *= max(widths) if axis == -1 else 1
        # Transposed words are processed in whole tiles if these fit into memory.
        tile_rows = LANES * max(periods, default=1)
        tile_bytes = tile_rows * bytes_per_row
        is_transposed = axis != -1 and lies_transposed(shard.shape, axis)
        if is_transposed and tile_bytes <= _MAX_TRANSPOSED_BYTES:
            max_rows, limit = max(max_rows, tile_rows), max(limit, tile_bytes)
    rows = unit
    while 2 * rows <= max_rows and 2 * rows * bytes_per_row <= limit:
        rows *= 2
    tiling = Tiling(
        shape=shard.shape,
        whole=leaf.shape,
        axis=axis,
        group=group,
        row_unit=math.lcm(*heights, *periods),
        column_unit=max(widths),
        block_rows=rows,
        stacked_blocks=stacked_blocks,
        side_by_side=aside,
        is_merged=_is_merged(leaf, shard.shape),
    )
    least = math.ceil(tiling.rows / unit) * unit
    return dataclasses.replace(tiling, block_rows=min(rows, least))


def _group(leaf: Leaf, *, has_sublanes: bool) -> tuple[int, int]:
    """Returns the number of rows in a group, and the number of blocks along these rows.

    For most widths, a group contains whole words. Fields of all other widths are
    unpacked beforehand; see :mod:`.blocks`. If ``has_sublanes``, a block may use
    several sublanes, and a group contains at least an eighth of a block. Otherwise, a
    group contains whole blocks.
    """
    heights = [block_shape(size)[0] for size in leaf.block_sizes]
    periods = [period(bits)[0] for bits in leaf.packed]
    words = math.lcm(_MIN_GROUP, *(rows for rows in periods if rows <= _MAX_GROUP))
    if not has_sublanes:
        return math.lcm(words, *heights), 1
    # Values per block are computed once per group, so large groups are cheaper.
    parts = (max(rows // SUBLANES, min(rows, _MAX_GROUP)) for rows in heights)
    group = math.lcm(words, *parts)
    higher = math.lcm(group, *(rows for rows in periods if rows <= _MAX_PERIOD))
    if all(rows % higher == 0 for rows in heights):
        return higher, 1
    if {*heights} == {group}:
        return higher, higher // group
    return group, 1


def minor_axes(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the axes that XLA:TPU stores in the lanes and sublanes of its tiles.

    XLA stores arrays in tiles of 8 x 128 elements, or of 1, 2 or 4 x 128 if an axis is
    that short. It chooses the pair of axes that needs the least padding, and the last
    such pair if there are several. Axes are counted from the end.

    >>> minor_axes((4096, 4096)), minor_axes((4096, 1376)), minor_axes((2048, 4, 64))
    ((-1, -2), (-2, -1), (-3, -1))
    >>> minor_axes((2048, 16, 1024)), minor_axes((2048, 12, 1024))
    ((-1, -2), (-1, -3))
    """

    def padding(pair: tuple[int, int]) -> float:
        lanes, sublanes = (shape[axis] for axis in pair)
        tile = min(SUBLANES, 1 << (sublanes - 1).bit_length())
        padded = math.ceil(lanes / LANES) * LANES * math.ceil(sublanes / tile) * tile
        return padded / (lanes * sublanes)

    pairs = itertools.permutations(range(-1, -len(shape) - 1, -1), 2)
    return min(pairs, key=padding)


def lies_transposed(shape: tuple[int, ...], axis: int = -2) -> bool:
    """Return whether XLA:TPU stores the elements of a column next to each other.

    >>> [lies_transposed(shape) for shape in ((4096, 4096), (4096, 1376), (1000, 2048))]
    [False, True, False]
    """
    return minor_axes(shape)[0] == axis


def size_for_kernel(leaf: Leaf, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return a part's number of elements and columns, without the axes before the rows.

    Both numbers are 0 if a kernel would need copies that cost more than the update.
    """
    axis = _row_axis(leaf, shape)
    if axis == -1:
        is_vector = len(shape) == 1 and not leaf.stacked and _has_one_height(leaf)
        if not is_vector or not all(map(is_unrolled, leaf.packed)):
            return 0, 0
        return shape[-1], shape[-1]
    is_merged = _is_merged(leaf, shape)
    is_matrix = set(minor_axes(shape)) == {-1, axis}
    if not (axis == -2 or is_merged or is_matrix or _side_by_side(leaf, shape)):
        return 0, 0
    return math.prod(shape[axis:]), _columns(shape, axis, is_merged)


def _columns(shape: tuple[int, ...], axis: int, is_merged: bool) -> int:
    return math.prod(shape[axis + 1 :]) if is_merged else shape[-1]


def _row_axis(leaf: Leaf, shape: tuple[int, ...]) -> int:
    """Returns the row axis, counted from the end. Plain leaves may use any axis."""
    if leaf.has_words_or_blocks:
        return leaf.layout.axis
    return minor_axes(shape)[1] if len(shape) > 1 else -1


def _side_by_side(leaf: Leaf, shape: tuple[int, ...]) -> int | None:
    """Returns the number of matrices side by side in a program; None for one matrix.

    This is the number of matrices that share a tile of the narrowest dtype if it
    divides the length of their axis, and the length of the axis otherwise.
    """
    if (
        _row_axis(leaf, shape) > -3
        or minor_axes(shape) != (-1, -2)
        or shape[-2] % SUBLANES
        or not _has_one_height(leaf)
    ):
        return None
    arrays = [o.array.dtype for o in leaf.operands if o.block_size is None]
    full = SUBLANES * 4 // min(dtype.itemsize for dtype in arrays)
    return full if shape[-2] % full == 0 else shape[-2]


def _is_merged(leaf: Leaf, shape: tuple[int, ...]) -> bool:
    """Returns whether all axes after the rows are the columns of one matrix.

    Merging the axes keeps the order of elements, words and blocks if no block is cut.
    It keeps their indices if shards cut only the first of these axes. XLA:TPU already
    stores arrays in this form if neighboring rows are next to each other and the
    columns are whole tiles. XLA copies other arrays. For leaves with blocks, the copy
    costs less than XLA's own update. For leaves with only words, it costs more.
    """
    axis = _row_axis(leaf, shape)
    widths = [block_shape(size)[1] for size in leaf.block_sizes]
    is_whole = shape[axis + 2 :] == leaf.shape[axis + 2 :]
    if axis > -3 or not is_whole or shape[-1] % max(widths, default=1):
        return False
    lanes, sublanes = minor_axes(shape)
    if {lanes, sublanes} == {-1, axis}:
        return lanes == axis and shape[-1] % SUBLANES == 0
    return bool(widths) and _side_by_side(leaf, shape) is None


def _has_one_height(leaf: Leaf) -> bool:
    """Returns whether a group can contain all rows of each block."""
    heights = {block_shape(size)[0] for size in leaf.block_sizes}
    return len(heights) <= 1 and max(heights, default=1) <= _MAX_UNROLLED


def _bytes_of(like: Operand | Result, is_side_by_side: bool) -> float:
    """Returns the bytes per element, including scratch memory."""
    if like.bits is not None:
        # Blocks are counted twice, but scratch memory is not.
        return like.bits / 8 + (0 if is_unrolled(like.bits) else 2)
    if like.block_size is not None:
        return 1.0
    dtype = (like.array if isinstance(like, Operand) else like).dtype
    # Narrow rows also use scratch memory, a word per element if side by side.
    of_narrow = {1: 3, 2: 4} if is_side_by_side else {1: 1.5, 2: 3}
    return of_narrow.get(dtype.itemsize, 4)
