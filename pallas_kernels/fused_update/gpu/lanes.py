"""Where one program's lanes and blocks are, and which of them exist."""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.fused_update.gpu.kernel import Tiling
from pallas_kernels.layout import (
    FOLD,
    MAX_BLOCK_SIZE,
    TILE_COLUMNS,
    TILE_ROWS,
    TILE_SIZE,
    block_shape,
    period,
    word_rows,
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
        """An array of lanes, as a loop carries it."""
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
    """

    number: int
    index: jax.Array
    offset: jax.Array
    exists: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Lanes:
    """One program's lanes.

    Arrays have an element per lane, or broadcast to that.

    Args:
      arrangement: of the lanes in arrays.
      first: int32, offsets of row 0.
      index: uint32, indices of row 0.
      inside: bool, or None where every lane exists in row 0.
    """

    arrangement: Arrangement
    first: jax.Array
    index: jax.Array
    inside: jax.Array | None

    @property
    def tiling(self) -> Tiling:
        """What the lanes walk over."""
        return self.arrangement.tiling

    def rows(self, chunk: jax.Array) -> list[Row]:
        """The rows of a chunk, by its number."""
        tiling, start = self.tiling, chunk * np.int32(self.tiling.chunk_rows)
        first = _bounded(self.first + start * np.int32(tiling.row_stride), tiling.size)
        numbers, rows = range(tiling.chunk_rows), []
        offsets = [first + np.int32(n * tiling.row_stride) for n in numbers]
        for number, offset in zip(numbers, offsets, strict=True):
            row = start + np.int32(number)
            before = row.astype(jnp.uint32) * np.uint32(tiling.row_index_stride)
            index, exists = self.index + before, self._exists(row, offset)
            rows.append(Row(number, index, offset, exists))
        return rows

    def _exists(self, row: jax.Array, offset: jax.Array) -> jax.Array | None:
        """Which lanes have an element on a row; None if all have."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class FlatLanes(Lanes):
    """One program's lanes of a flat tiling.

    Args:
      size: int32 scalar, how many elements there are; None if the tiling has as many.
    """

    size: jax.Array | None

    def _exists(self, row: jax.Array, offset: jax.Array) -> jax.Array | None:
        tiling, size = self.tiling, self.size
        if size is None:
            if tiling.size % (tiling.row_stride * tiling.lane_rows) == 0:
                return None
            size = np.int32(tiling.size)
        return offset < size


@dataclasses.dataclass(frozen=True)
class TiledLanes(Lanes):
    """One program's lanes of a tiling by tiles.

    Args:
      lead, row, column: int32, places of row 0: which matrix, which row of it, and
        where in the row.
      largest: lead, step, piece and block, int32 scalars or of blocks: of their largest
        blocks, which matrix, which step down its rows, which piece of the row, and
        which block of the piece.
      exist: which of these do, bool of blocks; None if all do.
    """

    lead: jax.Array
    row: jax.Array
    column: jax.Array
    largest: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
    exist: jax.Array | None

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

    def words(
        self, bits: int, start: jax.Array, count: int
    ) -> list[tuple[jax.Array, jax.Array | None]]:
        """Offsets of the words from ``start`` on, and which lanes have them."""
        tiling = self.tiling
        height, words = period(bits)
        row = lax.div(self.row, jnp.full_like(self.row, height)) * np.int32(words)
        rows = tiling.share(word_rows(tiling.layout.rows, bits))
        first = self.lead * np.int32(rows) + self.arrangement.spread(row + start)
        first = first * np.int32(tiling.row_stride) + self.column
        first = _bounded(first, tiling.lead * rows * tiling.row_stride)
        offsets = [first + np.int32(n * tiling.row_stride) for n in range(count)]
        masks = [self.inside] * count
        if tiling.steps * tiling.step_rows * bits != rows * 32:
            exist = (row + (start + np.int32(n)) < np.int32(rows) for n in range(count))
            masks = [_both(self.inside, each, self.arrangement) for each in exist]
        return list(zip(offsets, masks, strict=True))

    def _exists(self, row: jax.Array, offset: jax.Array) -> jax.Array | None:
        tiling, row = self.tiling, self.row + row
        if tiling.layout.is_folded:
            length = tiling.shape[-1]
            if length % (FOLD * tiling.step_rows) == 0:
                return self.inside
            first = self.arrangement.spread(row * np.int32(FOLD))
            exists = first + self.column < np.int32(length)
        else:
            if tiling.rows % tiling.step_rows == 0:
                return self.inside
            exists = row < np.int32(tiling.rows)
        return _both(self.inside, exists, self.arrangement)


@dataclasses.dataclass(frozen=True)
class BlockPlaces:
    """Where the blocks of a program's lanes are in arrays with one element per block.

    Arrays are of the largest blocks, or of their parts; or they broadcast to that.

    Args:
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

    def of_chunk(self, chunk: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Offsets of the blocks that a chunk of rows crosses, and which exist."""
        tiling, size = self.arrangement.tiling, self.block_size
        height, row = block_shape(size)[0], self.row + chunk
        rows = tiling.share(math.ceil(tiling.layout.rows / height))
        row_blocks = np.int32(tiling.pieces[0] * tiling.blocks_of(size))
        offset = (self.lead * np.int32(rows) + row) * row_blocks + self.place
        mask = self.inside
        if tiling.steps * tiling.step_rows != rows * height:
            exist = jnp.broadcast_to(row < np.int32(rows), self.place.shape)
            mask = exist if mask is None else exist & mask
        return offset, mask

    def maxima(self, x: jax.Array) -> jax.Array:
        """The maximum over each block of an array of the program's lanes."""
        tiling = self.arrangement.tiling
        return self.arrangement.maxima(x, tiling.block_size // self.block_size)


def lanes_of(
    arrangement: Arrangement,
    program: jax.Array,
    base: jax.Array,
    size: jax.Array | None = None,
) -> Lanes:
    """The lanes of one program.

    Args:
      arrangement: of the lanes.
      program: int32 scalar, which program.
      base: uint32 scalar, index of the array's first element.
      size: int32 scalar, the array's elements if they are fewer than a flat tiling's.
    """
    tiling = arrangement.tiling
    if tiling.is_flat:
        first = program * np.int32(tiling.row_stride * tiling.lane_rows)
        first = first + arrangement.flat()
        index = first.astype(jnp.uint32) + base
        return FlatLanes(arrangement, first, index, None, size)
    (count, columns), at_once = tiling.pieces, tiling.blocks_at_once
    start = arrangement.blocks()
    number = program * np.int32(at_once) + start
    if tiling.blocks % at_once == 0:
        # The program's blocks are in one row: most of its numbers are scalars.
        programs = tiling.blocks // at_once
        block = _rem(program, programs) * np.int32(at_once) + start
        rest, exist = _div(program, programs), None
    else:
        block, rest = _rem(number, tiling.blocks), _div(number, tiling.blocks)
        is_even = tiling.all_blocks % at_once == 0
        exist = None if is_even else number < np.int32(tiling.all_blocks)
    piece, rest = _rem(rest, count), _div(rest, count)
    step, lead = _rem(rest, tiling.steps), _div(rest, tiling.steps)
    spread, row = arrangement.spread, step * np.int32(tiling.step_rows)
    in_piece = spread(block * np.int32(tiling.block_shape[1]))
    if tiling.tiles > 1:
        tile_row, tile_column = _z_order(spread(arrangement.parts(tiling.tiles)), False)
        in_piece = in_piece + tile_column * np.int32(TILE_COLUMNS)
        if tiling.block_shape[0] > TILE_ROWS:
            row = spread(row) + tile_row * np.int32(TILE_ROWS)
    in_piece = in_piece + arrangement.columns()
    column = spread(piece * np.int32(columns)) + in_piece
    inside = None if exist is None else arrangement.expand(exist)
    if tiling.blocks * tiling.block_shape[1] != columns:
        inside = _both(inside, in_piece < np.int32(columns), arrangement)
    lead_stride = math.prod(tiling.shape[tiling.layout.row_axis :])
    first = spread(lead * np.int32(lead_stride))
    first = first + spread(row * np.int32(tiling.row_stride))
    return TiledLanes(
        arrangement,
        first=first + column,
        index=base + _index(arrangement, lead, row, piece, in_piece),
        inside=inside,
        lead=spread(lead),
        row=row,
        column=column,
        largest=(lead, step, piece, block),
        exist=exist,
    )


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
    tiling, row_axis = arrangement.tiling, arrangement.tiling.layout.row_axis
    in_rows = row.astype(jnp.uint32) * np.uint32(tiling.row_index_stride)
    total = _spread(tiling, range(row_axis), lead)
    if tiling.pieces[0] > 1:
        between = range(row_axis + 1, len(tiling.shape) - 1)
        total = total + _spread(tiling, between, piece)
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
    """The lanes for which both masks hold; None holds for all."""
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
