"""Where one program's lanes and blocks are, and which of them exist."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bitfields.fields import period
from pallas_kernels.fused_update.tiling import Tiling
from pallas_kernels.layout import FOLD, TILE_COLUMNS, TILE_ROWS


@dataclasses.dataclass(frozen=True)
class FlatLanes:
    """One program's lanes of a flat tiling.

    Args:
      tiling: static description.
      first: int32 vector, offsets of row 0.
      index: uint32 vector, indices of row 0.
      size: int32 scalar, how many elements there are; None if the tiling has as many.
    """

    tiling: Tiling
    first: jax.Array
    index: jax.Array
    size: jax.Array | None = None

    inside: typing.ClassVar[None] = None

    def offset(self, start: jax.Array, row: int) -> jax.Array:
        """Where the elements of the row ``start + row`` are."""
        tiling = self.tiling
        first = self.first + start * jnp.int32(tiling.flat_width)
        return _bounded(first, tiling.size) + jnp.int32(row * tiling.flat_width)

    def element(self, row: jax.Array) -> jax.Array:
        """The index of a row's elements."""
        return self.index + row.astype(jnp.uint32) * jnp.uint32(self.tiling.flat_width)

    def exists(self, start: jax.Array, row: int) -> jax.Array | None:
        """Which lanes have an element on the row ``start + row``; None if all have."""
        tiling, size = self.tiling, self.size
        if size is None:
            if tiling.size % (tiling.flat_width * tiling.lane_rows) == 0:
                return None
            size = jnp.int32(tiling.size)
        return self.offset(start, row) < size


@dataclasses.dataclass(frozen=True)
class TiledLanes:
    """One program's lanes of a tiling by tiles.

    Arrays are of ``tiling.lanes_shape``, or broadcast to it.

    Args:
      tiling: static description.
      first: int32, offsets of row 0.
      index: uint32, indices of row 0.
      lead, row, column: int32, places of row 0: which matrix, which row of it, and
        where in the row.
      inside: bool, or None where every lane exists in row 0.
      blocks: places of their blocks.
    """

    tiling: Tiling
    first: jax.Array
    index: jax.Array
    lead: jax.Array
    row: jax.Array
    column: jax.Array
    inside: jax.Array | None
    blocks: "BlockPlaces"

    def offset(self, start: jax.Array, row: int) -> jax.Array:
        """Where the elements of the row ``start + row`` are."""
        stride = self.tiling.row_stride
        first = _bounded(self.first + start * jnp.int32(stride), self.tiling.size)
        return first + jnp.int32(row * stride)

    def word_offset(self, bits: int, start: jax.Array, word: int) -> jax.Array:
        """Where the lane's word ``start + word`` is, of fields of ``bits`` bits."""
        tiling = self.tiling
        rows = tiling.word_rows(bits)
        row = _expanded(self._word_row(bits) + start, tiling)
        row = self.lead * jnp.int32(rows) + row
        first = row * jnp.int32(tiling.row_stride) + self.column
        first = _bounded(first, tiling.lead * rows * tiling.row_stride)
        return first + jnp.int32(word * tiling.row_stride)

    def has_word(self, bits: int, word: jax.Array) -> jax.Array | None:
        """Which lanes have this word; None if all have."""
        tiling = self.tiling
        rows = tiling.word_rows(bits)
        if tiling.steps * tiling.step_rows * bits == rows * 32:
            return self.inside
        there = self._word_row(bits) + word < jnp.int32(rows)
        return _mask(self.inside, there, tiling)

    def _word_row(self, bits: int) -> jax.Array:
        """Which row of words the lane's first is in."""
        count, height = period(bits)[1], period(bits)[0]
        return lax.div(self.row, jnp.full_like(self.row, height)) * jnp.int32(count)

    def element(self, row: jax.Array) -> jax.Array:
        """The index of a row's elements."""
        tiling = self.tiling
        stride = FOLD
        if not tiling.layout.is_folded:
            stride = tiling.index_stride(tiling.layout.row_axis)
        return self.index + row.astype(jnp.uint32) * jnp.uint32(stride)

    def exists(self, start: jax.Array, row: int) -> jax.Array | None:
        """Which lanes have an element on the row ``start + row``; None if all have."""
        tiling = self.tiling
        here = self.row + (start + jnp.int32(row))
        if tiling.layout.is_folded:
            length = tiling.shape[-1]
            if length % (FOLD * tiling.step_rows) == 0:
                return self.inside
            place = _expanded(here * jnp.int32(FOLD), tiling) + self.column
            return _mask(self.inside, place < jnp.int32(length), tiling)
        if tiling.rows % tiling.step_rows == 0:
            return self.inside
        return _mask(self.inside, here < jnp.int32(tiling.rows), tiling)


@dataclasses.dataclass(frozen=True)
class BlockPlaces:
    """Where the blocks of a program's lanes are in arrays with one element per block.

    Args:
      tiling: static description.
      lead, row, place: int32 scalars or vectors of blocks: which matrix, which row of
        blocks of it, and where among the blocks of a row.
      inside: bool vector, or None where every block exists in row 0.
    """

    tiling: Tiling
    lead: jax.Array
    row: jax.Array
    place: jax.Array
    inside: jax.Array | None

    def offset(self, chunk: jax.Array) -> jax.Array:
        """Where the blocks are that a chunk of rows crosses."""
        tiling = self.tiling
        row = self.lead * jnp.int32(tiling.block_rows) + (self.row + chunk)
        return row * jnp.int32(tiling.pieces[0] * tiling.blocks) + self.place

    def exists(self, chunk: jax.Array) -> jax.Array | None:
        """Which blocks exist; None if all do."""
        tiling = self.tiling
        if tiling.steps * tiling.step_rows == tiling.block_rows * tiling.block_shape[0]:
            return self.inside
        there = self.row + chunk < jnp.int32(tiling.block_rows)
        there = jnp.broadcast_to(there, self.place.shape)
        return there if self.inside is None else there & self.inside


