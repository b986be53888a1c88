"""Fields of k bits in uint32 words: rows of them, and whole arrays by XLA.

Fields of ``32 / gcd(k, 32)`` consecutive rows fill ``k / gcd(k, 32)`` whole words, and
then the pattern repeats; see :func:`period`. Field ``r`` of a period is bits
``[r*k, (r+1)*k)`` of its words, counted from the least significant bit of the first
word. Because the row number is static, so are word, shift and mask: a kernel unrolls
these into shifts and masks on whole rows, without shuffles or shared memory. The rows
themselves may have any shape (a register vector in a kernel, an array on the XLA path).

:mod:`pallas_kernels.layout` says where the rows of an array's words lie.
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
"""Words of a period among which each row chooses; 4 are at most 6 selections."""


def get_field(words: Sequence[jax.Array], row: int, bits: int) -> jax.Array:
    """Read field ``row`` (a static int) from the words of one or more periods.

    Args:
      words: uint32 arrays of one shape, at least ``ceil((row+1)*bits/32)`` of them.
      row: which field.
      bits: width k of a field, 1 to 32.

    Returns:
      A uint32 array of the rows' shape, values below ``2**bits``.
    """
    word, shift = divmod(row * bits, 32)
    value = words[word] >> np.uint32(shift) if shift else words[word]
    if shift + bits > 32:
        value = value | (words[word + 1] << np.uint32(32 - shift))
    return value & np.uint32((1 << bits) - 1)


def put_fields(fields: Sequence[jax.Array], bits: int) -> list[jax.Array]:
    """Assemble whole words from consecutive fields, the inverse of :func:`get_field`.

    Args:
      fields: uint32 arrays of one shape, each below ``2**bits``; their number is a
        multiple of ``period(bits)[0]``.
      bits: width k of a field, 1 to 32.

    Returns:
      ``len(fields) * bits / 32`` uint32 arrays.
    """
    rows, _ = period(bits)
    if len(fields) % rows:
        raise ValueError(
            f"{len(fields)} fields of {bits} bits do not fill whole words; "
            f"give a multiple of {rows}"
        )
    return join_fields(fields, bits)


def join_fields(fields: Sequence[jax.Array], bits: int) -> list[jax.Array]:
    """Like :func:`put_fields`, of any number of fields: the last word may have room.

    Args:
      fields: uint32 arrays of one shape, each below ``2**bits``.
      bits: width k of a field, 1 to 32.

    Returns:
      ``ceil(len(fields) * bits / 32)`` uint32 arrays, zero where no field is.
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
    """Pack an array of k-bit fields into uint32 words.

    Args:
      fields: uint32, rank 1 or more, any size, each value below ``2**bits``.
      bits: width k of a field, 1 to 32.
      layout: of the array; None for ``layout_of(fields.shape)``.

    Returns:
      uint32 words of shape ``layout.words_shape(bits)``; fields of the padding are 0.

    Raises:
      ValueError: if ``bits`` is out of range, ``fields`` is a scalar, or not uint32.

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


def unpack(words: jax.Array, bits: int, layout: Layout) -> jax.Array:
    """Unpack uint32 words into an array of k-bit fields, the inverse of :func:`pack`.

    Args:
      words: uint32 of shape ``layout.words_shape(bits)``.
      bits: width k of a field, 1 to 32.
      layout: of the array that was packed.

    Returns:
      uint32 fields of the layout's shape.

    Raises:
      ValueError: if ``words`` has another dtype or shape than these arguments imply.

    >>> import jax.numpy as jnp
    >>> words = pack(jnp.arange(50, dtype=jnp.uint32), bits=7)
    >>> bool((unpack(words, 7, layout_of((50,))) == jnp.arange(50)).all())
    True
    """
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
    """``decode(unpack(words, bits, layout), *operands)``, for an elementwise function.

    It is computed for each row of a period by itself. So XLA reads each word once, and
    fuses that even with slicing the words out of a stack, which it does not with
    :func:`unpack`.

    Args:
      decode: elementwise, of fields and operands.
      words, bits, layout: as for :func:`unpack`.
      *operands: of the layout's shape.

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
    """The first words of all periods, the second ones, and so on, with an axis of 1."""
    check_words(words, bits, layout)
    axis, matrix = layout.row_axis, layout.matrix_shape
    if layout.is_folded:
        words = words.reshape(*matrix[:axis], word_rows(layout.rows, bits), matrix[-1])
    _, count = period(bits)
    periods = split_axis(words, axis, count)
    return [lax.slice_in_dim(periods, w, w + 1, axis=axis + 1) for w in range(count)]


def _from_periods(x: jax.Array, layout: Layout) -> jax.Array:
    """The array whose rows lie in periods, along the axis after that of the periods."""
    axis, matrix = layout.row_axis, layout.matrix_shape
    rows = lax.slice_in_dim(merge_axes(x, axis), 0, matrix[axis], axis=axis)
    return layout.from_matrix(rows.reshape(matrix))


def _chosen_fields(words: list[jax.Array], axis: int, height: int, bits: int):
    """The fields of periods, computed alike for all rows.

    XLA fuses this with what reads the fields, which it does not with a concatenation.

    Args:
      words: of the periods, each of size 1 along ``axis``.
      axis: along which the fields come to lie.
      height: fields of a period.
      bits: width of a field.
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
        # Shifted by 32 bits it is 0; what does not belong to the field is cut off.
        value = value | high << (jnp.uint32(32) - shift)
    return value & jnp.uint32((1 << bits) - 1)


def check_words(words: jax.Array, bits: int, layout: Layout) -> None:
    """Raise unless these words can hold an array of this layout."""
    check(bits, words.dtype)
    expected = layout.words_shape(bits)
    if words.shape != expected:
        raise ValueError(
            f"words of shape {words.shape} do not hold {bits}-bit fields of an array "
            f"of shape {layout.shape}: they would have shape {expected}"
        )


def check(bits: int, dtype: jnp.dtype) -> None:
    """Raise unless fields of so many bits can be packed into words of this dtype."""
    if not 1 <= bits <= 32:
        raise ValueError(f"bits is {bits}; a field in a uint32 word has 1 to 32")
    if dtype != jnp.uint32:
        raise ValueError(f"packed words and their fields are uint32, not {dtype}")
