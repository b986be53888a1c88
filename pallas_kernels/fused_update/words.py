"""Packed fields in a kernel: rows read from words, and words written from rows.

Where the bit offsets of fields repeat after few rows, a loop's body unrolls that many
and every offset is static. Other widths (the odd ones repeat after 32 rows) would
unroll the whole period, which compiles slowly and spills. There the offsets are
computed from the row: reading takes the two words that a field may straddle, and
writing carries a word from row to row until it is full.
"""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bitfields.fields import get_field, period, put_fields
from pallas_kernels.fused_update.arrangement import Arrangement
from pallas_kernels.fused_update.instructions import Instructions
from pallas_kernels.fused_update.memory import Access
from pallas_kernels.fused_update.short_forms import Byte, put_bytes
from pallas_kernels.layout import TILE_ROWS


def is_unrolled(bits: int) -> bool:
    """Whether fields of this width have static offsets.

    >>> [bits for bits in range(1, 33) if is_unrolled(bits)]
    [4, 8, 12, 16, 20, 24, 28, 32]
    """
    return period(bits)[0] <= TILE_ROWS


class Words(typing.Protocol):
    """The words of a program's lanes, by their numbers from the lanes' first.

    Numbers are int32 scalars.
    """

    def accesses(self, start: jax.Array, count: int) -> list[Access]:
        """Where so many words from ``start`` on are."""
        ...

    def load(self, start: jax.Array) -> jax.Array:
        """Load words."""
        ...

    def store(self, start: jax.Array, value: jax.Array, when: jax.Array) -> None:
        """Store words if ``when``, a bool scalar, is true."""
        ...


@dataclasses.dataclass
class Reader:
    """Fields of one packed operand.

    Args:
      bits: width of a field.
      chunk_rows: rows that the loop's body unrolls.
      places: where the words of the lanes are.
      by_bytes: whether fields are given as :class:`Byte`; with 8 bits.
    """

    bits: int
    chunk_rows: int
    places: Words
    by_bytes: bool = False

    words: Sequence[jax.Array] = ()
    """The words that :meth:`start` asks for, to be set before :meth:`field`."""

    def start(self, chunk: jax.Array) -> list[Access]:
        """Begin a chunk of rows, by its number; which words to load for it."""
        self._chunk = chunk
        if not is_unrolled(self.bits):
            return []
        count = self.chunk_rows * self.bits // 32
        first = chunk * np.int32(count)
        return self.places.accesses(first, count)

    def field(self, row: int) -> jax.Array | Byte:
        """The fields of a row of the chunk."""
        if self.by_bytes:
            return Byte(self.words[row // 4], row % 4)
        if is_unrolled(self.bits):
            return get_field(list(self.words), row, self.bits)
        word, shift = _place(self._chunk, self.chunk_rows, row, self.bits)
        value = self.places.load(word) >> shift
        # The field may go on in the next word. Where it does not, the same word is read
        # again, as there may be no next one, and the mask drops what it gives.
        ahead = (shift + np.uint32(self.bits) > np.uint32(32)).astype(jnp.int32)
        following = self.places.load(word + ahead)
        value = value | ((following << np.uint32(1)) << (np.uint32(31) - shift))
        return value & np.uint32((1 << self.bits) - 1)


@dataclasses.dataclass
class Writer:
    """Words of one packed result.

    Args:
      bits: width of a field.
      chunk_rows: rows that the loop's body unrolls.
      places: where the words of the lanes are.
      by_bytes: with 8 bits, the instructions by which fields are given as
        :class:`Byte`; else None.
    """

    bits: int
    chunk_rows: int
    places: Words
    by_bytes: Instructions | None = None

    def first_carry(self, arrangement: Arrangement) -> jax.Array | None:
        """What the loop over chunks carries at first."""
        return None if is_unrolled(self.bits) else arrangement.zeros(jnp.uint32)

    def start(self, chunk: jax.Array, carry: jax.Array | None) -> None:
        """Begin a chunk of rows, by its number."""
        self._chunk, self._fields, self.open_word = chunk, [], carry

    def put(self, row: int, field: jax.Array) -> None:
        """Add the fields of the chunk's next row."""
        if is_unrolled(self.bits):
            self._fields.append(field)
            return
        word, shift = _place(self._chunk, self.chunk_rows, row, self.bits)
        value = typing.cast(jax.Array, self.open_word) | (field << shift)
        full = shift + np.uint32(self.bits) >= np.uint32(32)
        self.places.store(word, value, full)
        # A word that is full has bits of this field, so that shift is not 0.
        rest = field >> (np.uint32(32) - shift & np.uint32(31))
        self.open_word = jnp.where(full, rest, value)

    def finish(self) -> list[tuple[Access, jax.Array]]:
        """End the chunk; which words to write."""
        if not is_unrolled(self.bits):
            return []
        if self.by_bytes:
            words = put_bytes(self._fields, self.by_bytes)
        else:
            words = put_fields(self._fields, self.bits)
        first = self._chunk * np.int32(len(words))
        return list(zip(self.places.accesses(first, len(words)), words, strict=True))


def _place(chunk: jax.Array, chunk_rows: int, row: int, bits: int):
    """The word in which a row's fields begin, and at which bit."""
    start = (chunk * np.int32(chunk_rows) + np.int32(row)) * np.int32(bits)
    return start >> np.int32(5), (start & np.int32(31)).astype(jnp.uint32)
