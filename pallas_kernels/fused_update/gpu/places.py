"""Positions of blocks and elements in a leaf, computed from their indices."""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.fused_update.gpu.numbers import BlockNumbers, Divisor, Scalar
from pallas_kernels.fused_update.gpu.tiling import BlockTiling, Tiling
from pallas_kernels.layout import MAX_BLOCK_SIZE, TILE_SIZE


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
      spread: see :meth:`.arrangements.Arrangement.spread`.
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