Lanes = FlatLanes | TiledLanes


def lanes_of(
    tiling: Tiling, program: jax.Array, base: jax.Array, size: jax.Array | None = None
) -> Lanes:
    """The lanes of one program.

    Args:
      tiling: of the array.
      program: int32 scalar, which program.
      base: uint32 scalar, index of the array's first element.
      size: int32 scalar, the array's elements if they are fewer than a flat tiling's.
    """
    shape = tiling.lanes_shape
    if tiling.is_flat:
        first = program * jnp.int32(tiling.flat_width * tiling.lane_rows)
        first = first + lax.iota(jnp.int32, tiling.flat_width)
        return FlatLanes(tiling, first, first.astype(jnp.uint32) + base, size)
    count, columns = tiling.pieces
    start = lax.iota(jnp.int32, shape[0])
    number = program * jnp.int32(shape[0]) + start
    if tiling.blocks % shape[0] == 0:
        # The program's blocks are in one row: most of its numbers are scalars.
        parts = tiling.blocks // shape[0]
        block = _rem(program, parts) * jnp.int32(shape[0]) + start
        rest, inside = _div(program, parts), None
    else:
        block, rest = _rem(number, tiling.blocks), _div(number, tiling.blocks)
        is_even = tiling.all_blocks % shape[0] == 0
        inside = None if is_even else number < jnp.int32(tiling.all_blocks)
    piece, rest = _rem(rest, count), _div(rest, count)
    step, lead = _rem(rest, tiling.steps), _div(rest, tiling.steps)
    places = BlockPlaces(
        tiling,
        lead,
        row=step * jnp.int32(tiling.step_rows // tiling.block_shape[0]),
        place=piece * jnp.int32(tiling.blocks) + block,
        inside=inside,
    )
    row, in_piece = _tiles(tiling, step, block)
    column = _expanded(piece * jnp.int32(columns), tiling) + in_piece
    there = None if inside is None else expand_blocks(inside, tiling)
    if tiling.blocks * tiling.block_shape[1] != columns:
        there = _mask(there, in_piece < jnp.int32(columns), tiling)
    first = _expanded(lead * jnp.int32(tiling.lead_stride), tiling)
    first = first + _expanded(row * jnp.int32(tiling.row_stride), tiling)
    return TiledLanes(
        tiling,
        first=first + column,
        index=base + _index(tiling, lead, row, piece, in_piece),
        lead=_expanded(lead, tiling),
        row=row,
        column=column,
        inside=there,
        blocks=places,
    )


def expand_blocks(x: jax.Array, tiling: Tiling) -> jax.Array:
    """A vector with one element per block of a program, for each of its lanes."""
    return jnp.broadcast_to(_expanded(x, tiling), tiling.lanes_shape)


def _tiles(tiling: Tiling, step, block) -> tuple[jax.Array, jax.Array]:
    """The first rows of the lanes, and their columns within their piece of a row."""
    shape = tiling.lanes_shape
    height, width = tiling.block_shape
    row = step * jnp.int32(tiling.step_rows)
    column = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    first = _expanded(block * jnp.int32(width), tiling)
    if tiling.tiles > 1:
        tile = lax.broadcasted_iota(jnp.int32, (1, tiling.tiles, 1), 1)
        across = width // TILE_COLUMNS
        first = first + _rem(tile, across) * jnp.int32(TILE_COLUMNS)
        if height > TILE_ROWS:
            row = _expanded(row, tiling) + _div(tile, across) * jnp.int32(TILE_ROWS)
    return row, first + column


def _index(tiling: Tiling, lead, row, piece, column) -> jax.Array:
    """The index in the leaf, from the shard's first element, of places in the shard."""

    def part(axis, coordinate):
        return coordinate.astype(jnp.uint32) * jnp.uint32(tiling.index_stride(axis))

    row_axis = tiling.layout.row_axis
    if tiling.layout.is_folded:
        in_rows = row.astype(jnp.uint32) * jnp.uint32(FOLD)
    else:
        in_rows = part(row_axis, row)
    total = _spread(tiling, range(row_axis), lead)
    if tiling.pieces[0] > 1:
        total = total + _spread(
            tiling, range(row_axis + 1, len(tiling.shape) - 1), piece
        )
    total = _expanded(total, tiling) + _expanded(in_rows, tiling)
    return total + column.astype(jnp.uint32)


def _spread(tiling: Tiling, axes: range, number: jax.Array) -> jax.Array:
    """The index of a number that counts through some axes of the shard."""
    total = jnp.zeros_like(number, jnp.uint32)
    for axis in reversed(axes):
        size = tiling.shape[axis]
        place = _rem(number, size) if axis > axes.start else number
        stride = jnp.uint32(tiling.index_stride(axis))
        total = total + place.astype(jnp.uint32) * stride
        number = _div(number, size)
    return total


def _expanded(x: jax.Array, tiling: Tiling) -> jax.Array:
    """A vector with one element per block, so that it broadcasts to lanes."""
    if x.ndim != 1:
        return x
    return x.reshape(-1, *[1] * (len(tiling.lanes_shape) - 1))


def _mask(inside: jax.Array | None, there: jax.Array, tiling: Tiling) -> jax.Array:
    """The lanes that exist and are there."""
    there = expand_blocks(there, tiling)
    return there if inside is None else there & inside


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
