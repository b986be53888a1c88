"""Which part of a leaf each program of a TPU kernel updates, and in what pieces.

A leaf is seen as matrices of rows and columns, one for each index of the axes before
the rows. A program updates a block of rows by 128 columns. It goes through the block in
units of registers: a *group* is the rows after which most packed fields repeat, and a
register of 8 sublanes holds one row of each of 8 neighbouring groups. So the fields of
one word are in as many registers, at the same sublane and lane as the word in its own.
"""

import dataclasses
import math

from pallas_kernels.fused_update.spec import Leaf, Operand, Result, Shard
from pallas_kernels.layout import block_shape, is_unrolled, period

LANES, SUBLANES = 128, 8
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
      group: rows in a group.
      row_unit, column_unit: the rows of whole words and blocks, and columns of blocks.
      block_rows: rows of a program.
      stacked_blocks: blocks below each other in a group, if it is higher than a block.
    """

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    group: int
    row_unit: int
    column_unit: int
    block_rows: int
    stacked_blocks: int = 1

    @property
    def matrices(self) -> int:
        """How many matrices of rows and columns there are."""
        return math.prod(self.shape[:-2])

    @property
    def rows(self) -> int:
        """Rows of a matrix."""
        return self.shape[-2]

    @property
    def columns(self) -> int:
        """Columns of a matrix."""
        return self.shape[-1]

    @property
    def grid(self) -> tuple[int, int, int]:
        """Matrices, blocks of rows, and blocks of columns."""
        rows = math.ceil(self.rows / self.block_rows)
        return self.matrices, rows, math.ceil(self.columns / LANES)

    @property
    def unit_rows(self) -> int:
        """Rows of a unit: a register for each row of a group."""
        return SUBLANES * self.group

    @property
    def units(self) -> int:
        """Units of a program."""
        return self.block_rows // self.unit_rows

    @property
    def unroll(self) -> int:
        """Units that the loop's body has."""
        return math.gcd(self.units, _MAX_UNROLLED // self.group)

    @property
    def is_even(self) -> bool:
        """Whether no word and no block is cut by the matrix's edges."""
        return not (self.rows % self.row_unit or self.columns % self.column_unit)

    def block_in_registers(self, block_size: int) -> tuple[int, int]:
        """Sublanes and lanes of a register that have the groups of a block."""
        height, width = block_shape(block_size)
        return max(height // self.group, 1), width


def tiling_of(shard: Shard) -> Tiling:
    """The tiling of a leaf's part.

    A program takes whole periods of words and whole blocks of scales, as many rows as
    there is memory for. Where words lie transposed it takes whole tiles of them.

    Args:
      shard: with merged axes, so that the rows are the last axis but one.
    """
    leaf = shard.leaf
    heights, widths = zip((1, 1), *map(block_shape, leaf.block_sizes), strict=True)
    periods = [period(bits)[0] for bits in leaf.packed]
    group, stacked_blocks = _group(leaf)
    # A register holds 8 groups of each block, or more blocks, and 8 periods of words.
    unit = max(_MIN_ROWS, *(SUBLANES * rows for rows in (*heights, *periods)))
    bytes_per_row = 2 * LANES * sum(map(_bytes_of, (*leaf.operands, *leaf.results)))
    rows, limit = _MAX_ROWS, _MAX_BYTES
    # Words that lie transposed are in whole tiles if there is memory for so many rows.
    tile_rows = LANES * max(periods, default=1)
    tile_bytes = tile_rows * bytes_per_row
    if lies_transposed(shard.shape) and tile_bytes <= _MAX_TRANSPOSED_BYTES:
        rows, limit = max(rows, tile_rows), max(limit, tile_bytes)
    while rows > unit and rows * bytes_per_row > limit:
        rows //= 2
    return Tiling(
        shard.shape,
        leaf.shape,
        group,
        math.lcm(*heights, *periods),
        max(widths),
        min(rows, math.ceil(shard.shape[-2] / unit) * unit),
        stacked_blocks,
    )


def _group(leaf: Leaf) -> tuple[int, int]:
    """Rows of a group, and how many blocks it has below each other.

    It has whole words of most widths, and an eighth of every block or more. Fields of
    other widths are unpacked beforehand, see :mod:`.blocks`.
    """
    heights = [block_shape(size)[0] for size in leaf.block_sizes]
    periods = [period(bits)[0] for bits in leaf.packed]
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


def lies_transposed(shape: tuple[int, ...]) -> bool:
    """Whether XLA:TPU stores rows, and not columns, next to each other.

    Arrays are stored in tiles of 8 x 128. XLA takes the order of the last two axes that
    needs less padding.

    >>> [lies_transposed(shape) for shape in ((4096, 4096), (4096, 1376), (1000, 2048))]
    [False, True, False]
    """
    rows, columns = shape[-2:]
    return _tiles(columns, rows) < _tiles(rows, columns)


def _tiles(rows: int, columns: int) -> int:
    return math.ceil(rows / SUBLANES) * math.ceil(columns / LANES)


def _bytes_of(like: Operand | Result) -> float:
    """Bytes per element, with those of scratch memory."""
    if like.bits is not None:
        # Scratch memory has no second copy.
        return like.bits / 8 + (0 if is_unrolled(like.bits) else 2)
    if like.block_size is not None:
        return 1.0
    array = like.array if isinstance(like, Operand) else like
    # Rows of fewer bits are in scratch memory too.
    return {1: 1.5, 2: 3}.get(array.dtype.itemsize, 4)
