"""How a program reads and writes the arrays of its leaf, packed fields among them.

A kernel may update many leaves, as a launch takes some microseconds, many times as long
as the update of a small leaf. Each leaf gets as many programs as it needs.
A program loads and stores by a tree of branches, one for each leaf. What lies between,
which is nearly all of it, is the same code for all leaves.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bitfields import get_field, join_fields, put_fields
from pallas_kernels.fused_update import xla
from pallas_kernels.fused_update.gpu.lanes import BlockLanes
from pallas_kernels.fused_update.gpu.numbers import Scalar
from pallas_kernels.gpu.instructions import Instructions, by_branches
from pallas_kernels.layout import is_unrolled, period


@dataclasses.dataclass(frozen=True)
class Access:
    """Elements of one array of a leaf.

    Args:
      number: of the operand or the result.
      layer: int32 scalar, the layer of a stack; None if it is not a stack.
      offset: int32, where the elements are in the array, or in its layer.
      mask: which of them exist; None if all do.
      width: how many neighbouring lanes surely have neighbouring elements, the first
        of them aligned to as many, of which all exist or none.
      tiles: of the block that each element is of; None if lanes have their own.
    """

    number: int
    layer: jax.Array | None
    offset: jax.Array
    mask: jax.Array | None
    width: int = 1
    tiles: int | None = None


Stores = list[tuple[Access, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Memory:
    """The arrays of the leaf that a program updates, as it loads and stores them.

    Args:
      leaf: int32 scalar, which of the kernel's leaves it is.
      operands, results: of each leaf, references to flat arrays; those of stacks are of
        shape ``[layers, size]``.
      load_from, store_to: the launcher's: of a reference, an access, the value to
        store, and the number of the leaf.
      mark: of an array and a number, the same array by instructions that differ for
        different numbers; None if LLVM does not compile the kernel.
    """

    leaf: jax.Array | np.int32
    operands: Sequence[Sequence]
    results: Sequence[Sequence]
    load_from: Callable
    store_to: Callable
    mark: Callable[[jax.Array, int], jax.Array] | None

    @property
    def has_branches(self) -> bool:
        """Whether loads and stores take branches, so that each should do much."""
        return len(self.operands) > 1

    def load(self, accesses: Sequence[Access]) -> list[jax.Array]:
        """Elements of operands.

        For LLVM, what is per block is loaded apart from the rest where blocks are of
        two sizes. Triton cannot compile one conditional that gives both ("requires the
        same encoding for all operands and results").
        """
        kinds, loaded = [access.tiles for access in accesses], {}
        is_marked = self.has_branches and self.mark is not None
        if not is_marked or len(set(kinds) - {None}) < 2:
            kinds = [None] * len(accesses)
        for kind in dict.fromkeys(kinds):
            some = {i: accesses[i] for i, each in enumerate(kinds) if each == kind}

            def load(number: int, some=some):
                refs = self.operands[number]
                return self._marked(
                    [self.load_from(refs[a.number], a, number) for a in some.values()],
                    number,
                )

            loaded |= zip(some, self._branches(load), strict=True)
        return [loaded[i] for i in range(len(accesses))]

    def store(self, new: Stores) -> None:
        """Write elements of results."""

        def store(number: int, *values):
            refs, values = self.results[number], self._marked(values, number)
            for (a, _), value in zip(new, values, strict=True):
                self.store_to(refs[a.number], a, value, number)

        self._branches(store, *(value for _, value in new))

    def _branches(self, function: Callable, *args):
        if not self.has_branches:
            return function(0, *args)
        return by_branches(self.leaf, range(len(self.operands)), function, *args)

    def _marked(self, values: Sequence[jax.Array], number: int) -> tuple:
        """The values of a branch, one of them marked with its number.

        Else LLVM would take the loads of all branches for one with another address,
        and select each array's address from all leaves': 12 instructions per parameter
        for 12 leaves of AdamW.
        """
        mark = self.mark
        if mark is None or not self.has_branches:
            return tuple(values)
        least = min(range(len(values)), key=lambda i: values[i].size)
        return tuple(mark(x, number) if i == least else x for i, x in enumerate(values))


@dataclasses.dataclass(frozen=True)
class Packed:
    """The words of a packed operand or result.

    Where the bit offsets of fields repeat after few rows, a loop's body unrolls that
    many and every offset is static. Other widths (the odd ones repeat after 32 rows)
    would unroll the whole period, which compiles slowly and spills. There a chunk's
    fields begin anywhere in a word: its words are shifted as one number, by which the
    offsets within the chunk are static again, and a word that a chunk does not fill is
    carried to the next.

    Args:
      number: of the operand or result.
      layer: of the stack; None if it is not a stack.
      lanes: of the program.
      bits: width of a field.
      instructions: of the launcher; None if XLA runs the operations.
    """

    number: int
    layer: jax.Array | None
    lanes: BlockLanes
    bits: int
    instructions: Instructions | None

    @property
    def _chunk_bits(self) -> int:
        return self.lanes.tiling.chunk_rows * self.bits

    def _accesses(self, start: Scalar, count: int = 1) -> list[Access]:
        """So many words from ``start``, an int32 scalar, on from the lanes' first."""
        words = self.lanes.words(self.bits, start, count)
        width = self.lanes.tiling.word_width
        return [Access(self.number, self.layer, *word, width) for word in words]

    def _place(self, chunk: Scalar) -> tuple[Scalar, typing.Any]:
        """The word in which a chunk's fields begin, and at which bit."""
        start = chunk * np.int32(self._chunk_bits)
        return start >> np.int32(5), (start & np.int32(31)).astype(jnp.uint32)

    def loads(self, chunk: Scalar) -> list[Access]:
        """The words in which the fields of a chunk are."""
        size = self._chunk_bits
        if is_unrolled(self.bits):
            count = size // 32
            return self._accesses(chunk * np.int32(count), count)
        first, _ = self._place(chunk)
        # No word after the chunk's last is read, as there may be none. The last is read
        # again, and what it gives is beyond the chunk's fields.
        last = (chunk * np.int32(size) + np.int32(size - 1)) >> np.int32(5)
        chunks = period(self.bits)[0] // self.lanes.tiling.chunk_rows
        most = max((size * i % 32 + size + 31) // 32 for i in range(chunks))
        return [
            self._accesses(jnp.minimum(first + np.int32(i), last))[0]
            for i in range(most)
        ]

    def aligned(self, chunk: Scalar, words: Sequence[jax.Array]) -> list[jax.Array]:
        """The words of :meth:`loads`, shifted to where the chunk's fields begin."""
        if is_unrolled(self.bits):
            return list(words)
        _, shift = self._place(chunk)
        # In two shifts, as one by 32 is not defined.
        above = [(x << np.uint32(1)) << (np.uint32(31) - shift) for x in words[1:]]
        below = [x >> shift for x in words]
        return [x | y for x, y in zip(below, above, strict=False)] + below[-1:]

    def field(self, words: Sequence[jax.Array], row: int) -> jax.Array:
        """The fields of a row of the chunk that these words are :meth:`aligned` to."""
        return get_field(words, row, self.bits)

    def first_carry(self) -> jax.Array | None:
        """What the loop over chunks carries at first: an empty word, if any."""
        if is_unrolled(self.bits):
            return None
        return self.carried(jnp.zeros(self.lanes.arrangement.shape, jnp.uint32))

    def carried(self, word: jax.Array | None) -> jax.Array | None:
        """A word that a chunk leaves open, as the loop carries it, if any."""
        return None if word is None else self.lanes.arrangement.carried(word)

    def stores(
        self, chunk: Scalar, fields: Sequence, carry: jax.Array | None
    ) -> tuple[Stores, jax.Array | None]:
        """The words that a chunk fills, and the word that it leaves open."""
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
        """The chunk's words with fields that are 0 below the last row, as ``pack``."""
        chunk_rows = np.int32(self.lanes.tiling.chunk_rows)
        left = self.lanes.rows_left(chunk * chunk_rows)
        if left is None:
            return list(words)
        # Lanes that do not exist write no words.
        bits = jnp.minimum(left, chunk_rows) * np.int32(self.bits)
        # Triton's assembly takes no scalars, which counts are where no lane differs.
        of_lanes = self.instructions if bits.ndim else None
        lowest_bits = (of_lanes or xla).lowest_bits
        expand = self.lanes.arrangement.expand if bits.ndim else (lambda mask: mask)
        return [
            word & expand(lowest_bits(bits - np.int32(32 * n)))
            for n, word in enumerate(words)
        ]
