"""Where blocks and elements are in a leaf, by their numbers."""

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
    """Where blocks are: int32 of blocks, or of lanes. Some may be scalars.

    Args:
      lead: which matrix; None where all matrices are one.
      step: which step down its rows.
      piece: which piece of the row; None where there is only one.
      block: which block of the piece.
    """

    lead: jax.Array | None
    step: jax.Array
    piece: jax.Array | None
    block: jax.Array


def place_of(
    tiling: BlockTiling, numbers: BlockNumbers, program: jax.Array, start: jax.Array
) -> Place:
    """Where a program's largest blocks are, by their numbers in the program."""
    at_once = tiling.blocks_at_once
    if numbers.all_blocks is None and tiling.blocks % at_once == 0:
        # The program's blocks are in one row: most of its numbers are scalars.
        of_a_row = Divisor(np.int32(tiling.blocks // at_once))
        rest, part = of_a_row.divide(program)
        block = part * np.int32(at_once) + start
    else:
        number = program * np.int32(at_once) + start
        if numbers.all_blocks is not None:
            # Of those beyond the last, the place is the last's, and may be read.
            number = jnp.minimum(number, numbers.all_blocks - np.int32(1))
        rest, block = numbers.blocks.divide(number)
    piece = lead = None
    if numbers.pieces is not None:
        rest, piece = numbers.pieces.divide(rest)
    if numbers.steps is not None:
        lead, rest = numbers.steps.divide(rest)
    return Place(lead, rest, piece, block)


def z_order(number: jax.Array, row_first: bool) -> tuple[jax.Array, jax.Array]:
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


def index_of(
    tiling: BlockTiling,
    numbers: BlockNumbers,
    spread: Callable,
    place: Place,
    row: jax.Array,
    column: jax.Array,
) -> jax.Array:
    """The index in the leaf, from the shard's first element, of elements of the shard.

    Args:
      tiling: of the shard.
      numbers: of its shape.
      spread: makes arrays of blocks broadcast to one of lanes.
      place: of their blocks.
      row, column: of the elements, in the matrix and in the piece of a row.
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
    """The index of a number that counts through some axes of the shard."""
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
    """Offsets of so many rows from ``start`` on, if the first is of row 0."""
    if isinstance(start, jax.Array):  # not of the only chunk, which starts at 0
        first = first + start * stride
    first = _bounded(first, tiling)
    return [first + np.int32(number) * stride for number in range(count)]


def _bounded(offset: jax.Array, tiling: Tiling) -> jax.Array:
    """The same offset, known to the compiler to be below 2^30.

    A constant that is added to it then cannot wrap around, and becomes a part of the
    instructions that load and store. What is known of neighbouring offsets survives
    only if all that makes them different has been added before.
    """
    if not tiling.is_below_2_30:
        return offset
    return lax.rem(
        offset.astype(jnp.uint32), jnp.full(offset.shape, 2**30, jnp.uint32)
    ).astype(jnp.int32)
