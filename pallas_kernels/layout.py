"""Storage layout of packed fields and of per-block scales, version 2.

An array of rank 1 or more has rows and columns. The last axis contains the columns.
One of the other axes, which :func:`layout_of` chooses, contains the rows:

    array  [..., rows, between..., columns]
    words  [..., ceil(rows / p) w, between..., columns]         k-bit fields
    scales [..., ceil(rows / R), between..., ceil(columns / C)] blocks of R x C values

- *Words*: p consecutive fields of a column share w uint32 words. The period p is the
  smallest number for which ``p k == 32 w``: 2 rows for 16 bits, 4 for 8, 8 for 4 and
  12, 16 for even widths that are not multiples of 4, and 32 for odd widths. Field r of
  a period is stored in bits ``[r k, (r+1) k)`` of its words.
- *Scales*: a block of 32 values has 8 rows and 4 columns. Each time the size doubles,
  the columns or the rows double in turn, up to 64 x 32 for 2048 values.

A vector has no other axis for the rows, and in some arrays, padding would make every
other axis much longer. The last axis can then be *folded* into rows of 32 columns, and
words and scales follow these rows.

Words and scales have the same rank as the parameter. Its PartitionSpec therefore also
shards them if shards consist of whole periods and whole blocks (:meth:`Layout.unit`).
With 4, 8, 12 or 16 bits and blocks of 32, shards must be multiples of 8 rows and of 4
columns, or of 256 elements along a folded axis. A GPU thread that updates a block of 32
loads 4 neighboring columns at once, and neighboring threads load adjacent columns. On
TPUs, words of 8-bit fields have the same layout as an array of bytes.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

VERSION = 2
"""Version of this layout, appended to the names of state fields."""

TILE_ROWS = 8
TILE_COLUMNS = 4
TILE_SIZE = TILE_ROWS * TILE_COLUMNS
MAX_BLOCK_SIZE = 2048

MAX_ELEMENTS = 2**31 - 1
"""Largest number of elements of an array in GPU kernels, which use int32 offsets."""

WORD = 32
"""Number of bits in a word."""

FOLD = 32
"""Number of columns of a folded axis, which is the width of the largest block."""

# The row axis should grow at most by this factor if it is padded to whole tiles.
_TOLERATED_PADDING = 1.25
_MANY_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Layout:
    """Storage layout of arrays that have the same shape.

    Args:
      shape: shape of the array, rank 1 or more.
      axis: axis of the rows, counted from the end; -1 if the last axis is folded.
    """

    shape: tuple[int, ...]
    axis: int

    @property
    def is_folded(self) -> bool:
        """Whether the last axis is folded into rows."""
        return self.axis == -1

    @property
    def row_axis(self) -> int:
        """Axis of the rows in ``shape`` and ``matrix_shape``, counted from 0."""
        return len(self.shape) + self.axis

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape, with a folded axis split into two axes ``(rows, 32)``."""
        if not self.is_folded:
            return self.shape
        return (*self.shape[:-1], math.ceil(self.shape[-1] / FOLD), FOLD)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.matrix_shape[self.row_axis]

    def words_shape(self, bits: int) -> tuple[int, ...]:
        """Return the shape of the uint32 words of k-bit fields."""
        return self._stored_shape(word_rows(self.rows, bits), 1)

    def blocks_shape(self, block_size: int) -> tuple[int, ...]:
        """Return the shape of an array with one element per block."""
        height, width = block_shape(block_size)
        return self._stored_shape(math.ceil(self.rows / height), width)

    def unit(self, axis: int, bits: tuple[int, ...], block_size: int | None) -> int:
        """Return the number that must divide a shard's length along an axis.

        Args:
          axis: axis, counted from the start.
          bits: widths of all packed fields.
          block_size: number of values in a block; None if there are no blocks.

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
        """Pad an array with zeros and reshape it to :attr:`matrix_shape`."""
        return split_axis(x, x.ndim - 1, FOLD) if self.is_folded else x

    def from_matrix(self, x: jax.Array) -> jax.Array:
        """Invert :meth:`to_matrix`."""
        if not self.is_folded:
            return x
        return merge_axes(x, x.ndim - 2)[..., : self.shape[-1]]

    def _stored_shape(self, rows: int, width: int) -> tuple[int, ...]:
        """Return a shape with ``rows`` rows and one element per ``width`` columns."""
        shape = with_length(self.shape, self.axis, rows)
        if self.is_folded:
            return (*shape[:-1], shape[-1] * (FOLD // width))
        return (*shape[:-1], math.ceil(shape[-1] / width))


def layout_of(shape: tuple[int, ...]) -> Layout:
    """Return the layout of arrays that have the given shape.

    An axis before the columns qualifies as the rows if padding its length to a multiple
    of 8 adds at most a quarter. The last axis that qualifies is used. An axis with
    fewer than 64 elements, such as the heads of an attention kernel, is used only if no
    longer axis qualifies, because it may be sharded. If no axis qualifies, the axis
    that needs the least padding is used, which may be the last axis, folded.

    Args:
      shape: shape of the array, rank 1 or more.

    Raises:
      ValueError: if ``shape`` is ``()``, because a scalar has no axis to pack along.

    >>> layout_of((4096, 512)).axis, layout_of((4096, 32, 128)).axis
    (-2, -3)
    >>> layout_of((7, 7, 3, 64)).axis, layout_of((50257,)).axis
    (-3, -1)
    """
    if not shape:
        raise ValueError("a scalar cannot be packed; store it in float32")

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


def with_length(shape: tuple[int, ...], axis: int, length: int) -> tuple[int, ...]:
    """Return a shape with another length along an axis."""
    changed = list(shape)
    changed[axis] = length
    return tuple(changed)


def packed_shape(shape: tuple[int, ...], bits: int) -> tuple[int, ...]:
    """Return the shape of the uint32 words of an array of k-bit fields.

    Args:
      shape: shape of the array, rank 1 or more.
      bits: width k of a field, 1 to 32.

    >>> packed_shape((4096, 512), 8), packed_shape((3, 3, 64, 64), 12)
    ((1024, 512), (3, 3, 24, 64))
    """
    return layout_of(shape).words_shape(bits)


def period(bits: int) -> tuple[int, int]:
    """Return the number of rows and words after which the bit offsets of fields repeat.

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
    """Return whether the bit offsets of k-bit fields repeat within the rows of a tile.

    >>> [bits for bits in range(1, 33) if is_unrolled(bits)]
    [4, 8, 12, 16, 20, 24, 28, 32]
    """
    return period(bits)[0] <= TILE_ROWS


