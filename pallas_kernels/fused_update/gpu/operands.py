"""How a program finds what it reads and writes: elements, blocks, and packed fields.

Where the bit offsets of fields repeat after few rows, a loop's body unrolls that many
and every offset is static. Other widths (the odd ones repeat after 32 rows) would
unroll the whole period, which compiles slowly and spills. There a chunk's fields begin
anywhere in a word: its words are shifted as one number, by which the offsets within the
chunk are static again, and a word that a chunk does not fill is carried to the next.
"""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bitfields import get_field, join_fields, put_fields
from pallas_kernels.fused_update.gpu.arrays import Access
from pallas_kernels.fused_update.gpu.lanes import BlockPlaces, TiledLanes
from pallas_kernels.fused_update.gpu.peephole import Byte, put_bytes
from pallas_kernels.gpu.instructions import Instructions
from pallas_kernels.layout import TILE_SIZE, is_unrolled, period


@dataclasses.dataclass(frozen=True)
class Plain:
    """An array that is not packed, or a layer of a stack of them.

    Args:
      number: of the operand or result.
      layer: of the stack; None if it is none.
      width: of its accesses.
    """

    number: int
    layer: jax.Array | None
    width: int

    def access(self, offset: jax.Array, exists: jax.Array | None) -> Access:
        """The elements of a row of lanes."""
        return Access(self.number, self.layer, offset, exists, self.width)


@dataclasses.dataclass(frozen=True)
class PerBlock:
    """An array with one element per block, or a layer of a stack of them.

    Args:
      number, layer: as of :class:`Plain`.
      places: of the blocks.
    """

    number: int
    layer: jax.Array | None
    places: BlockPlaces

    def access(self, chunk: jax.Array) -> Access:
        """The blocks that a chunk of rows crosses."""
        places = self.places
        return Access(
            self.number,
            self.layer,
            places.offset(chunk),
            places.exists(chunk),
            tiles=places.block_size // TILE_SIZE,
        )


@dataclasses.dataclass
class _Packed:
    """A packed operand or result.

    Args:
      number, layer: as of :class:`Plain`.
      lanes: of the program.
      bits: width of a field.
      instructions: of the launcher, by which fields of 8 bits are given as
        :class:`Byte`; None if XLA runs the operations.
    """

    number: int
    layer: jax.Array | None
    lanes: TiledLanes
    bits: int
    instructions: Instructions | None

    @property
    def chunk_rows(self) -> int:
        """Rows that the loop's body unrolls."""
        return self.lanes.tiling.chunk_rows

    @property
    def by_bytes(self) -> bool:
        """Whether fields are given as :class:`Byte`."""
        return self.bits == 8 and self.instructions is not None

    def accesses(self, start: jax.Array, count: int) -> list[Access]:
        """So many words from ``start``, an int32 scalar, on from the lanes' first."""
        lanes, bits, width = self.lanes, self.bits, self.lanes.tiling.word_width
        masks = (lanes.has_word(bits, start + np.int32(i)) for i in range(count))
        places = zip(lanes.word_offsets(bits, start, count), masks, strict=True)
        return [Access(self.number, self.layer, *each, width) for each in places]


