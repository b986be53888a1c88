"""Where packed fields and the scales of blocks lie: version 2 of the storage layout.

An array of rank 1 or more is seen as rows of columns. The columns are its last axis.
The rows are the last axis before it that divides well (:func:`layout_of`):

    array  [..., rows, between..., columns]
    words  [..., ceil(rows / p) w, between..., columns]         k-bit fields
    scales [..., ceil(rows / R), between..., ceil(columns / C)] blocks of R x C values

- *Words*: fields of one column in p consecutive rows share w uint32 words, where
  ``p k == 32 w`` is the smallest such period: 2 rows at 16 bits, 4 at 8, 8 at 4 and 12,
  16 at other even widths that 4 does not divide, 32 at odd ones. Field r of a period is
  bits ``[r k, (r+1) k)`` of its words.
- *Scales*: a block of 32 values is a tile of 8 rows by 4 columns. Larger blocks are
  twice as wide, then also twice as high, and so on: 2048 values are 64 x 32.

Where no axis divides well, as in a vector, the last axis may be *folded* into rows of
32 columns. Its words and its blocks are in the order of these rows.

So all arrays keep the rank. A PartitionSpec of the parameter is one of its words and
scales if shards are whole periods and whole blocks (:meth:`Layout.unit`): with 4, 8, 12
or 16 bits and blocks of 32, multiples of 8 rows and of 4 columns, or of 256 elements of
a folded axis. A thread of a kernel that holds a tile moves 4 neighbouring columns at
once, and neighbouring threads are adjacent. On TPUs the words of 8-bit fields are those
of an array of bytes.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

VERSION = 2
"""The number of this layout; names of state fields end with it."""

TILE_ROWS = 8
TILE_COLUMNS = 4
TILE_SIZE = TILE_ROWS * TILE_COLUMNS
MAX_BLOCK_SIZE = 2048

MAX_ELEMENTS = 2**31 - 1
"""Of an array whose offsets are int32, as they are in kernels for GPUs."""

WORD = 32
"""Bits of a word."""

FOLD = 32
"""Columns of a row of a folded axis: those of the largest block."""

# An axis may be the rows if padding to whole tiles makes it at most this much longer.
_TOLERATED_PADDING = 1.25
_MANY_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Layout:
    """How an array of a shape is stored.

    Args:
      shape: of the array, rank 1 or more.
      axis: the rows' axis, counted from the end; -1 if the last axis is folded.
    """

    shape: tuple[int, ...]
    axis: int

    @property
    def is_folded(self) -> bool:
        """Whether the last axis is folded into rows."""
        return self.axis == -1

    @property
    def row_axis(self) -> int:
        """The rows' axis, counted from the start; of :attr:`matrix_shape` as well."""
        return len(self.shape) + self.axis

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape with a folded axis as two, ``(rows, 32)``."""
        if not self.is_folded:
            return self.shape
        return (*self.shape[:-1], math.ceil(self.shape[-1] / FOLD), FOLD)

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self.matrix_shape[self.row_axis]

    def words_shape(self, bits: int) -> tuple[int, ...]:
        """The shape of the words of k-bit fields."""
        words = self._with_rows(self.shape, word_rows(self.rows, bits))
        return (*words[:-1], words[-1] * FOLD) if self.is_folded else words

    def blocks_shape(self, block_size: int) -> tuple[int, ...]:
        """The shape of an array with one element per block of so many values."""
        height, width = block_shape(block_size)
        blocks = self._with_rows(self.shape, math.ceil(self.rows / height))
        if self.is_folded:
            return (*blocks[:-1], blocks[-1] * (FOLD // width))
        return (*blocks[:-1], math.ceil(blocks[-1] / width))

    def unit(self, axis: int, bits: tuple[int, ...], block_size: int | None) -> int:
        """The number of which a shard's length along an axis must be a multiple.

        Args:
          axis: counted from the start.
          bits: widths of all packed fields.
          block_size: of the blocks; None if nothing is per block.

        >>> layout_of((4096, 512)).unit(0, (8, 16), None)
        4
        >>> [layout_of((4096, 512)).unit(axis, (8,), 2048) for axis in (0, 1)]
        [64, 32]
        """
        rows = math.lcm(*(period(b)[0] for b in bits))
        columns = 1
        if block_size is not None:
            height, columns = block_shape(block_size)
            rows = math.lcm(rows, height)
        if self.is_folded:
            return rows * FOLD if axis == self.row_axis else 1
        if axis == self.row_axis:
            return rows
        return columns if axis == len(self.shape) - 1 else 1

    def to_matrix(self, x: jax.Array) -> jax.Array:
        """The array in its :attr:`matrix_shape`, padded with zeros."""
        if not self.is_folded:
            return x
        matrix = self.matrix_shape
        padding = matrix[-2] * FOLD - self.shape[-1]
        return _padded(x, x.ndim - 1, padding).reshape(matrix)

    def from_matrix(self, x: jax.Array) -> jax.Array:
        """The inverse of :meth:`to_matrix`."""
        if not self.is_folded:
            return x
        x = x.reshape(*x.shape[:-2], -1)
        return x[..., : self.shape[-1]]

    def _with_rows(self, shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
        return (*shape[: self.row_axis], rows, *shape[self.row_axis + 1 :])


def layout_of(shape: tuple[int, ...]) -> Layout:
    """The layout of arrays of a shape.

    The rows are the last axis before the columns whose padding to a multiple of 8 costs
    at most a quarter. An axis of fewer than 64 elements, such as the heads of an
    attention kernel, which may be sharded, is taken only if none is longer. If padding
    costs more everywhere, it is the axis that is padded least, or the folded last one.

    Args:
      shape: of the array, rank 1 or more.

    Raises:
      ValueError: for rank 0, which has no axis to pack along.

    >>> layout_of((4096, 512)).axis, layout_of((4096, 32, 128)).axis
    (-2, -3)
    >>> layout_of((7, 7, 3, 64)).axis, layout_of((50257,)).axis
    (-3, -1)
    """
    if not shape:
        raise ValueError("a scalar cannot be packed; keep it as float32")

    def padding(n: int, unit: int) -> float:
        return math.ceil(n / unit) * unit / n if n else 1.0

    costs = {
        axis: padding(shape[axis], TILE_ROWS) for axis in range(-2, -len(shape) - 1, -1)
    }
    good = [axis for axis, cost in costs.items() if cost <= _TOLERATED_PADDING]
    if good:
        large = [axis for axis in good if shape[axis] >= _MANY_ROWS]
        return Layout(shape, (large or good)[0])
    costs[-1] = padding(shape[-1], FOLD * TILE_ROWS)
    return Layout(shape, min(costs, key=lambda axis: costs[axis]))


def packed_shape(shape: tuple[int, ...], bits: int) -> tuple[int, ...]:
    """The shape of the uint32 words that hold an array of k-bit fields.

    Args:
      shape: of the array, rank 1 or more.
      bits: width k of a field, 1 to 32.

    >>> packed_shape((4096, 512), 8), packed_shape((3, 3, 64, 64), 12)
    ((1024, 512), (3, 3, 24, 64))
    """
    return layout_of(shape).words_shape(bits)


def period(bits: int) -> tuple[int, int]:
    """Rows and words after which the bit offsets of k-bit fields repeat.

    Args:
      bits: width k of a field, 1 to 32.

    Returns:
      ``(rows, words)`` with ``rows * k == words * 32``.

    >>> period(8), period(12), period(5)
    ((4, 1), (8, 3), (32, 5))
    """
    common = math.gcd(bits, WORD)
    return WORD // common, bits // common


def is_unrolled(bits: int) -> bool:
    """Whether the bit offsets of fields repeat within the rows of a tile.

    >>> [bits for bits in range(1, 33) if is_unrolled(bits)]
    [4, 8, 12, 16, 20, 24, 28, 32]
    """
    return period(bits)[0] <= TILE_ROWS


def word_rows(rows: int, bits: int) -> int:
    """How many rows of words hold a number of rows of k-bit fields."""
    height, words = period(bits)
    return math.ceil(rows / height) * words


def block_shape(block_size: int) -> tuple[int, int]:
    """Rows and columns of a block.

    >>> [block_shape(size) for size in (32, 64, 128, 2048)]
    [(8, 4), (8, 8), (16, 8), (64, 32)]
    """
    doublings = (block_size // TILE_SIZE).bit_length() - 1
    height = TILE_ROWS << doublings // 2
    return height, block_size // height


def check_block_size(name: str, block_size: int) -> None:
    """Raise unless a block may have so many values."""
    is_power = not block_size & (block_size - 1)
    if not (is_power and TILE_SIZE <= block_size <= MAX_BLOCK_SIZE):
        raise ValueError(
            f"{name}: block_size is {block_size}; accepted are the powers of two from "
            f"{TILE_SIZE} to {MAX_BLOCK_SIZE}"
        )


def block_maxima(x: jax.Array, layout: Layout, block_size: int) -> jax.Array:
    """The maximum of each block; values below 0 count as 0, as padding does.

    Args:
      x: of the layout's shape.
      layout, block_size: of the blocks.

    Returns:
      An array of ``layout.blocks_shape(block_size)``.

    >>> x = jnp.full((8, 8), -3).at[5, 6].set(7)
    >>> block_maxima(x, layout_of(x.shape), 32)
    Array([[0, 7]], dtype=int32)
    """
    height, width = block_shape(block_size)
    x, row = layout.to_matrix(x), layout.row_axis
    x = split_axis(x, row, height).max(row + 1, initial=0)
    x = split_axis(x, x.ndim - 1, width).max(-1, initial=0)
    return x.reshape(layout.blocks_shape(block_size))


def repeat_blocks(x: jax.Array, layout: Layout, block_size: int) -> jax.Array:
    """An array with one element per block, repeated for each value of the layout."""
    height, width = block_shape(block_size)
    matrix, row = layout.matrix_shape, layout.row_axis
    if layout.is_folded:
        x = x.reshape(*x.shape[:-1], math.ceil(layout.rows / height), FOLD // width)
    x = _repeat(x, x.ndim - 1, width, matrix[-1])
    return layout.from_matrix(_repeat(x, row, height, matrix[row]))


def split_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    """An axis n as (ceil(n / size), size), padded with zeros."""
    x = _padded(x, axis, -x.shape[axis] % size)
    shape = (*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
    return x.reshape(shape)


def merge_axes(x: jax.Array, axis: int) -> jax.Array:
    """The inverse of :func:`split_axis`, padding included."""
    shape = (*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    return x.reshape(shape)


def _repeat(x: jax.Array, axis: int, count: int, size: int) -> jax.Array:
    """Each element along an axis repeated, and the axis cut off after ``size``."""
    wide = (*x.shape[: axis + 1], count, *x.shape[axis + 1 :])
    x = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), wide)
    return lax.slice_in_dim(merge_axes(x, axis), 0, size, axis=axis)


def _padded(x: jax.Array, axis: int, padding: int) -> jax.Array:
    if not padding:
        return x
    return jnp.pad(x, [(0, padding if a == axis else 0) for a in range(x.ndim)])
