"""Which part of a leaf each program of a TPU kernel updates, and in what pieces.

A leaf is seen as matrices of rows and columns, one for each index of the axes before
the rows. A program updates a block of rows by 128 columns. It goes through the block in
units of registers: a *group* is the rows after which packed fields repeat, and a
register of 8 sublanes holds one row of each of 8 neighbouring groups. So the fields of
one word are in as many registers, at the same sublane and lane as the word in its own.
"""

import dataclasses
import math

from pallas_kernels.bitfields.fields import period
from pallas_kernels.fused_update.sharded import Shard
from pallas_kernels.fused_update.spec import Leaf, Operand, Result
from pallas_kernels.layout import TILE_ROWS, block_shape

LANES, SUBLANES = 128, 8
_LEAST_GROUP, _MOST_GROUP = 4, TILE_ROWS
# A block and what is computed of it, twice, because the next one is loaded meanwhile.
_MOST_BYTES = 14 * 2**20
_MOST_ROWS, _LEAST_ROWS = 2048, 128
_MOST_UNROLLED = 8


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a leaf, or a shard of one, is divided among programs.

    Args:
      shape: of the shard.
      whole: of the leaf, whose row-major indices the elements have.
      group: rows in a group.
      row_unit, column_unit: the rows of whole words and blocks, and columns of blocks.
      block_rows: rows of a program.
    """

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    group: int
    row_unit: int
    column_unit: int
    block_rows: int

    @property
    def matrices(self) -> int:
        """How many matrices of rows and columns there are."""
        return math.prod(self.shape[:-2])

    @property
    def rows(self) -> int:
        """Of a matrix."""
        return self.shape[-2]

    @property
    def columns(self) -> int:
        """Of a matrix."""
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
        return math.gcd(self.units, _MOST_UNROLLED)

    @property
    def is_even(self) -> bool:
        """Whether no word and no block is cut by the matrix's edges."""
        return not (self.rows % self.row_unit or self.columns % self.column_unit)

    def stored_rows(self, like: Operand | Result) -> int:
        """Rows that a program has of an operand's or result's array."""
        if like.bits is not None:
            return self.block_rows * like.bits // 32
        if like.block_size is not None:
            return self.block_rows // block_shape(like.block_size)[0]
        return self.block_rows

    def strides(self) -> list[tuple[int, int]]:
        """Of each axis before the rows its length, and its stride in the whole."""
        return [
            (n, math.prod(self.whole[axis + 1 :]) % 2**32)
            for axis, n in enumerate(self.shape[:-2])
        ]


def group_of(leaf: Leaf) -> int:
    """The rows of a group: whole words of every width, and an 8th of every block."""
    parts = (block_shape(size)[0] // SUBLANES for size in leaf.block_sizes)
    words = (period(bits)[0] for bits in leaf.packed)
    return math.lcm(_LEAST_GROUP, *words, *parts)


def has_groups(leaf: Leaf) -> bool:
    """Whether a block of 8 rows, the lowest, has whole groups."""
    return group_of(leaf) <= _MOST_GROUP


def tiling_of(shard: Shard) -> Tiling:
    """The tiling of a leaf's part; the leaf :func:`has_groups`."""
    leaf = shard.leaf
    heights, widths = zip((1, 1), *map(block_shape, leaf.block_sizes), strict=True)
    group = group_of(leaf)
    # A register holds 8 groups of each block, or more blocks.
    unit = max(_LEAST_ROWS, SUBLANES * max(heights))
    bytes_per_row = 2 * LANES * sum(map(_bytes_of, (*leaf.operands, *leaf.results)))
    rows = _MOST_ROWS
    while rows > unit and rows * bytes_per_row > _MOST_BYTES:
        rows //= 2
    return Tiling(
        shard.shape,
        leaf.shape,
        group,
        math.lcm(*heights, *(period(bits)[0] for bits in leaf.packed)),
        max(widths),
        min(rows, math.ceil(shard.shape[-2] / unit) * unit),
    )


def _bytes_of(like: Operand | Result) -> float:
    """Bytes per element, with those of scratch memory."""
    if like.bits is not None:
        return like.bits / 8
    if like.block_size is not None:
        return 1.0
    array = like.array if isinstance(like, Operand) else like
    return 3 if array.dtype.itemsize == 2 else 4
