"""Read and write k-bit fields in uint32 words, in kernels and in XLA programs.

Fields of ``32 / gcd(k, 32)`` consecutive rows fill ``k / gcd(k, 32)`` whole words. Then
the pattern repeats (:func:`period`). Field ``r`` of a period is stored in bits
``[r*k, (r+1)*k)`` of its words, counted from the least significant bit of the first
word. The row index is static, so the word, the shift and the mask are constants. A
kernel therefore needs only shifts and masks of whole rows, and no shuffles or shared
memory. A row may have any shape: a register vector in a kernel, or an array.

:mod:`pallas_kernels.layout` defines which axis of an array contains the rows.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.layout import (
    Layout,
    layout_of,
    merge_axes,
    period,
    split_axis,
    word_rows,
)

_MAX_CHOICES = 4
"""Maximum number of words per period for which :func:`unpack` uses selections."""


def get_field(words: Sequence[jax.Array], row: int, bits: int) -> jax.Array:
    """Return the field with index ``row`` from the words of one or more periods.

    Args:
      words: at least ``ceil((row+1)*bits/32)`` uint32 arrays of the same shape.
      row: static index of the field.
      bits: width k of a field, 1 to 32.

    Returns:
      A uint32 array with the shape of a word array and values below ``2**bits``.
    """
    word, shift = divmod(row * bits, 32)
    value = words[word] >> np.uint32(shift) if shift else words[word]
    if shift + bits > 32:
        value = value | (words[word + 1] << np.uint32(32 - shift))
    return value & np.uint32((1 << bits) - 1)


def put_fields(fields: Sequence[jax.Array], bits: int) -> list[jax.Array]:
    """Pack consecutive fields into whole words, the inverse of :func:`get_field`.

    Args:
      fields: uint32 arrays of the same shape with values below ``2**bits``. Their
        number must be a multiple of ``period(bits)[0]``.
      bits: width k of a field, 1 to 32.

    Returns:
      ``len(fields) * bits / 32`` uint32 arrays.

    Raises:
      ValueError: if the number of fields is not a multiple of ``period(bits)[0]``.
    """
    rows, _ = period(bits)
    if len(fields) % rows:
        raise ValueError(
            f"put_fields: the number of {bits}-bit fields must be a multiple of "
            f"{rows}, got {len(fields)}"
        )
    return join_fields(fields, bits)


def join_fields(fields: Sequence[jax.Array], bits: int) -> list[jax.Array]:
    """Pack any number of consecutive fields; the last word may be partly empty.

    Args:
      fields: uint32 arrays of the same shape with values below ``2**bits``.
      bits: width k of a field, 1 to 32.

    Returns:
      ``ceil(len(fields) * bits / 32)`` uint32 arrays; unused bits are 0.
    """
    words: dict[int, jax.Array] = {}

    def deposit(number: int, value: jax.Array) -> None:
        words[number] = words[number] | value if number in words else value

    for row, field in enumerate(fields):
        word, shift = divmod(row * bits, 32)
        deposit(word, field << np.uint32(shift) if shift else field)
        if shift + bits > 32:
            deposit(word + 1, field >> np.uint32(32 - shift))
    return [words[number] for number in sorted(words)]


def pack(fields: jax.Array, bits: int, layout: Layout | None = None) -> jax.Array:
    """Pack an array of k-bit fields into uint32 words with XLA.

    Args:
      fields: uint32 array of rank 1 or more with values below ``2**bits``.
      bits: width k of a field, 1 to 32.
      layout: layout of the array; ``layout_of(fields.shape)`` if None.

    Returns:
      uint32 words of shape ``layout.words_shape(bits)``; padding fields are 0.

    Raises:
      ValueError: if ``bits`` is out of range, or ``fields`` is a scalar or not uint32.

    >>> import jax.numpy as jnp
    >>> words = pack(jnp.arange(64, dtype=jnp.uint32).reshape(32, 2), bits=8)
    >>> words.shape, hex(int(words[0, 0]))
    ((8, 2), '0x6040200')
    """
    check(bits, fields.dtype)
    layout = layout or layout_of(fields.shape)
    axis = layout.row_axis
    matrix = layout.to_matrix(fields)
    height, _ = period(bits)
    periods = split_axis(matrix, axis, height)
    rows = [lax.index_in_dim(periods, row, axis + 1, False) for row in range(height)]
    words = merge_axes(jnp.stack(put_fields(rows, bits), axis=axis + 1), axis)
    return words.reshape(layout.words_shape(bits))


def pack_bitmap(marks: jax.Array, layout: Layout) -> jax.Array:
    """Pack an array of zeros and ones into bytes, 8 rows of a column in each.

    The bitmap has the shape ``layout.words_shape(4)``.

    >>> pack_bitmap(jnp.eye(8, 4, dtype=bool), layout_of((8, 4)))
    Array([[1, 2, 4, 8]], dtype=uint8)
    """
    matrix = layout.to_matrix(marks)
    packed = jnp.packbits(matrix, axis=layout.row_axis, bitorder="little")
    return packed.reshape(layout.words_shape(4))


def unpack(words: jax.Array, bits: int, layout: Layout | tuple[int, ...]) -> jax.Array:
    """Unpack uint32 words into an array of k-bit fields, the inverse of :func:`pack`.

    Args:
      words: uint32 array of shape ``layout.words_shape(bits)``.
      bits: width k of a field, 1 to 32.
      layout: layout of the packed array, or its shape.

    Returns:
      A uint32 array of the layout's shape.

    Raises:
      ValueError: if ``words`` does not match ``bits`` and ``layout``.

    >>> import jax.numpy as jnp
    >>> words = pack(jnp.arange(50, dtype=jnp.uint32), bits=7)
    >>> bool((unpack(words, 7, (50,)) == jnp.arange(50)).all())
    True
    """
    layout = layout if isinstance(layout, Layout) else layout_of(layout)
    if period(bits)[1] > _MAX_CHOICES:
        return unpack_with(lambda fields: fields, words, bits, layout)
    taken = _words_of_periods(words, bits, layout)
    chosen = _chosen_fields(taken, layout.row_axis + 1, period(bits)[0], bits)
    return _from_periods(chosen, layout)


def unpack_with(
    decode: Callable[..., jax.Array],
    words: jax.Array,
    bits: int,
    layout: Layout,
    *operands: jax.Array,
) -> jax.Array:
    """Return ``decode(unpack(words, bits, layout), *operands)``.

    This function computes each row of a period separately. Unlike in :func:`unpack`,
    XLA then reads each word once, and fuses the slicing of words out of a stack.

    Args:
      decode: elementwise function of fields and operands.
      words, bits, layout: see :func:`unpack`.
      *operands: arrays of the layout's shape.

    >>> import jax.numpy as jnp
    >>> words = pack(jnp.arange(50, dtype=jnp.uint32), bits=7)
    >>> unpack_with(lambda x: x + 1, words, 7, layout_of((50,)))[9]
    Array(10, dtype=uint32)
    """
    axis, (height, _) = layout.row_axis, period(bits)
    taken = _words_of_periods(words, bits, layout)
    parts = [split_axis(layout.to_matrix(x), axis, height) for x in operands]

    def decoded(row: int) -> jax.Array:
        slices = [lax.slice_in_dim(x, row, row + 1, axis=axis + 1) for x in parts]
        return decode(get_field(taken, row, bits), *slices)

    rows = [decoded(row) for row in range(height)]
    return _from_periods(lax.concatenate(rows, axis + 1), layout)


def _words_of_periods(words: jax.Array, bits: int, layout: Layout) -> list[jax.Array]:
    """Returns an array for each word of a period, with that word of all periods."""
    check_words(words, bits, layout)
    axis, matrix = layout.row_axis, layout.matrix_shape
    if layout.is_folded:
        words = words.reshape(*matrix[:axis], word_rows(layout.rows, bits), matrix[-1])
    _, count = period(bits)
    periods = split_axis(words, axis, count)
    return [lax.slice_in_dim(periods, w, w + 1, axis=axis + 1) for w in range(count)]


def _from_periods(x: jax.Array, layout: Layout) -> jax.Array:
    """Merges the rows of each period, axis ``layout.row_axis + 1``, into one axis."""
    axis, matrix = layout.row_axis, layout.matrix_shape
    rows = lax.slice_in_dim(merge_axes(x, axis), 0, matrix[axis], axis=axis)
    return layout.from_matrix(rows.reshape(matrix))


def _chosen_fields(words: list[jax.Array], axis: int, height: int, bits: int):
    """Returns the fields of all rows of the periods, stacked along ``axis``.

    XLA fuses this expression with the operations that use the fields. It would not fuse
    a concatenation of the rows.
    """
    shape = [1] * words[0].ndim
    shape[axis] = height
    first_bit = (lax.iota(jnp.uint32, height) * jnp.uint32(bits)).reshape(shape)
    number, shift = first_bit >> jnp.uint32(5), first_bit & jnp.uint32(31)
    low, high = words[0], words[min(1, len(words) - 1)]
    for i, word in enumerate(words[1:], 1):
        low = jnp.where(number == jnp.uint32(i), word, low)
    for i, word in enumerate(words[2:], 2):
        high = jnp.where(number == jnp.uint32(i - 1), word, high)
    value = low >> shift
    if len(words) > 1:
        # A shift by 32 bits gives 0. The mask below drops bits of other fields.
        value = value | high << (jnp.uint32(32) - shift)
    return value & jnp.uint32((1 << bits) - 1)


def check_words(words: jax.Array, bits: int, layout: Layout) -> None:
    """Raise a ValueError unless words are uint32 and have the layout's shape."""
    check(bits, words.dtype)
    expected = layout.words_shape(bits)
    if words.shape != expected:
        raise ValueError(
            f"unpack: words must have shape {expected} to contain {bits}-bit fields of "
            f"an array of shape {layout.shape}, got shape {words.shape}"
        )


def check(bits: int, dtype: jnp.dtype) -> None:
    """Raise a ValueError unless ``bits`` is from 1 to 32 and ``dtype`` is uint32."""
    if not 1 <= bits <= 32:
        raise ValueError(f"bits must be an integer from 1 to 32, got {bits}")
    if dtype != jnp.uint32:
        raise ValueError(f"packed words and their fields must be uint32, got {dtype}")
