"""Where one program's lanes and blocks are, and which of them exist."""

import dataclasses
import functools
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.fused_update.gpu.numbers import Numbers, Scalar
from pallas_kernels.fused_update.gpu.places import (
    index_of,
    offsets_of_rows,
    places,
    z_order,
)
from pallas_kernels.fused_update.gpu.tiling import Tiling
from pallas_kernels.layout import (
    FOLD,
    TILE_COLUMNS,
    TILE_ROWS,
    block_shape,
    period,
)


class Arrangement(typing.Protocol):
    """How the lanes of a program are arranged in arrays, in which launchers differ.

    Where a block has several tiles, they are neighbours, in the order of their numbers.

    *Arrays of lanes* have :attr:`shape`. *Arrays of blocks*, such as :meth:`blocks`,
    and *of parts* may be smaller: :meth:`spread` makes them broadcast.
    """

    @property
    def tiling(self) -> Tiling:
        """What the lanes walk over."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an array with one element per lane."""
        ...

    def flat(self) -> jax.Array:
        """int32, the numbers of the lanes of a flat tiling."""
        ...

    def blocks(self) -> jax.Array:
        """int32 of blocks: the numbers of the program's largest blocks."""
        ...

    def parts(self, count: int) -> jax.Array:
        """int32 of parts: the numbers of the parts into which these are divided."""
        ...

    def columns(self) -> jax.Array:
        """int32 of lanes: the numbers of the columns in their tiles."""
        ...

    def carried(self, x: jax.Array) -> jax.Array:
        """An array of lanes with the layout and the sign that its dtype says.

        Loops carry such arrays, and comparisons depend on the sign.
        """
        ...

    def spread(self, x: jax.Array) -> jax.Array:
        """A scalar, or an array of blocks, of parts or of lanes, to broadcast."""
        ...

    def over_parts(self, x: jax.Array) -> jax.Array:
        """A scalar, or an array of blocks, to broadcast to one of parts."""
        ...

    def expand(self, x: jax.Array) -> jax.Array:
        """The same as an array of lanes."""
        ...

    def maxima(self, x: jax.Array, parts: int) -> jax.Array:
        """An array of parts: the maxima of an array of lanes."""
        ...


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a program's lanes.

    Args:
      number: in its chunk.
      index, offset: of the elements in the leaf and in plain arrays.
      exists: which lanes have an element; None if all have.
      readable: at whose offsets there are elements, perhaps others'; None if at all.
    """

    number: int
    index: jax.Array
    offset: jax.Array
    exists: jax.Array | None
    readable: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Lanes:
    """One program's lanes.

    Arrays have an element per lane, or broadcast to that.

    Args:
      arrangement: of the lanes in arrays.
      numbers: of the leaf's shape.
      first: int32, offsets of row 0.
      index: uint32, indices of row 0.
      inside: bool, or None where every lane exists in row 0.
      readable: at whose places there are elements, of other lanes where a lane does
        not exist; None if at all.
    """

    arrangement: Arrangement
    numbers: Numbers
    first: jax.Array
    index: jax.Array
    inside: jax.Array | None
    readable: jax.Array | None

    @property
    def tiling(self) -> Tiling:
        """What the lanes walk over."""
        return self.arrangement.tiling

    def rows(self, chunk: Scalar) -> list[Row]:
        """The rows of a chunk, by its number."""
        tiling, start = self.tiling, chunk * np.int32(self.tiling.chunk_rows)
        stride, numbers = self.row_stride, range(tiling.chunk_rows)
        offsets = offsets_of_rows(self.first, start, stride, tiling.chunk_rows, tiling)
        spacing, rows = self._row_index.astype(jnp.uint32), []
        exist = self._exist(start, offsets)
        for number, offset in zip(numbers, offsets, strict=True):
            row = jnp.uint32(start + np.int32(number))
            index = self.index + row * spacing
            exists = exist[number]
            readable = self.readable if exists is self.inside else exists
            rows.append(Row(number, index, offset, exists, readable))
        return rows

    @property
    def row_stride(self) -> Scalar:
        """Elements from one row to the next."""
        return self.numbers.get("row_stride", np.int32(self.tiling.row_stride))

    @property
    def _row_index(self) -> Scalar:
        """The same of indices, modulo 2^32."""
        return self.numbers.get("row_index", self.row_stride)

    def _exist(
        self, start: Scalar, offsets: Sequence[jax.Array]
    ) -> list[jax.Array | None]:
        """Which lanes have an element on each row from ``start`` on; None if all."""
        raise NotImplementedError


class FlatLanes(Lanes):
    """One program's lanes of a flat tiling: those up to the leaf's size exist."""

    def _exist(
        self, start: Scalar, offsets: Sequence[jax.Array]
    ) -> list[jax.Array | None]:
        size = self.numbers.get("size")
        return [None if size is None else offset < size for offset in offsets]


@dataclasses.dataclass(frozen=True)
class TiledLanes(Lanes):
    """One program's lanes of a tiling by tiles.

    Args:
      lead, row, column: int32, places of row 0: which matrix, which row of it, and
        where in the row.
      program: int32 scalar, which of the leaf's.
      numbers_of_blocks: int32 of blocks, of the largest, among all of the leaf.
      exist: which of these do, bool of blocks; None if all do.

    The lead is None where all matrices are one.
    """

    lead: jax.Array | None
    row: jax.Array
    column: jax.Array
    program: jax.Array
    numbers_of_blocks: jax.Array
    exist: jax.Array | None

    def blocks_of(self, block_size: int) -> "BlockPlaces":
        """The places of their blocks of a size, into which the largest are divided."""
        arrangement, tiling = self.arrangement, self.tiling
        height, width = block_shape(block_size)
        exist, number = self.exist, self.numbers_of_blocks
        largest = places(tiling, self.numbers, self.program, arrangement.blocks())
        lead, step, piece, block = largest
        blocks = self.numbers[f"blocks {block_size}"]
        row = step * np.int32(tiling.step_rows // height)
        of_block = functools.partial(BlockPlaces, arrangement, self.numbers, block_size)
        if block_size == tiling.block_size:
            # Where a program's blocks are in one row, most of an offset is a scalar.
            is_next = "all_blocks" in self.numbers and height == tiling.step_rows
            is_next = is_next and lead is None and piece is None
            place = block if piece is None else piece * blocks + block
            return of_block(lead, row, place, exist, number if is_next else None)
        count = tiling.block_size // block_size
        part_row, part_column = z_order(arrangement.parts(count), height == width)
        each = arrangement.over_parts
        column = each(block) * np.int32(tiling.block_shape[1] // width) + part_column
        exist = None if exist is None else each(exist)
        if tiling.cuts_blocks(block_size):
            exist = column < blocks if exist is None else (column < blocks) & exist
        if exist is not None:
            exist = jnp.broadcast_to(exist, column.shape)
        place = column if piece is None else each(piece) * blocks + column
        lead = None if lead is None else each(lead)
        return of_block(lead, each(row) + part_row, place, exist)

    def words(
        self, bits: int, start: Scalar, count: int
    ) -> list[tuple[jax.Array, jax.Array | None]]:
        """Offsets of the words from ``start`` on, and which lanes have them."""
        tiling, stride = self.tiling, self.row_stride
        height, words = period(bits)
        row = lax.div(self.row, jnp.full_like(self.row, height)) * np.int32(words)
        first = self.arrangement.spread(row)
        if self.lead is not None:
            first = self.lead * self.numbers[f"word_rows {bits}"] + first
        first = first * stride + self.column
        offsets = offsets_of_rows(first, start, stride, count, tiling)
        masks = [self.inside] * count
        if tiling.cuts_words(bits):
            rows = self.numbers[f"word_rows {bits}"]
            exist = (row + (start + np.int32(n)) < rows for n in range(count))
            masks = [_both(self.inside, each, self.arrangement) for each in exist]
        return list(zip(offsets, masks, strict=True))

    def rows_left(self, start: Scalar) -> jax.Array | None:
        """How many rows there are from ``start`` on, perhaps fewer than none.

        None if none are missing. Lanes outside of the rows count as if inside.
        """
        rows, row = self.numbers.get("rows"), self.row + start
        if rows is None:
            return None
        if not self.tiling.layout.is_folded:
            return rows - row
        first = self.arrangement.spread(row * np.int32(FOLD)) + self.column
        return (rows + np.int32(FOLD - 1) - first) >> np.int32(FOLD.bit_length() - 1)

    def _exist(
        self, start: Scalar, offsets: Sequence[jax.Array]
    ) -> list[jax.Array | None]:
        left = self.rows_left(start)
        if left is None:
            return [self.inside] * len(offsets)
        left = self.arrangement.expand(left)
        if self.inside is not None:
            # One comparison for each element then, however often its mask is used.
            left = self.arrangement.carried(jnp.where(self.inside, left, np.int32(0)))
        return [left > np.int32(number) for number in range(len(offsets))]


@dataclasses.dataclass(frozen=True)
class BlockPlaces:
    """Where the blocks of a program's lanes are in arrays with one element per block.

    Arrays are of the largest blocks, or of their parts; or they broadcast to that.

    Args:
      numbers: of the leaf's shape.
      block_size: elements of a block.
      lead, row, place: int32: which matrix, which row of blocks of it, and where among
        the blocks of a row; the lead is None where all matrices are one.
      inside: bool, or None where every block exists in row 0.
      offset: int32, where the blocks are; None unless it is known without the others.
    """

    arrangement: Arrangement
    numbers: Numbers
    block_size: int
    lead: jax.Array | None
    row: jax.Array
    place: jax.Array
    inside: jax.Array | None
    offset: jax.Array | None = None

    def of_chunk(self, chunk: Scalar) -> tuple[jax.Array, jax.Array | None]:
        """Offsets of the blocks that a chunk of rows crosses, and which exist."""
        tiling, size, numbers = self.arrangement.tiling, self.block_size, self.numbers
        row, rows = self.row + chunk, f"block_rows {size}"
        offset, mask = self.offset, self.inside
        if offset is None:
            row_blocks = numbers[f"blocks {size}"]
            if tiling.pieces[0] > 1:
                row_blocks = row_blocks * numbers["pieces"].by
            first = row if self.lead is None else self.lead * numbers[rows] + row
            offset = first * row_blocks + self.place
        if tiling.cuts_block_rows(size):
            exist = jnp.broadcast_to(row < numbers[rows], self.place.shape)
            mask = exist if mask is None else exist & mask
        return offset, mask

    def maxima(self, x: jax.Array) -> jax.Array:
        """The maximum over each block of an array of the program's lanes."""
        tiling = self.arrangement.tiling
        return self.arrangement.maxima(x, tiling.block_size // self.block_size)


def lanes_of(
    arrangement: Arrangement, program: jax.Array, base: jax.Array, numbers: Numbers
) -> Lanes:
    """The lanes of one program.

    Args:
      arrangement: of the lanes.
      program: int32 scalar, which program.
      base: uint32 scalar, index of the array's first element.
      numbers: of the leaf's shape.
    """
    tiling = arrangement.tiling
    if tiling.is_flat:
        first = program * np.int32(tiling.row_stride * tiling.lane_rows)
        first = first + arrangement.flat()
        index = first.astype(jnp.uint32) + base
        return FlatLanes(arrangement, numbers, first, index, None, None)
    spread = arrangement.spread
    number = program * np.int32(tiling.blocks_at_once) + arrangement.blocks()
    # Spread first: Triton would bring whatever is spread from one layout into another.
    wide, exist, inside = spread(number), None, None
    if "all_blocks" in numbers:
        exist = number < numbers["all_blocks"]
        inside = arrangement.expand(wide < numbers["all_blocks"])
    lead, step, piece, block = places(
        tiling, numbers, program, spread(arrangement.blocks())
    )
    row = step * np.int32(tiling.step_rows)
    in_piece = spread(block * np.int32(tiling.block_shape[1]))
    if tiling.tiles > 1:
        tile_row, tile_column = z_order(spread(arrangement.parts(tiling.tiles)), False)
        in_piece = in_piece + tile_column * np.int32(TILE_COLUMNS)
        if tiling.block_shape[0] > TILE_ROWS:
            row = spread(row) + tile_row * np.int32(TILE_ROWS)
    in_piece = in_piece + arrangement.columns()
    readable = None
    if tiling.cuts_columns:
        exists = in_piece < numbers["columns"]
        readable = inside = _both(inside, exists, arrangement)
    column = in_piece
    if piece is not None:
        column = spread(piece * numbers["columns"]) + in_piece
    lanes = TiledLanes(
        arrangement,
        numbers,
        first=column,
        index=base,
        inside=inside,
        readable=readable,
        lead=None if lead is None else spread(lead),
        row=row,
        column=column,
        program=program,
        numbers_of_blocks=number,
        exist=exist,
    )
    first = spread(row * lanes.row_stride)
    if lead is not None:
        first = spread(lead * numbers["lead_stride"]) + first
    first = first + column
    if tiling.is_whole:
        index = base + first.astype(jnp.uint32)
    else:
        index = base + index_of(tiling, numbers, spread, lead, row, piece, in_piece)
    return dataclasses.replace(lanes, first=first, index=index)


def _both(
    inside: jax.Array | None, other: jax.Array, arrangement: Arrangement
) -> jax.Array:
    """The lanes for which both masks hold; None holds for all."""
    other = arrangement.expand(other)
    return other if inside is None else other & inside
