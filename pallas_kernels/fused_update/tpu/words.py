"""Packed fields in a TPU kernel: rows of registers from words, and words from rows.

Where the bit offsets of fields repeat within a group, a field is a shift of a register
and nothing more. Those of other widths (the odd ones repeat after 32 rows) are unpacked
into a program's own memory before its loop, and packed after it. There a register has
one row of each of 8 neighbouring periods, so that offsets are static again.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.bitfields import get_field, period, put_fields
from pallas_kernels.fused_update.tpu.tiling import SUBLANES
from pallas_kernels.fused_update.tpu.values import Field, shifted_left, whole


def unpack(words, rows, bits: int) -> None:
    """Write the fields of a block of words, one to a word.

    Args:
      words: reference of whole periods, 8 or a multiple of them.
      rows: reference of their rows, uint32.
      bits: width of a field.
    """
    height, count = period(bits)

    def some(number, _):
        source = part(words, number, SUBLANES * count)
        target = part(rows, number, SUBLANES * height)
        held = [source[every(word, count), :] for word in range(count)]
        for row in range(height):
            target[every(row, height), :] = whole(field(held, row, bits))
        return number + jnp.int32(1), None

    lax.scan(some, jnp.int32(0), length=words.shape[0] // (SUBLANES * count))


def pack(rows, words, bits: int) -> None:
    """Pack the fields of a block into words; the inverse of :func:`unpack`.

    Args:
      rows: a reference to a row of fields for each of the block's rows, which is read.
      words: a reference to the words, which is written.
      bits: the fields' width.
    """
    height, count = period(bits)

    def some(number, _):
        source = part(rows, number, SUBLANES * height)
        target = part(words, number, SUBLANES * count)
        fields = [source[every(row, height), :] for row in range(height)]
        for word, value in enumerate(joined(fields, bits)):
            target[every(word, count), :] = value
        return number + jnp.int32(1), None

    lax.scan(some, jnp.int32(0), length=words.shape[0] // (SUBLANES * count))


def field(words: Sequence[jax.Array], row: int, bits: int):
    """Fields of a row of a group; those that lie in two words as an array."""
    word, shift = divmod(row * bits, 32)
    if shift + bits <= 32:
        return Field(words[word], shift, bits)
    return get_field(words, row, bits)


def joined(fields: Sequence, bits: int) -> list[jax.Array]:
    """The words of a group's fields.

    Args:
      fields: one array for each row of a group, lower ones in lower bits.
      bits: their width.
    """
    if 32 % bits:
        return put_fields([whole(x) for x in fields], bits)
    count, words = 32 // bits, []
    for start in range(0, len(fields), count):
        word = whole(fields[start])
        for number, value in enumerate(fields[start + 1 : start + count], 1):
            word = word | shifted_left(value, number * bits)
        words.append(word)
    return words


def part(ref, number: jax.Array, rows: int):
    """A reference to so many rows, the parts before it being of the same size."""
    start = pl.multiple_of(number * jnp.int32(rows), rows)
    return ref.at[pl.ds(start, rows), :]


def every(first: int, stride: int, size: int = SUBLANES):
    """An index of so many rows at a distance from each other."""
    return pl.ds(first, size, stride=stride) if stride > 1 else pl.ds(first, size)
