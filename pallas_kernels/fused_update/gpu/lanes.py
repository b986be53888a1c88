"""The lanes and blocks of one program: their offsets, indices and masks.

An :class:`Arrangement` is the interface with which a launcher arranges, loads and
stores lanes.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.fused_update.gpu.instructions import Instructions
from pallas_kernels.fused_update.gpu.tiling import (
    BlockNumbers,
    BlockTiling,
    Divisor,
    Numbers,
    Scalar,
    Tiling,
)
from pallas_kernels.layout import (
    FOLD,
    MAX_BLOCK_SIZE,
    TILE_COLUMNS,
    TILE_ROWS,
    TILE_SIZE,
    block_shape,
    period,
)


class Arrangement(typing.Protocol):
    """The arrangement of a program's lanes in arrays, which depends on the launcher.

    The tiles of a block are neighbors, sorted by index.

    *Arrays of lanes* have the shape :attr:`shape`. *Arrays of blocks* have an element
    for each of the program's largest blocks, and *arrays of parts* have an element for
    each smaller block in them. Both may have fewer elements than there are lanes;
    :meth:`spread` makes them broadcast. Flat tilings have neither blocks nor parts.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an array with one element per lane."""
        ...

    @property
    def instructions(self) -> Instructions | None:
        """The launcher's instructions; None if XLA runs the operations."""
        ...

    @property
    def marks_branches(self) -> bool:
        """Whether :meth:`.program.Memory._marked` must tell branches apart."""
        ...

    def flat(self) -> jax.Array:
        """Return the indices of a flat tiling's lanes, as an int32 array of lanes."""
        ...

    def blocks(self) -> jax.Array:
        """Return the indices of the largest blocks, as an int32 array of blocks."""
        ...

    def parts(self, count: int) -> jax.Array:
        """Return the indices of the ``count`` parts in a block, as an int32 array."""
        ...

    def columns(self) -> jax.Array:
        """Return the column of each lane in its tile, as an int32 array of lanes."""
        ...

    def carried(self, x: jax.Array) -> jax.Array:
        """Return an array of lanes with the canonical layout and sign of its dtype.

        Loops need this for arrays that they carry, and comparisons depend on the sign.
        """
        ...

    def spread(self, x: jax.Array) -> jax.Array:
        """Reshape a scalar or an array so that it broadcasts to arrays of lanes."""
        ...

    def over_parts(self, x: jax.Array) -> jax.Array:
        """Reshape a scalar or array of blocks so that it broadcasts to parts."""
        ...

    def expand(self, x: jax.Array) -> jax.Array:
        """Broadcast a scalar or an array to an array of lanes."""
        ...

    def maxima(self, x: jax.Array, parts: int) -> jax.Array:
        """Return the maxima of ``x`` over each of the ``parts`` parts of each block."""
        ...

    def load(self, ref, access, leaf: int) -> jax.Array:
        """Load elements of one of a leaf's arrays, as an array of lanes or of parts.

        Args:
          ref: reference to the flat array, or to a stack of flat layers.
          access: the elements, an :class:`.program.Access`.
          leaf: the index of the leaf in the kernel.
        """
        ...

    def store(self, ref, access, value: jax.Array, leaf: int) -> None:
        """Store elements of one of a leaf's arrays; see :meth:`load`."""
        ...


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a program's lanes.

    Args:
      number: the index of the row in its chunk.
      index: the elements' indices in the leaf.
      offset: the elements' offsets in plain arrays.
      exists: mask of the lanes that have an element; None if all have one.
      readable: mask of the lanes whose offsets can be read, even if they are offsets of
        another lane's elements; None if all can be read.
    """

    number: int
    index: jax.Array
    offset: jax.Array
    exists: jax.Array | None
    readable: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Lanes:
    """The lanes of one program, in a flat tiling.

    Arrays have an element per lane, or broadcast to this shape.

    Args:
      tiling: the tiling of the leaf or shard.
      first: int32, the lanes' offsets in row 0.
      index: uint32, the lanes' indices in row 0.
      row_stride: the distance between the offsets of consecutive rows.
      row_index: the distance between the indices of consecutive rows, modulo 2^32.
      inside: mask of the lanes that exist in row 0; None if all exist.
      readable: see :class:`Row`.
      size: the number of elements of the array; None if all lanes exist, or in a
        tiling by blocks.
    """

    tiling: Tiling
    first: jax.Array
    index: jax.Array
    row_stride: Scalar
    row_index: Scalar
    inside: jax.Array | None
    readable: jax.Array | None
    size: Scalar | None

    def rows(self, chunk: Scalar) -> list[Row]:
        """Return the rows of the chunk with the index ``chunk``."""
        tiling, start = self.tiling, chunk * np.int32(self.tiling.chunk_rows)
        count, stride = tiling.chunk_rows, self.row_stride
        offsets = offsets_of_rows(self.first, start, stride, count, tiling)
        spacing, rows = self.row_index.astype(jnp.uint32), []
        pairs = zip(offsets, self._exist(start, offsets), strict=True)
        for number, (offset, exists) in enumerate(pairs):
            row = jnp.uint32(start + np.int32(number))
            index = self.index + row * spacing
            readable = self.readable if exists is self.inside else exists
            rows.append(Row(number, index, offset, exists, readable))
        return rows

    def _exist(
        self, start: Scalar, offsets: Sequence[jax.Array]
    ) -> Sequence[jax.Array | None]:
        """Return masks of the lanes that exist in each row, starting at ``start``."""
        return [None if self.size is None else offset < self.size for offset in offsets]


@dataclasses.dataclass(frozen=True)
class BlockLanes(Lanes):
    """One program's lanes in a tiling by blocks.

    Args:
      arrangement: the arrangement of the lanes in arrays.
      numbers: the leaf's sizes and strides.
      lead: int32, the index of each lane's matrix; None if all matrices count as one.
      row, column: int32, each lane's row and column in its matrix, for row 0 of the
        program.
      program: int32 scalar, the index of the program in the leaf.
      numbers_of_blocks: int32 array of blocks, the indices of the program's largest
        blocks in the leaf.
      exist: mask of the largest blocks that exist; None if all exist.
    """

    tiling: BlockTiling
    arrangement: Arrangement
    numbers: BlockNumbers
    lead: jax.Array | None
    row: jax.Array
    column: jax.Array
    program: jax.Array
    numbers_of_blocks: jax.Array
    exist: jax.Array | None

    def blocks_of(self, block_size: int) -> "BlockPlaces":
        """Return the places of blocks of this size in the program's largest blocks."""
        arrangement, tiling = self.arrangement, self.tiling
        height, width = block_shape(block_size)
        exist, number = self.exist, self.numbers_of_blocks
        lead, step, piece, block = place_of(
            tiling, self.numbers, self.program, arrangement.blocks()
        )
        blocks = self.numbers.by_size[block_size].blocks
        row = step * np.int32(tiling.step_rows // height)
        of_block = functools.partial(BlockPlaces, self, block_size)
        if block_size == tiling.block_size:
            # Indices of blocks can be their offsets. If the blocks of a program are in
            # one row, it is cheaper to compute most of each offset as a scalar.
            has_end = self.numbers.all_blocks is not None
            is_next = has_end and height == tiling.step_rows
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
        """Return ``(offsets, mask)`` of each of ``count`` words, from ``start``."""
        tiling, stride = self.tiling, self.row_stride
        height, words = period(bits)
        row = lax.div(self.row, jnp.full_like(self.row, height)) * np.int32(words)
        first, rows = self.arrangement.spread(row), self.numbers.word_rows[bits]
        if self.lead is not None:
            first = self.lead * rows + first
        first = first * stride + self.column
        offsets = offsets_of_rows(first, start, stride, count, tiling)
        masks = [self.inside] * count
        if tiling.cuts_words(bits):
            exist = (row + (start + np.int32(n)) < rows for n in range(count))
            masks = [_both(self.inside, each, self.arrangement) for each in exist]
        return list(zip(offsets, masks, strict=True))

    def rows_left(self, start: Scalar) -> jax.Array | None:
        """Return the number of rows left from ``start``, or None if all rows exist.

        The number can be negative. It ignores whether a lane is beyond the last column.
        """
        rows, row = self.numbers.rows, self.row + start
        if rows is None:
            return None
        if not self.tiling.layout.is_folded:
            return rows - row
        first = self.arrangement.spread(row * np.int32(FOLD)) + self.column
        return (rows + np.int32(FOLD - 1) - first) >> np.int32(FOLD.bit_length() - 1)

    def _exist(
        self, start: Scalar, offsets: Sequence[jax.Array]
    ) -> Sequence[jax.Array | None]:
        left = self.rows_left(start)
        if left is None:
            return [self.inside] * len(offsets)
        left = self.arrangement.expand(left)
        if self.inside is not None:
            # Each row's mask is then a single comparison.
            left = self.arrangement.carried(jnp.where(self.inside, left, np.int32(0)))
        return [left > np.int32(number) for number in range(len(offsets))]


@dataclasses.dataclass(frozen=True)
class BlockPlaces:
    """The places of a program's blocks in arrays with one element per block.

    Arrays have an element for each of the largest blocks or for each of their parts, or
    broadcast to this shape.

    Args:
      lanes: the program's lanes.
      block_size: number of elements in a block.
      lead: int32, the index of each block's matrix; None if all matrices count as one.
      row: int32, the index of each block's row of blocks in its matrix.
      place: int32, the index of each block in its row.
      inside: mask of the blocks that exist in row 0; None if all exist.
      offset: int32, the blocks' offsets if they are known; None to compute them from
        lead, row and place.
    """

    lanes: BlockLanes
    block_size: int
    lead: jax.Array | None
    row: jax.Array
    place: jax.Array
    inside: jax.Array | None
    offset: jax.Array | None = None

    def of_chunk(self, chunk: Scalar) -> tuple[jax.Array, jax.Array | None]:
        """Return ``(offsets, mask)`` of the blocks in a chunk of rows."""
        tiling, all_numbers = self.lanes.tiling, self.lanes.numbers
        numbers = all_numbers.by_size[self.block_size]
        row, offset, mask = self.row + chunk, self.offset, self.inside
        if offset is None:
            row_blocks = numbers.blocks
            if all_numbers.pieces is not None:
                row_blocks = row_blocks * all_numbers.pieces.by
            first = row if self.lead is None else self.lead * numbers.rows + row
            offset = first * row_blocks + self.place
        if tiling.cuts_block_rows(self.block_size):
            exist = jnp.broadcast_to(row < numbers.rows, self.place.shape)
            mask = exist if mask is None else exist & mask
        return offset, mask


def lanes_of(
    tiling: Tiling,
    arrangement: Arrangement,
    program: jax.Array,
    base: jax.Array,
    numbers: Numbers,
) -> Lanes:
    """Return the lanes of one program.

    Args:
      tiling: the tiling of the leaf or shard.
      arrangement: the arrangement of the lanes in arrays.
      program: int32 scalar, the index of the program in the leaf.
      base: uint32 scalar, the index of the array's first element.
      numbers: the leaf's sizes and strides.
    """
    if isinstance(tiling, BlockTiling):
        of_blocks = typing.cast(BlockNumbers, numbers)
        return _block_lanes(tiling, arrangement, program, base, of_blocks)
    size, stride = typing.cast(Scalar | None, numbers), np.int32(tiling.row_stride)
    first = program * np.int32(tiling.program_size) + arrangement.flat()
    index = first.astype(jnp.uint32) + base
    return Lanes(tiling, first, index, stride, stride, None, None, size)


def _block_lanes(
    tiling: BlockTiling,
    arrangement: Arrangement,
    program: jax.Array,
    base: jax.Array,
    numbers: BlockNumbers,
) -> BlockLanes:
    """Return the lanes of one program in a tiling by blocks; see :func:`lanes_of`."""
    spread = arrangement.spread
    number = program * np.int32(tiling.blocks_at_once) + arrangement.blocks()
    # Spread before the arithmetic, because Triton changes the layout of spread arrays.
    wide, exist, inside = spread(number), None, None
    if numbers.all_blocks is not None:
        exist = number < numbers.all_blocks
        inside = arrangement.expand(wide < numbers.all_blocks)
    place = place_of(tiling, numbers, program, spread(arrangement.blocks()))
    lead, step, piece, block = place
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
        exists = in_piece < numbers.columns
        readable = inside = _both(inside, exists, arrangement)
    column = in_piece if piece is None else spread(piece * numbers.columns) + in_piece
    row_stride = numbers.row_stride
    if row_stride is None:
        row_stride = np.int32(tiling.row_stride)
    lead_of_lanes = None if lead is None else spread(lead)
    first = spread(row * row_stride)
    if lead is not None:
        first = spread(lead * numbers.lead_stride) + first
    first = first + column
    if tiling.is_whole:
        index, row_index = base + first.astype(jnp.uint32), row_stride
    else:
        index = base + index_of(tiling, numbers, spread, place, row, in_piece)
        row_index = numbers.row_index
    return BlockLanes(
        tiling,
        first=first,
        index=index,
        row_stride=row_stride,
        row_index=row_index,
        inside=inside,
        readable=readable,
        size=None,
        arrangement=arrangement,
        numbers=numbers,
        lead=lead_of_lanes,
        row=row,
        column=column,
        program=program,
        numbers_of_blocks=number,
        exist=exist,
    )


def _both(
    inside: jax.Array | None, other: jax.Array, arrangement: Arrangement
) -> jax.Array:
    """Return the conjunction of two masks; ``inside`` may be None for all lanes."""
    other = arrangement.expand(other)
    return other if inside is None else other & inside


class Place(typing.NamedTuple):
    """Positions of blocks, as int32 arrays of blocks or of lanes, or as scalars.

    Args:
      lead: the index of the matrix; None if all matrices count as one.
      step: the index of the step in the matrix.
      piece: the index of the piece in the row; None if a row has one piece.
      block: the index of the block in the piece.
    """

    lead: jax.Array | None
    step: jax.Array
    piece: jax.Array | None
    block: jax.Array


def place_of(
    tiling: BlockTiling, numbers: BlockNumbers, program: jax.Array, start: jax.Array
) -> Place:
    """Return the positions of the blocks with the indices ``start`` in a program."""
    at_once = tiling.blocks_at_once
    if numbers.all_blocks is None and tiling.blocks % at_once == 0:
        # The program's blocks are in one row, so most of the values are scalars.
        of_a_row = Divisor(np.int32(tiling.blocks // at_once))
        rest, part = of_a_row.divide(program)
        block = part * np.int32(at_once) + start
    else:
        number = program * np.int32(at_once) + start
        if numbers.all_blocks is not None:
            # Blocks beyond the last one get its position, which can be read.
            number = jnp.minimum(number, numbers.all_blocks - np.int32(1))
        rest, block = numbers.blocks.divide(number)
    piece = lead = None
    if numbers.pieces is not None:
        rest, piece = numbers.pieces.divide(rest)
    if numbers.steps is not None:
        lead, rest = numbers.steps.divide(rest)
    return Place(lead, rest, piece, block)


def z_order(number: jax.Array, row_first: bool) -> tuple[jax.Array, jax.Array]:
    """Return the rows and columns of parts of a block, given their Z-order indices.

    The blocks of :mod:`pallas_kernels.layout` double alternately in columns and in
    rows. Starting from the lowest, the bits of a part's index therefore belong
    alternately to its column and to its row (first to the row if ``row_first``).
    """
    places = [jnp.zeros_like(number), jnp.zeros_like(number)]
    for bit in range((MAX_BLOCK_SIZE // TILE_SIZE).bit_length()):
        which = (bit + row_first) % 2
        value = (number >> np.int32(bit)) & np.int32(1)
        places[which] = places[which] | value << np.int32(bit // 2)
    column, row = places
    return row, column


def index_of(
    tiling: BlockTiling,
    numbers: BlockNumbers,
    spread: Callable,
    place: Place,
    row: jax.Array,
    column: jax.Array,
) -> jax.Array:
    """Return the elements' indices in the leaf, minus the shard's first index.

    Args:
      tiling: the tiling of the shard.
      numbers: the shard's sizes and strides.
      spread: see :meth:`Arrangement.spread`.
      place: the positions of the elements' blocks.
      row: the elements' rows in the matrix.
      column: the elements' columns in the piece of a row.
    """
    row_axis, total = tiling.layout.row_axis, column.astype(jnp.uint32)
    total = spread(_scaled(row, numbers.row_index)) + total
    between = range(row_axis + 1, len(tiling.shape) - 1)
    for number, stride, axes in (
        (place.lead, numbers.lead_index, range(row_axis)),
        (place.piece, numbers.piece_index, between),
    ):
        if number is not None and tiling.has_linear_index:
            total = spread(_scaled(number, stride)) + total
        elif number is not None:
            total = spread(_counted(tiling, axes, number)) + total
    return total


def _scaled(number: jax.Array, stride: Scalar) -> jax.Array:
    return number.astype(jnp.uint32) * stride.astype(jnp.uint32)


def _counted(tiling: BlockTiling, axes: range, number: jax.Array) -> jax.Array:
    """Return the index in the leaf of position ``number`` in the shard's ``axes``."""
    total = jnp.zeros_like(number, jnp.uint32)
    for axis in reversed(axes):
        place = number
        if axis > axes.start:
            number, place = Divisor(np.int32(tiling.shape[axis])).divide(number)
        stride = np.uint32(tiling.index_stride(axis))
        total = total + place.astype(jnp.uint32) * stride
    return total


def offsets_of_rows(
    first: jax.Array, start: Scalar, stride: Scalar, count: int, tiling: Tiling
) -> list[jax.Array]:
    """Return the offsets of ``count`` rows. ``first`` has the offsets of row 0."""
    if isinstance(start, jax.Array):  # otherwise there is one chunk, which starts at 0
        first = first + start * stride
    if tiling.is_below_2_30:
        # The remainder tells the compiler that the offset is below 2^30. Adding a
        # constant then cannot overflow, so the constant becomes part of load and store
        # instructions. The compiler recognizes offsets as neighbors only if the terms
        # in which they differ are already part of the offset.
        offset = first.astype(jnp.uint32)
        bound = jnp.full(first.shape, 2**30, jnp.uint32)
        first = lax.rem(offset, bound).astype(jnp.int32)
    return [first + np.int32(number) * stride for number in range(count)]