def word_rows(rows: int, bits: int) -> int:
    """Return the number of rows of words that store ``rows`` rows of k-bit fields."""
    height, words = period(bits)
    return math.ceil(rows / height) * words


def block_shape(block_size: int) -> tuple[int, int]:
    """Return the number of rows and columns of a block.

    >>> [block_shape(size) for size in (32, 64, 128, 2048)]
    [(8, 4), (8, 8), (16, 8), (64, 32)]
    """
    doublings = (block_size // TILE_SIZE).bit_length() - 1
    height = TILE_ROWS << doublings // 2
    return height, block_size // height


def check_block_size(name: str, block_size: int) -> None:
    """Raise a ValueError unless ``block_size`` is a supported number of values."""
    is_power = not block_size & (block_size - 1)
    if not (is_power and TILE_SIZE <= block_size <= MAX_BLOCK_SIZE):
        raise ValueError(
            f"{name}: block_size must be a power of two from {TILE_SIZE} to "
            f"{MAX_BLOCK_SIZE}, got {block_size}"
        )


def block_maxima(
    x: jax.Array,
    layout: Layout,
    block_size: int,
    between: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> jax.Array:
    """Return the maximum of each block, or 0 if all its values are negative.

    Args:
      x: array of the layout's shape.
      layout: layout of the array.
      block_size: number of values in a block.
      between: a function that is applied to the maxima of columns of blocks, such as a
        barrier.

    Returns:
      An array of shape ``layout.blocks_shape(block_size)``.

    >>> x = jnp.full((8, 8), -3).at[5, 6].set(7)
    >>> block_maxima(x, layout_of(x.shape), 32)
    Array([[0, 7]], dtype=int32)
    """
    height, width = block_shape(block_size)
    x, row = layout.to_matrix(x), layout.row_axis
    x = between(split_axis(x, row, height).max(row + 1, initial=0))
    x = split_axis(x, x.ndim - 1, width).max(-1, initial=0)
    return x.reshape(layout.blocks_shape(block_size))


def repeat_blocks(
    x: jax.Array,
    layout: Layout,
    block_size: int,
    between: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> jax.Array:
    """Repeat each element of a per-block array for all values of its block.

    ``between`` is applied after the elements are repeated along rows.
    """
    height, width = block_shape(block_size)
    matrix, row = layout.matrix_shape, layout.row_axis
    if layout.is_folded:
        x = x.reshape(*x.shape[:-1], math.ceil(layout.rows / height), FOLD // width)
    x = between(_repeat(x, x.ndim - 1, width, matrix[-1]))
    return layout.from_matrix(_repeat(x, row, height, matrix[row]))


def split_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Pad an axis of length n with zeros and split it into ``(ceil(n/size), size)``."""
    missing = -x.shape[axis] % size
    if missing:
        x = jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)])
    shape = (*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
    return x.reshape(shape)


def merge_axes(x: jax.Array, axis: int) -> jax.Array:
    """Invert :func:`split_axis`, but keep the padding."""
    shape = (*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    return x.reshape(shape)


def _repeat(x: jax.Array, axis: int, count: int, size: int) -> jax.Array:
    """Repeats elements ``count`` times along an axis, and cuts the axis to ``size``."""
    wide = (*x.shape[: axis + 1], count, *x.shape[axis + 1 :])
    x = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), wide)
    return lax.slice_in_dim(merge_axes(x, axis), 0, size, axis=axis)