@dataclasses.dataclass
class Reader(_Packed):
    """Fields of one packed operand."""

    def start(self, chunk: jax.Array) -> list[Access]:
        """Begin a chunk of rows, by its number; which words to load for it."""
        if is_unrolled(self.bits):
            count = self.chunk_rows * self.bits // 32
            return self.accesses(chunk * np.int32(count), count)
        first, self._shift = _place(chunk, self.chunk_rows, self.bits)
        # No word after the chunk's last is read, as there may be none. The last is read
        # again, and what it gives is beyond the chunk's fields.
        size = np.int32(self.chunk_rows * self.bits)
        last = (chunk * size + (size - np.int32(1))) >> np.int32(5)
        return [
            self.accesses(jnp.minimum(first + np.int32(i), last), 1)[0]
            for i in range(_most_words(self.chunk_rows, self.bits))
        ]

    def take(self, words: Sequence[jax.Array]) -> None:
        """Begin to read the chunk's fields from the words that :meth:`start` wants."""
        if is_unrolled(self.bits):
            self._words = list(words)
        else:
            self._words = _shifted_right(words, self._shift)

    def field(self, row: int) -> jax.Array | Byte:
        """The fields of a row of the chunk."""
        if self.by_bytes:
            return Byte(self._words[row // 4], row % 4)
        return get_field(self._words, row, self.bits)


@dataclasses.dataclass
class Writer(_Packed):
    """Words of one packed result."""

    def first_carry(self) -> jax.Array | None:
        """What the loop over chunks carries at first."""
        if is_unrolled(self.bits):
            return None
        return self.lanes.arrangement.zeros(jnp.uint32)

    def start(self, chunk: jax.Array, carry: jax.Array | None) -> None:
        """Begin a chunk of rows, by its number."""
        self._chunk, self._fields, self.open_word = chunk, [], carry

    def put(self, field: jax.Array) -> None:
        """Add the fields of the chunk's next row."""
        self._fields.append(field)

    def finish(self) -> list[tuple[Access, jax.Array]]:
        """End the chunk; which words to write."""
        if not is_unrolled(self.bits):
            return self._full_words()
        if self.by_bytes:
            instructions = typing.cast(Instructions, self.instructions)
            words = put_bytes(self._fields, instructions)
        else:
            words = put_fields(self._fields, self.bits)
        first = self._chunk * np.int32(len(words))
        return list(zip(self.accesses(first, len(words)), words, strict=True))

    def _full_words(self) -> list[tuple[Access, jax.Array]]:
        """The words that the chunk fills; the one after them becomes the open one."""
        first, shift = _place(self._chunk, self.chunk_rows, self.bits)
        words = _shifted_left(join_fields(self._fields, self.bits), shift)
        words[0] = words[0] | typing.cast(jax.Array, self.open_word)
        size = self.chunk_rows * self.bits
        surely, most = size // 32, (size + 31) // 32
        stores = [
            (self.accesses(first + np.int32(i), 1)[0], words[i]) for i in range(surely)
        ]
        if most == surely:
            self.open_word = words[surely]
            return stores
        is_full = shift + np.uint32(size % 32) >= np.uint32(32)
        self.open_word = jnp.where(is_full, words[most], words[surely])
        (last,) = self.accesses(first + np.int32(surely), 1)
        when = jnp.broadcast_to(is_full, words[surely].shape)
        mask = when if last.mask is None else last.mask & when
        return [*stores, (dataclasses.replace(last, mask=mask), words[surely])]


def _place(chunk: jax.Array, chunk_rows: int, bits: int) -> tuple[jax.Array, jax.Array]:
    """The word in which a chunk's fields begin, and at which bit."""
    start = chunk * np.int32(chunk_rows * bits)
    return start >> np.int32(5), (start & np.int32(31)).astype(jnp.uint32)


def _most_words(chunk_rows: int, bits: int) -> int:
    """How many words the fields of a chunk may lie in.

    >>> _most_words(8, 5), _most_words(8, 6), _most_words(8, 7)
    (2, 2, 3)
    """
    size, (rows, _) = chunk_rows * bits, period(bits)
    return max((size * i % 32 + size + 31) // 32 for i in range(rows // chunk_rows))


def _shifted_right(words: Sequence[jax.Array], shift: jax.Array) -> list[jax.Array]:
    """The words as one number, shifted by less than a word."""
    # In two shifts, as one by 32 is not defined.
    above = [(x << np.uint32(1)) << (np.uint32(31) - shift) for x in words[1:]]
    below = [x >> shift for x in words]
    return [x | y for x, y in zip(below, above, strict=False)] + below[-1:]


def _shifted_left(words: Sequence[jax.Array], shift: jax.Array) -> list[jax.Array]:
    """The same the other way, with one word more."""
    above = [(x >> np.uint32(1)) >> (np.uint32(31) - shift) for x in words]
    below = [x << shift for x in words]
    return [
        below[0],
        *(x | y for x, y in zip(below[1:], above, strict=False)),
        above[-1],
    ]
