"""Which part of a leaf each program of a TPU kernel updates, and in what pieces.

A leaf is seen as matrices of rows and columns. A program updates a block of rows by 128
columns. It goes through the block in units of registers, which have 8 sublanes of 128
lanes, in one of two ways. In both the fields of one word are in as many registers, at
the same sublane and lane as the word in its own.

- A *group* is the rows after which most packed fields repeat, and a register holds one
  row of each of 8 neighbouring groups of a matrix.
- Where XLA:TPU stores the axis between rows and columns, such as heads or layers, in
  the sublanes of its tiles, the block has some 8 matrices or more *side by side*. A
  register holds one row of 8 of them, and a unit is one group.

A folded vector is one matrix of 128 columns, which has 4 groups of its rows of 32 side
by side. What is stored has 4 of its own rows next to each other; so the quarters of
registers change places, see :mod:`.registers`.
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
"""Rows of a group whose fields are in no other one, where blocks allow it."""
# A block and what is computed of it, twice, because the next one is loaded meanwhile.
_MAX_BYTES, _MAX_TRANSPOSED_BYTES = 14 * 2**20, 32 * 2**20
_MAX_ROWS, _MIN_ROWS = 2048, 128
_MAX_UNROLLED = 64
"""Registers of an array in the body of the loop: more take longer to compile."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a leaf, or a shard of one, is divided among programs.

    Args:
      shape: of the shard.
      whole: of the leaf, whose row-major indices the elements have.
      axis: the rows', counted from the end.
      group: rows in a group.
      row_unit, column_unit: the rows of whole words and blocks, and columns of blocks.
      block_rows: rows of a program, of each matrix.
      stacked_blocks: blocks below each other in a group, if it is higher than a block.
      side_by_side: matrices of a program, which share registers; None for one.
      is_merged: whether all axes after the rows are columns of one matrix.
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
        """Whether it is of a vector."""
        return self.axis == -1

    @property
    def matrix_axes(self) -> tuple[int, ...]:
        """The axes of which each index has matrices of its own, from the end."""
        if self.is_merged:
            return tuple(range(-len(self.shape), self.axis))
        between = range(self.axis + 1, -1 if self.side_by_side is None else -2)
        return (*range(-len(self.shape), self.axis), *between)

    @property
    def matrices(self) -> int:
        """How many matrices of rows and columns there are, side by side ones as one."""
        return math.prod(self.shape[axis] for axis in self.matrix_axes)

    @property
    def rows(self) -> int:
        """Rows of a matrix."""
        if self.is_folded:
            return math.ceil(self.shape[-1] / (LANES * self.group)) * self.group
        return self.shape[self.axis]

    @property
    def columns(self) -> int:
        """Columns of a matrix."""
        if self.is_folded:
            return LANES
        return _columns(self.shape, self.axis, self.is_merged)

    @property
    def row_stride(self) -> int:
        """By how much the indices of neighbouring elements of a group differ."""
        return FOLD if self.is_folded else math.prod(self.whole[self.axis + 1 :])

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """Matrices, blocks of those side by side, of rows, and of columns."""
        blocks = 1
        if self.side_by_side is not None:
            blocks = self.shape[-2] // self.side_by_side
        rows = math.ceil(self.rows / self.block_rows)
        return self.matrices, blocks, rows, math.ceil(self.columns / LANES)

    @property
    def registers(self) -> int:
        """Registers that one row of a program's matrices fills, if they are several."""
        return (self.side_by_side or 0) // SUBLANES

    @property
    def unit_rows(self) -> int:
        """Rows of a unit: a register for each row of a group."""
        return self.group * (SUBLANES if self.side_by_side is None else 1)

    @property
    def units(self) -> int:
        """Units of a program."""
        return self.block_rows // self.unit_rows * (self.registers or 1)

    @property
    def unroll(self) -> int:
        """Units that the loop's body has."""
        return math.gcd(self.units, max(_MAX_UNROLLED // self.group, 1))

    @property
    def is_even(self) -> bool:
        """Whether no word and no block is cut by the matrix's edges."""
        if self.is_folded:
            return self.shape[-1] % (LANES * self.group) == 0
        return not (self.rows % self.row_unit or self.columns % self.column_unit)

    def block_in_registers(self, block_size: int) -> tuple[int, int]:
        """Sublanes and lanes of a register that have the groups of a block."""
        height, width = block_shape(block_size)
        return max(height // self.group, 1), width


def tiling_of(shard: Shard) -> Tiling:
    """The tiling of a leaf's part.

    A program takes whole periods of words and whole blocks of scales, as many rows as
    there is memory for. Where words lie transposed it takes whole tiles of them.
    """
    leaf, axis = shard.leaf, _row_axis(shard.leaf, shard.shape)
    heights, widths = zip((1, 1), *map(block_shape, leaf.block_sizes), strict=True)
    periods = [period(bits)[0] for bits in leaf.packed]
    aside = _side_by_side(leaf, shard.shape)
    group, stacked_blocks = _group(leaf, has_sublanes=aside is None and axis != -1)
    both = (*leaf.operands, *leaf.results)
    max_rows, limit = _MAX_ROWS // (aside or 1), _MAX_BYTES
    if aside is not None:
        unit = math.lcm(group, *periods)
        bytes_per_row = 2 * LANES * aside * sum(map(_bytes_side_by_side, both))
    else:
        # A register holds 8 groups of each block, or more blocks, and 8 periods.
        unit = max(_MIN_ROWS, *(SUBLANES * rows for rows in (*heights, *periods)))
        unit *= max(widths) if axis == -1 else 1
        bytes_per_row = 2 * LANES * sum(map(_bytes_of, both))
        # Words that lie transposed are in whole tiles if there is memory for so many.
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
    """Rows of a group, and how many blocks it has below each other.

    It has whole words of most widths. Fields of other widths are unpacked beforehand,
    see :mod:`.blocks`.

    Args:
      leaf: of the tiling.
      has_sublanes: whether a block may be spread over sublanes, so that a group has an
        eighth of it or more. Else it has all of it.
    """
    heights = [block_shape(size)[0] for size in leaf.block_sizes]
    periods = [period(bits)[0] for bits in leaf.packed]
    if not has_sublanes:
        whole_words = (rows for rows in periods if rows <= _MAX_GROUP)
        return math.lcm(_MIN_GROUP, *whole_words, *heights), 1
    group = math.lcm(
        _MIN_GROUP,
        *(rows for rows in periods if rows <= _MAX_GROUP),
        # What is per block is computed once per group, so that large groups take less.
        *(max(rows // SUBLANES, min(rows, _MAX_GROUP)) for rows in heights),
    )
    higher = math.lcm(group, *(rows for rows in periods if rows <= _MAX_PERIOD))
    if all(rows % higher == 0 for rows in heights):
        return higher, 1
    if {*heights} == {group}:
        return higher, higher // group
    return group, 1


def minor_axes(shape: tuple[int, ...]) -> tuple[int, int]:
    """The axes in the lanes and in the sublanes of XLA:TPU's tiles, from the end.

    Arrays are stored in tiles of 8 x 128, or of 1, 2 or 4 x 128 if they have no more
    elements along an axis. XLA takes the two axes that need the least padding, and of
    those the last ones.

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
    """Whether XLA:TPU stores rows, and not columns, next to each other.

    >>> [lies_transposed(shape) for shape in ((4096, 4096), (4096, 1376), (1000, 2048))]
    [False, True, False]
    """
    return minor_axes(shape)[0] == axis


def size_for_kernel(leaf: Leaf, shape: tuple[int, ...]) -> tuple[int, int]:
    """Elements and columns of a part that one index of the axes before the rows has.

    They are 0 if no kernel takes such a part without copies that cost more than it.
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
    """The axis of rows, from the end; any axis can be that of a plain leaf."""
    if leaf.has_words_or_blocks:
        return leaf.layout.axis
    return minor_axes(shape)[1] if len(shape) > 1 else -1


def _side_by_side(leaf: Leaf, shape: tuple[int, ...]) -> int | None:
    """How many matrices of a part a program has; None for one.

    They are as many as share a tile of the narrowest dtype, if these divide all.
    """
    if (
        _row_axis(leaf, shape) > -3
        or minor_axes(shape) != (-1, -2)
        or shape[-2] % SUBLANES
    ):
        return None
    if not _has_one_height(leaf):
        return None
    arrays = [o.array.dtype for o in leaf.operands if o.block_size is None]
    full = SUBLANES * 4 // min(dtype.itemsize for dtype in arrays)
    return full if shape[-2] % full == 0 else shape[-2]


def _is_merged(leaf: Leaf, shape: tuple[int, ...]) -> bool:
    """Whether all axes after a part's rows are columns of one matrix.

    That keeps the order of elements, words and blocks if no block is cut, and their
    indices if no axis is cut but the first. Where rows are next to each other, and
    whole tiles of columns, it is how XLA:TPU stores them. Elsewhere it copies the
    arrays, which is less than what it does with blocks itself, but more than what it
    does with words alone.
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
    """Whether a group can be all rows of each block."""
    heights = {block_shape(size)[0] for size in leaf.block_sizes}
    return len(heights) <= 1 and max(heights, default=1) <= _MAX_UNROLLED


def _bytes_of(like: Operand | Result) -> float:
    """Bytes per element, with those of scratch memory."""
    if like.bits is not None:
        # Scratch memory has no second copy.
        return like.bits / 8 + (0 if is_unrolled(like.bits) else 2)
    if like.block_size is not None:
        return 1.0
    # Rows of fewer bits are in scratch memory too.
    return {1: 1.5, 2: 3}.get(_dtype_of(like).itemsize, 4)


def _bytes_side_by_side(like: Operand | Result) -> float:
    """The same if each element of fewer bits has a word of scratch memory."""
    if like.bits is not None or like.block_size is not None:
        return _bytes_of(like)
    return {1: 3, 2: 4}.get(_dtype_of(like).itemsize, 4)


def _dtype_of(like: Operand | Result):
    return (like.array if isinstance(like, Operand) else like).dtype
