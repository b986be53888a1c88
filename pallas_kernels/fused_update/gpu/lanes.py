"""Where one program's lanes and blocks are, and which of them exist."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.bitfields import period
from pallas_kernels.fused_update.gpu.arrays import Arrangement, Tiling
from pallas_kernels.layout import (
    FOLD,
    MAX_BLOCK_SIZE,
    TILE_COLUMNS,
    TILE_ROWS,
    TILE_SIZE,
    block_shape,
)


@dataclasses.dataclass(frozen=True)
class FlatLanes:
    """One program's lanes of a flat tiling.

    Args:
      arrangement: of the lanes in arrays.
      first: int32 vector, offsets of row 0.
      index: uint32 vector, indices of row 0.
      size: int32 scalar, how many elements there are; None if the tiling has as many.
    """

    arrangement: Arrangement
    first: jax.Array
    index: jax.Array
    size: jax.Array | None = None

    inside: typing.ClassVar[None] = None

    @property
    def tiling(self) -> Tiling:
        """Static description."""
        return self.arrangement.tiling

    def offsets(self, start: jax.Array, count: int) -> list[jax.Array]:
        """Where the elements of so many rows from ``start`` on are."""
        tiling = self.tiling
        first = self.first + start * np.int32(tiling.flat_width)
        first = _bounded(first, tiling.size)
        return [first + np.int32(n * tiling.flat_width) for n in range(count)]

    def element(self, row: jax.Array) -> jax.Array:
        """The index of a row's elements."""
        return self.index + row.astype(jnp.uint32) * np.uint32(self.tiling.flat_width)

    def exists(self, start: jax.Array, row: int) -> jax.Array | None:
        """Which lanes have an element on the row ``start + row``; None if all have."""
        tiling, size = self.tiling, self.size
        if size is None:
            if tiling.size % (tiling.flat_width * tiling.lane_rows) == 0:
                return None
            size = np.int32(tiling.size)
        return self.offsets(start, row + 1)[row] < size


