"""k-bit fields in uint32 words, on rows: the primitives that every packed array uses.

Fields of ``32 / gcd(k, 32)`` consecutive rows fill ``k / gcd(k, 32)`` whole words, and
then the pattern repeats; see :func:`period`. Field ``r`` of a period is bits
``[r*k, (r+1)*k)`` of its words, counted from the least significant bit of the first
word. Because the row number is static, so are word, shift and mask: a kernel unrolls
these into shifts and masks on whole rows, without shuffles or shared memory. The rows
themselves may have any shape (a register vector in a kernel, an array on the XLA path).
"""

import math
from collections.abc import Sequence

import jax
import numpy as np

_WORD = 32


def period(bits: int) -> tuple[int, int]:
    """Rows and words after which the bit offsets of k-bit fields repeat.

    Args:
      bits: width k of a field, 1 to 32.

    Returns:
      ``(rows, words)`` with ``rows * k == words * 32``.

    >>> period(8), period(12), period(5)
    ((4, 1), (8, 3), (32, 5))
    """
    common = math.gcd(bits, _WORD)
    return _WORD // common, bits // common


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
