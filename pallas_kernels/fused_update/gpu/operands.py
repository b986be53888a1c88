"""Loads and stores of a program's arrays, including arrays of packed fields.

A kernel launch takes a few microseconds, much longer than the update of a small leaf,
so a kernel may update many leaves. Each leaf gets as many programs as it needs. A
program selects the arrays of its leaf with a tree of branches, one tree for its loads
and one for its stores. The code between loads and stores, which is nearly all of the
kernel, is the same for all leaves.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bitfields import join_fields, put_fields
from pallas_kernels.fused_update import xla
from pallas_kernels.fused_update.gpu.arrangements import Arrangement
from pallas_kernels.fused_update.gpu.lanes import BlockLanes
from pallas_kernels.fused_update.gpu.numbers import Scalar
from pallas_kernels.gpu.instructions import Instructions, by_branches
from pallas_kernels.layout import is_unrolled, period


@dataclasses.dataclass(frozen=True)
class Access:
    """Elements to load from, or store to, one array of a leaf.

    Args:
      number: the index of the operand or result.
      layer: int32 scalar, the index of a layer; None if the array is not a stack.
      offset: int32, the elements' offsets in the array, or in its layer.
      mask: mask of the elements that exist; None if all exist.
      width: each group of this many neighboring lanes accesses neighboring elements,
        aligned to their number. Either all elements of a group exist, or none.
      tiles: number of tiles in a block if the array has one element per block, and None
        otherwise.
    """

    number: int
    layer: jax.Array | None
    offset: jax.Array
    mask: jax.Array | None
    width: int = 1
    tiles: int | None = None


Stores = list[tuple[Access, jax.Array]]

Key = tuple[int, int]
"""The indices of an operand and of its row or word."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """The arrays of a program's leaf.

    Args:
      leaf: int32 scalar, the index of the leaf in the kernel.
      operands, results: for each leaf, references to its flat arrays. Stacks have the
        shape ``[layers, size]``.
      arrangement: the arrangement of the program's lanes.
    """

    leaf: jax.Array | np.int32
    operands: Sequence[Sequence]
    results: Sequence[Sequence]
    arrangement: Arrangement

    @property
    def has_branches(self) -> bool:
        """Whether loads and stores are in branches, of which there should be few."""
        return len(self.operands) > 1

    def load(self, accesses: Mapping[Key, Access]) -> dict[Key, typing.Any]:
        """Load elements of operands, keyed like the accesses.

        If there are blocks of two sizes, separate branches load the values per block of
        each size. Triton cannot compile one conditional that returns both ("requires
        the same encoding for all operands and results").
        """
        kinds, loaded = {key: access.tiles for key, access in accesses.items()}, {}
        if not self._is_marked or len({*kinds.values()} - {None}) < 2:
            kinds = dict.fromkeys(accesses)
        for kind in dict.fromkeys(kinds.values()):
            some = {key: accesses[key] for key, each in kinds.items() if each == kind}

            def load(number: int, some=some):
                refs = self.operands[number]
                load = self.arrangement.load
                new = [load(refs[a.number], a, number) for a in some.values()]
                return self._marked(new, number)

            loaded |= zip(some, self._branches(load), strict=True)
        return loaded

    def store(self, new: Stores) -> None:
        """Store elements of results."""

        def store(number: int, *values):
            refs, values = self.results[number], self._marked(values, number)
            for (a, _), value in zip(new, values, strict=True):
                self.arrangement.store(refs[a.number], a, value, number)

        self._branches(store, *(value for _, value in new))

    def _branches(self, function: Callable, *args):
        if not self.has_branches:
            return function(0, *args)
        return by_branches(self.leaf, range(len(self.operands)), function, *args)

    @property
    def _is_marked(self) -> bool:
        return self.has_branches and self.arrangement.marks_branches

    def _marked(self, values: Sequence[jax.Array], number: int) -> tuple:
        """Return the values of a branch, with a mark on one of them.

        The mark contains the index of the leaf. Without it, LLVM would merge the loads
        of all branches into one, and select each array's address from the addresses of
        all leaves, which takes 12 instructions per parameter for 12 leaves of AdamW.
        """
        if not self._is_marked:
            return tuple(values)
        mark = typing.cast(Instructions, self.arrangement.instructions).opaque
        least = min(range(len(values)), key=lambda i: values[i].size)
        return tuple(mark(x, number) if i == least else x for i, x in enumerate(values))


@dataclasses.dataclass(frozen=True)
class Packed:
    """The words of a packed operand or result.

    If the bit offsets of fields repeat within a chunk, they are all static. For other
    field widths, unrolling the whole period would compile slowly and spill registers
    (the offsets of odd widths repeat after 32 rows). The fields of a chunk may then
    begin anywhere in a word. The chunk's words are shifted as one large integer, so
    offsets within the chunk are static again. If a chunk fills a word only partly, the
    loop carries this word to the next chunk.

    Args:
      number: the index of the operand or result.
      layer: the index of the layer; None if the array is not a stack.
      lanes: the program's lanes.
      bits: width of a field.
    """

    number: int
    layer: jax.Array | None
    lanes: BlockLanes
    bits: int

    @property
    def _chunk_bits(self) -> int:
        return self.lanes.tiling.chunk_rows * self.bits

    def _accesses(self, start: Scalar, count: int = 1) -> list[Access]:
        """Return accesses to ``count`` words of each lane, from word ``start``."""
        words = self.lanes.words(self.bits, start, count)
        width = self.lanes.tiling.word_width
        return [Access(self.number, self.layer, *word, width) for word in words]

    def _place(self, chunk: Scalar) -> tuple[Scalar, typing.Any]:
        """Return the word, and the bit in this word, where a chunk's fields begin."""
        start = chunk * np.int32(self._chunk_bits)
        return start >> np.int32(5), (start & np.int32(31)).astype(jnp.uint32)

    def loads(self, chunk: Scalar) -> list[Access]:
        """Return accesses to the words that contain the fields of a chunk."""
        size = self._chunk_bits
        if is_unrolled(self.bits):
            count = size // 32
            return self._accesses(chunk * np.int32(count), count)
        first, _ = self._place(chunk)
        # The array may end after the chunk's last word. The next access then reads this
        # word again, but no field of the chunk uses the result.
        last = (chunk * np.int32(size) + np.int32(size - 1)) >> np.int32(5)
        chunks = period(self.bits)[0] // self.lanes.tiling.chunk_rows
        most = max((size * i % 32 + size + 31) // 32 for i in range(chunks))
        return [
            self._accesses(jnp.minimum(first + np.int32(i), last))[0]
            for i in range(most)
        ]

    def aligned(self, chunk: Scalar, words: Sequence[jax.Array]) -> list[jax.Array]:
        """Shift the words of :meth:`loads` so that the chunk's fields come first."""
        if is_unrolled(self.bits):
            return list(words)
        _, shift = self._place(chunk)
        # Shift twice, because a shift by 32 is undefined.
        above = [(x << np.uint32(1)) << (np.uint32(31) - shift) for x in words[1:]]
        below = [x >> shift for x in words]
        return [x | y for x, y in zip(below, above, strict=False)] + below[-1:]

    def first_carry(self) -> jax.Array | None:
        """Return the initial carry of the loop over chunks, an empty word or None."""
        if is_unrolled(self.bits):
            return None
        arrangement = self.lanes.arrangement
        return arrangement.carried(jnp.zeros(arrangement.shape, jnp.uint32))

    def stores(
        self, chunk: Scalar, fields: Sequence, carry: jax.Array | None
    ) -> tuple[Stores, jax.Array | None]:
        """Return stores of the words that a chunk fills, and any partly filled word."""
        if carry is not None:
            return self._full_words(chunk, fields, carry)
        words = put_fields(fields, self.bits)
        words = self._without_padding(chunk, words)
        accesses = self._accesses(chunk * np.int32(len(words)), len(words))
        return list(zip(accesses, words, strict=True)), None

    def _full_words(
        self, chunk: Scalar, fields: Sequence, carry: jax.Array
    ) -> tuple[Stores, jax.Array]:
        first, shift = self._place(chunk)
        words = self._without_padding(chunk, join_fields(fields, self.bits))
        above = [(x >> np.uint32(1)) >> (np.uint32(31) - shift) for x in words]
        below = [x << shift for x in words]
        lowest = below[0] | carry
        words = [x | y for x, y in zip(below[1:], above, strict=False)]
        words = [lowest, *words, above[-1]]
        surely, rest = divmod(self._chunk_bits, 32)
        stores = [
            (self._accesses(first + np.int32(i))[0], words[i]) for i in range(surely)
        ]
        if not rest:
            return stores, words[surely]
        is_full = shift + np.uint32(rest) >= np.uint32(32)
        open_word = jnp.where(is_full, words[surely + 1], words[surely])
        (last,) = self._accesses(first + np.int32(surely))
        mask = jnp.broadcast_to(is_full, words[surely].shape)
        mask = mask if last.mask is None else last.mask & mask
        stores.append((dataclasses.replace(last, mask=mask), words[surely]))
        return stores, open_word

    def _without_padding(
        self, chunk: Scalar, words: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Set fields below the last row to 0 in the chunk's words, as ``pack`` does."""
        chunk_rows = np.int32(self.lanes.tiling.chunk_rows)
        left = self.lanes.rows_left(chunk * chunk_rows)
        if left is None:
            return list(words)
        # Lanes that do not exist write no words, so their bits do not matter.
        bits = jnp.minimum(left, chunk_rows) * np.int32(self.bits)
        # Triton's inline assembly needs arrays, but a count that all lanes have in
        # common is a scalar.
        arrangement = self.lanes.arrangement
        of_lanes = arrangement.instructions if bits.ndim else None
        lowest_bits = (of_lanes or xla).lowest_bits
        expand = arrangement.expand if bits.ndim else (lambda mask: mask)
        return [
            word & expand(lowest_bits(bits - np.int32(32 * n)))
            for n, word in enumerate(words)
        ]