@dataclasses.dataclass(frozen=True)
class TiledLanes:
    """One program's lanes of a tiling by tiles.

    Arrays have an element per lane, or broadcast to that.

    Args:
      arrangement: of the lanes in arrays.
      first: int32, offsets of row 0.
      index: uint32, indices of row 0.
      lead, row, column: int32, places of row 0: which matrix, which row of it, and
        where in the row.
      inside: bool, or None where every lane exists in row 0.
      largest: lead, step, piece and block, int32 scalars or of blocks: of their largest
        blocks, which matrix, which step down its rows, which piece of the row, and
        which block of the piece.
      exist: which of these do, bool of blocks; None if all do.
    """

    arrangement: Arrangement
    first: jax.Array
    index: jax.Array
    lead: jax.Array
    row: jax.Array
    column: jax.Array
    inside: jax.Array | None
    largest: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
    exist: jax.Array | None

    @property
    def tiling(self) -> Tiling:
        """Static description."""
        return self.arrangement.tiling

    def blocks_of(self, block_size: int) -> "BlockPlaces":
        """The places of their blocks of a size, into which the largest are divided."""
        arrangement, tiling = self.arrangement, self.tiling
        height, width = block_shape(block_size)
        (lead, step, piece, block), exist = self.largest, self.exist
        blocks = np.int32(tiling.blocks_of(block_size))
        row = step * np.int32(tiling.step_rows // height)
        if block_size == tiling.block_size:
            place = piece * blocks + block
            return BlockPlaces(arrangement, block_size, lead, row, place, exist)
        count = tiling.block_size // block_size
        part_row, part_column = _z_order(arrangement.parts(count), height == width)
        each = arrangement.over_parts
        column = each(block) * np.int32(tiling.block_shape[1] // width) + part_column
        exist = None if exist is None else each(exist)
        whole = tiling.blocks * tiling.block_shape[1]
        if tiling.blocks_of(block_size) * width != whole:
            exist = column < blocks if exist is None else (column < blocks) & exist
        if exist is not None:
            exist = jnp.broadcast_to(exist, column.shape)
        row, place = each(row) + part_row, each(piece) * blocks + column
        return BlockPlaces(arrangement, block_size, each(lead), row, place, exist)

    def offsets(self, start: jax.Array, count: int) -> list[jax.Array]:
        """Where the elements of so many rows from ``start`` on are."""
        stride = self.tiling.row_stride
        first = _bounded(self.first + start * np.int32(stride), self.tiling.size)
        return [first + np.int32(n * stride) for n in range(count)]

    def word_offsets(self, bits: int, start: jax.Array, count: int) -> list[jax.Array]:
        """Where the lane's words from ``start`` on are, of fields of ``bits`` bits."""
        tiling = self.tiling
        rows = tiling.word_rows(bits)
        row = self.arrangement.spread(self._word_row(bits) + start)
        row = self.lead * np.int32(rows) + row
        first = row * np.int32(tiling.row_stride) + self.column
        first = _bounded(first, tiling.lead * rows * tiling.row_stride)
        return [first + np.int32(n * tiling.row_stride) for n in range(count)]

    def has_word(self, bits: int, word: jax.Array) -> jax.Array | None:
        """Which lanes have this word; None if all have."""
        tiling = self.tiling
        rows = tiling.word_rows(bits)
        if tiling.steps * tiling.step_rows * bits == rows * 32:
            return self.inside
        exists = self._word_row(bits) + word < np.int32(rows)
        return _both(self.inside, exists, self.arrangement)

    def _word_row(self, bits: int) -> jax.Array:
        """Which row of words the lane's first is in."""
        height, count = period(bits)
        return lax.div(self.row, jnp.full_like(self.row, height)) * np.int32(count)

    def element(self, row: jax.Array) -> jax.Array:
        """The index of a row's elements."""
        tiling = self.tiling
        stride = FOLD
        if not tiling.layout.is_folded:
            stride = tiling.index_stride(tiling.layout.row_axis)
        return self.index + row.astype(jnp.uint32) * np.uint32(stride)

    def exists(self, start: jax.Array, row: int) -> jax.Array | None:
        """Which lanes have an element on the row ``start + row``; None if all have."""
        tiling = self.tiling
        row_of_matrix = self.row + (start + np.int32(row))
        if tiling.layout.is_folded:
            length = tiling.shape[-1]
            if length % (FOLD * tiling.step_rows) == 0:
                return self.inside
            first = self.arrangement.spread(row_of_matrix * np.int32(FOLD))
            exists = first + self.column < np.int32(length)
            return _both(self.inside, exists, self.arrangement)
        if tiling.rows % tiling.step_rows == 0:
            return self.inside
        exists = row_of_matrix < np.int32(tiling.rows)
        return _both(self.inside, exists, self.arrangement)


@dataclasses.dataclass(frozen=True)
class BlockPlaces:
    """Where the blocks of a program's lanes are in arrays with one element per block.

    Arrays are of the largest blocks, or of their parts; or they broadcast to that.

    Args:
      arrangement: of the lanes in arrays.
      block_size: elements of a block.
      lead, row, place: int32: which matrix, which row of blocks of it, and where among
        the blocks of a row.
      inside: bool, or None where every block exists in row 0.
    """

    arrangement: Arrangement
    block_size: int
    lead: jax.Array
    row: jax.Array
    place: jax.Array
    inside: jax.Array | None

    @property
    def tiling(self) -> Tiling:
        """Static description."""
        return self.arrangement.tiling

    def offset(self, chunk: jax.Array) -> jax.Array:
        """Where the blocks are that a chunk of rows crosses."""
        tiling, size = self.tiling, self.block_size
        row = self.lead * np.int32(tiling.block_rows(size)) + (self.row + chunk)
        return row * np.int32(tiling.pieces[0] * tiling.blocks_of(size)) + self.place

    def exists(self, chunk: jax.Array) -> jax.Array | None:
        """Which blocks exist; None if all do."""
        tiling, rows = self.tiling, self.tiling.block_rows(self.block_size)
        if tiling.steps * tiling.step_rows == rows * block_shape(self.block_size)[0]:
            return self.inside
        there = self.row + chunk < np.int32(rows)
        there = jnp.broadcast_to(there, self.place.shape)
        return there if self.inside is None else there & self.inside

    def maxima(self, x: jax.Array) -> jax.Array:
        """The maximum over each block of an array of the program's lanes."""
        return self.arrangement.maxima(x, self.tiling.block_size // self.block_size)


Lanes = FlatLanes | TiledLanes


def lanes_of(
    arrangement: Arrangement,
    program: jax.Array,
    base: jax.Array,
    size: jax.Array | None = None,
) -> Lanes:
    """The lanes of one program.

    Args:
      arrangement: of the lanes in arrays.
      program: int32 scalar, which program.
      base: uint32 scalar, index of the array's first element.
      size: int32 scalar, the array's elements if they are fewer than a flat tiling's.
    """
    tiling = arrangement.tiling
    if tiling.is_flat:
        first = program * np.int32(tiling.flat_width * tiling.lane_rows)
        first = first + arrangement.flat()
        return FlatLanes(arrangement, first, first.astype(jnp.uint32) + base, size)
    (count, columns), at_once = tiling.pieces, tiling.blocks_at_once
    start = arrangement.blocks()
    number = program * np.int32(at_once) + start
    if tiling.blocks % at_once == 0:
        # The program's blocks are in one row: most of its numbers are scalars.
        programs = tiling.blocks // at_once
        block = _rem(program, programs) * np.int32(at_once) + start
        rest, inside = _div(program, programs), None
    else:
        block, rest = _rem(number, tiling.blocks), _div(number, tiling.blocks)
        is_even = tiling.all_blocks % at_once == 0
        inside = None if is_even else number < np.int32(tiling.all_blocks)
    piece, rest = _rem(rest, count), _div(rest, count)
    step, lead = _rem(rest, tiling.steps), _div(rest, tiling.steps)
    row, in_piece = _tiles(arrangement, step, block)
    spread = arrangement.spread
    column = spread(piece * np.int32(columns)) + in_piece
    lanes_inside = None if inside is None else arrangement.expand(inside)
    if tiling.blocks * tiling.block_shape[1] != columns:
        lanes_inside = _both(lanes_inside, in_piece < np.int32(columns), arrangement)
    first = spread(lead * np.int32(tiling.lead_stride))
    first = first + spread(row * np.int32(tiling.row_stride))
    return TiledLanes(
        arrangement,
        first=first + column,
        index=base + _index(arrangement, lead, row, piece, in_piece),
        lead=spread(lead),
        row=row,
        column=column,
        inside=lanes_inside,
        largest=(lead, step, piece, block),
        exist=inside,
    )


def _tiles(arrangement: Arrangement, step, block) -> tuple[jax.Array, jax.Array]:
    """The first rows of the lanes, and their columns within their piece of a row."""
    tiling, spread = arrangement.tiling, arrangement.spread
    height, width = tiling.block_shape
    row = step * np.int32(tiling.step_rows)
    first = spread(block * np.int32(width))
    if tiling.tiles > 1:
        tile_row, tile_column = _z_order(arrangement.tiles(), False)
        first = first + tile_column * np.int32(TILE_COLUMNS)
        if height > TILE_ROWS:
            row = spread(row) + tile_row * np.int32(TILE_ROWS)
    return row, first + arrangement.columns()


def _z_order(number: jax.Array, row_first: bool) -> tuple[jax.Array, jax.Array]:
    """Row and column of the parts of a block, in the order of their doubling.

    The blocks of :mod:`pallas_kernels.layout` double in columns and in rows in turns.
    So the bits of a number, from the lowest, are of column and row in turns.
    """
    places = [jnp.zeros_like(number), jnp.zeros_like(number)]
    for bit in range((MAX_BLOCK_SIZE // TILE_SIZE).bit_length()):
        which = (bit + row_first) % 2
        value = (number >> np.int32(bit)) & np.int32(1)
        places[which] = places[which] | value << np.int32(bit // 2)
    column, row = places
    return row, column


def _index(arrangement: Arrangement, lead, row, piece, column) -> jax.Array:
    """The index in the leaf, from the shard's first element, of places in the shard."""
    tiling = arrangement.tiling

    def part(axis, coordinate):
        return coordinate.astype(jnp.uint32) * np.uint32(tiling.index_stride(axis))

    row_axis = tiling.layout.row_axis
    if tiling.layout.is_folded:
        in_rows = row.astype(jnp.uint32) * np.uint32(FOLD)
    else:
        in_rows = part(row_axis, row)
    total = _spread(tiling, range(row_axis), lead)
    if tiling.pieces[0] > 1:
        total = total + _spread(
            tiling, range(row_axis + 1, len(tiling.shape) - 1), piece
        )
    total = arrangement.spread(total) + arrangement.spread(in_rows)
    return total + column.astype(jnp.uint32)


def _spread(tiling: Tiling, axes: range, number: jax.Array) -> jax.Array:
    """The index of a number that counts through some axes of the shard."""
    total = jnp.zeros_like(number, jnp.uint32)
    for axis in reversed(axes):
        size = tiling.shape[axis]
        place = _rem(number, size) if axis > axes.start else number
        stride = np.uint32(tiling.index_stride(axis))
        total = total + place.astype(jnp.uint32) * stride
        number = _div(number, size)
    return total


def _both(
    inside: jax.Array | None, other: jax.Array, arrangement: Arrangement
) -> jax.Array:
    """The lanes of which both masks hold; None holds of all."""
    other = arrangement.expand(other)
    return other if inside is None else other & inside


def _bounded(offset: jax.Array, size: int) -> jax.Array:
    """The same offset, known to the compiler to be below 2^30.

    A constant that is added to it then cannot wrap around, and becomes a part of the
    instructions that load and store. What is known of neighbouring offsets survives
    only if all that makes them different has been added before.
    """
    if size > 2**30:
        return offset
    return lax.rem(
        offset.astype(jnp.uint32), jnp.full(offset.shape, 2**30, jnp.uint32)
    ).astype(jnp.int32)


def _div(x: jax.Array, by: int) -> jax.Array:
    return x if by == 1 else lax.div(x, jnp.full_like(x, by))


def _rem(x: jax.Array, by: int) -> jax.Array:
    return jnp.zeros_like(x) if by == 1 else lax.rem(x, jnp.full_like(x, by))
