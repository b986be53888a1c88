"""The code of a program.

A program finds its leaf, loads the operands, runs the update's elementwise body, and
stores the results. :mod:`.lanes` computes the offsets of the elements. No code here
depends on the launcher.

A kernel launch takes a few microseconds, much longer than the update of a small leaf,
so a kernel may update many leaves. Each leaf gets as many programs as it needs. A
program selects the arrays of its leaf with a tree of branches, one tree for its loads
and one for its stores. The code between loads and stores, which is nearly all of the
kernel, is the same for all leaves.
"""

import dataclasses
import functools
import itertools
import math
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.bitfields import get_field, join_fields
from pallas_kernels.fused_update import xla
from pallas_kernels.fused_update.gpu.instructions import (
    Byte,
    Difference,
    Instructions,
    by_branches,
)
from pallas_kernels.fused_update.gpu.kernel import Kernel
from pallas_kernels.fused_update.gpu.lanes import (
    Arrangement,
    BlockLanes,
    BlockPlaces,
    Lanes,
    Row,
    lanes_of,
)
from pallas_kernels.fused_update.gpu.peephole import (
    with_instructions,
    with_peephole_rules,
)
from pallas_kernels.fused_update.gpu.tiling import Scalar, Tiling, constants
from pallas_kernels.fused_update.spec import BlockBody, Operand, Result
from pallas_kernels.layout import TILE_SIZE, is_unrolled, period


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
      is_bitmap: see :attr:`.spec.Result.is_bitmap`.
    """

    number: int
    layer: jax.Array | None
    lanes: BlockLanes
    bits: int
    is_bitmap: bool = False

    @property
    def _width(self) -> int:
        """The number of bits of a field that are stored."""
        return 1 if self.is_bitmap else self.bits

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
        given = typing.cast(Instructions, self.lanes.arrangement.instructions)
        if isinstance(fields[0], Byte):
            fours = range(0, len(fields), 4)
            words = [given.put_bytes(fields[first : first + 4]) for first in fours]
        elif isinstance(fields[0], Difference):
            words = [given.put_differences(fields).astype(jnp.uint32)]
        else:
            words = join_fields(fields, self._width)
        words = self._without_padding(chunk, words)
        if self.is_bitmap:
            words = [word.astype(jnp.uint8) for word in words]
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
        bits = jnp.minimum(left, chunk_rows) * np.int32(self._width)
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


def run_program(
    kernel: Kernel,
    program: jax.Array,
    refs: Iterable,
    arrangement: Arrangement,
    guard: Callable[[Callable], None] = lambda work: work(),
) -> None:
    """Run one program of a kernel.

    Args:
      kernel: the kernel.
      program: int32 scalar, the index of the program in the kernel.
      refs: references to the kernel's arguments, and then to all results.
      arrangement: the arrangement of the program's lanes in arrays.
      guard: function that receives the update as a function, and calls it or skips it.
    """
    shared, operands, results = kernel.named(refs)
    leaf, exists = np.int32(0), None
    if kernel.numbers is not None:
        leaf, program, exists = kernel.numbers.find(shared.numbers, program)
        numbers = kernel.numbers.read(shared.numbers, leaf, arrangement.instructions)
    else:
        numbers = constants(kernel.tiling.numbers(are_equal=True))
        if kernel.leaves > 1:
            # With 64-bit types enabled, a Python int would be an int64 here.
            programs = np.int32(kernel.tiling.programs)
            leaf, program = lax.div(program, programs), lax.rem(program, programs)
    row = jnp.uint32(0) if shared.rows is None else shared.rows[leaf]
    base = jnp.uint32(0) if shared.bases is None else shared.bases[leaf]
    layer = jnp.int32(0) if shared.layer is None else shared.layer[np.int32(0)]
    # Read the table before any store, because a result might alias it.
    first = row.astype(jnp.int32) * np.int32(kernel.table_width)
    scalars = [shared.table[first + np.int32(i)] for i in range(kernel.table_width)]
    if shared.layer is not None:
        layer_size = math.prod(kernel.leaf.shape) % 2**32
        base = base + layer.astype(jnp.uint32) * np.uint32(layer_size)
    memory = Memory(leaf, operands, results, arrangement)

    def update():
        lanes = lanes_of(kernel.tiling, arrangement, program, base, numbers)
        _Program(kernel, lanes, memory, layer, scalars).update()

    if kernel.when is not None:
        # Results overwrite operands, so skipping the stores keeps the old values.
        proceeds = scalars[kernel.when] != np.uint32(0)
        exists = proceeds if exists is None else exists & proceeds
    if exists is None:
        guard(update)
    else:
        pl.when(exists)(lambda: guard(update))


class _Program:
    """Updates the lanes of one program. ``scalars`` are arguments of the body."""

    def __init__(
        self,
        kernel: Kernel,
        lanes: Lanes,
        memory: Memory,
        layer: jax.Array,
        scalars: list[jax.Array],
    ):
        self._leaf, self._body = kernel.leaf, kernel.body
        self._lanes, self._memory, self._layer = lanes, memory, layer
        self._scalars, self._instructions = scalars, memory.arrangement.instructions
        operands, results = enumerate(kernel.leaf.operands), kernel.leaf.results
        self._reads = [self._array(i, operand, i) for i, operand in operands]
        self._writes = [
            self._array(i, result, result.overwrites)
            for i, result in enumerate(results)
        ]
        self._per_row = [x for x in self._writes if not isinstance(x, _PerBlock)]
        self._packed = [x for x in self._per_row if isinstance(x, Packed)]
        of_8_bits = tuple(
            i
            for i, x in enumerate(self._per_row)
            if isinstance(x, Packed) and x.bits == 8
        )
        self._run = with_instructions(
            self._body, "__call__", self._instructions, of_8_bits
        )
        # Reading and writing rows one by one needs fewer registers.
        self._reads_at_once = bool(self._leaf.block_sizes) or memory.has_branches

    @property
    def _block_lanes(self) -> BlockLanes:
        return typing.cast(BlockLanes, self._lanes)

    def _array(self, number: int, like: Operand | Result, operand: int | None):
        """Return the accessor of an operand, or of a result that replaces one."""
        layer = self._layer if operand in self._leaf.in_stacks else None
        if like.block_size is not None:
            places = self._block_lanes.blocks_of(like.block_size)
            return _PerBlock(number, layer, places)
        if like.bits is not None:
            is_bitmap = isinstance(like, Result) and like.is_bitmap
            return Packed(number, layer, self._block_lanes, like.bits, is_bitmap)
        if like.repeated:
            return _Repeated(number, self._lanes.tiling, like.repeated)
        is_written = isinstance(like, Result) or operand in self._leaf.overwritten
        return _Plain(number, layer, self._lanes.tiling.width, is_written)

    def update(self) -> None:
        """Update all rows of the lanes, chunk by chunk."""
        carry = [x.first_carry() for x in self._packed]
        chunks = self._lanes.tiling.chunks
        if chunks == 1:
            self._update_chunk(np.int32(0), carry)
            return

        # With 64-bit types enabled, a fori_loop of static length counts in int64,
        # which needs more registers.
        def step(counted, _):
            chunk, carry = counted
            new = self._update_chunk(chunk, carry)
            carry = jax.tree.map(self._block_lanes.arrangement.carried, new)
            return (chunk + np.int32(1), carry), None

        lax.scan(step, (jnp.int32(0), carry), length=chunks)

    def _update_chunk(self, chunk: Scalar, carry: list) -> list:
        """Update the chunk with this index, and return its partly filled words."""
        rows, memory = self._lanes.rows(chunk), self._memory
        wanted = self._words_and_blocks(chunk)
        at_once = self._plain(rows) if self._reads_at_once else {}
        loaded = memory.load(wanted | at_once)
        for number, x in enumerate(self._reads):
            if isinstance(x, Packed):
                words = [loaded[key] for key in wanted if key[0] == number]
                loaded[number, 0] = x.aligned(chunk, words)
        run, stores = self._run, []
        if self._leaf.block_sizes:
            run, stores = self._with_blocks(chunk, rows, loaded)
        fields = {x.number: [] for x in self._packed}
        for row in rows:
            if not self._reads_at_once:
                loaded |= memory.load(self._plain([row]))
            new = run(self._values(row, loaded), self._scalars, row.index)
            for x, value in zip(self._per_row, new, strict=True):
                if isinstance(x, _Plain):
                    stores.append((x.access(row), value))
                else:
                    fields[x.number].append(value)
            if not memory.has_branches:
                # Write the last results first. In the original order, kernels with
                # float16 weights need up to 29 more registers.
                memory.store(stores[::-1])
                stores = []
        full = [
            x.stores(chunk, fields[x.number], open_word)
            for x, open_word in zip(self._packed, carry, strict=True)
        ]
        memory.store([*stores, *(store for words, _ in full for store in words)])
        return [open_word for _, open_word in full]

    def _words_and_blocks(self, chunk: Scalar) -> dict[Key, Access]:
        """Return accesses to the chunk's packed operands and per-block operands."""
        wanted = {}
        for number, x in enumerate(self._reads):
            if isinstance(x, Packed):
                words = enumerate(x.loads(chunk))
                wanted |= {(number, i): access for i, access in words}
            elif isinstance(x, _PerBlock):
                wanted[number, 0] = x.access(chunk)
        return wanted

    def _plain(self, rows: Sequence[Row]) -> dict[Key, Access]:
        """Return accesses to all other operands of these rows."""
        return {
            (number, row.number): x.access(row)
            for row in rows
            for number, x in enumerate(self._reads)
            if isinstance(x, (_Plain, _Repeated))
        }

    def _values(self, row: Row, loaded) -> list[jax.Array]:
        """Return a row's elements for each operand that is not per block."""
        return [
            get_field(loaded[number, 0], row.number, x.bits)
            if isinstance(x, Packed)
            else loaded[number, row.number]
            for number, x in enumerate(self._reads)
            if not isinstance(x, _PerBlock)
        ]

    def _with_blocks(
        self, chunk: Scalar, rows: Sequence[Row], loaded
    ) -> tuple[Callable, Stores]:
        """Compute the maxima over blocks.

        Returns:
          ``(run, stores)``: the body as a function of a row, with the values of the
          row's blocks already passed, and the stores of the per-block results.
        """
        body = typing.cast(BlockBody, self._body)
        block_sizes = body.block_sizes
        expand = self._block_lanes.arrangement.expand
        decode = with_peephole_rules(body.before, self._instructions)
        encode = with_peephole_rules(body.after, self._instructions)
        reads = [n for n, x in enumerate(self._reads) if isinstance(x, _PerBlock)]
        of_blocks = [loaded[n, 0] for n in reads]
        given, maxima, stored = [jax.tree.map(expand, decode(of_blocks))], [], []
        while len(maxima) < len(block_sizes):
            sizes = block_sizes[len(maxima) :]
            maxima += self._maxima(chunk, rows, loaded, given, sizes)
            stored, after = encode(maxima, of_blocks)
            given[1:] = [jax.tree.map(expand, after)]
        writes = (x for x in self._writes if isinstance(x, _PerBlock))
        stores = [(x.access(chunk), v) for x, v in zip(writes, stored, strict=True)]
        return lambda *args: self._run(*args, *given), stores

    def _maxima(
        self,
        chunk: Scalar,
        rows: Sequence[Row],
        loaded,
        given: Sequence[tuple],
        sizes: Sequence[int],
    ) -> list:
        """Return the next maxima over blocks, whose sizes come first in ``sizes``."""
        body, lanes = typing.cast(BlockBody, self._body), self._block_lanes
        statistics = with_instructions(body, "statistics", self._instructions)
        left = lanes.rows_left(chunk * np.int32(lanes.tiling.chunk_rows))
        left = None if left is None else lanes.arrangement.expand(left)
        zeros = jnp.zeros(lanes.arrangement.shape, jnp.int32)
        maxima: list = []
        for row in rows:
            values = self._values(row, loaded)
            new = statistics(values, self._scalars, row.index, *given)
            maxima = maxima or [lanes.arrangement.carried(zeros)] * len(new)
            larger = jnp.maximum
            if left is not None:
                larger_before = (self._instructions or xla).larger_before
                larger = functools.partial(larger_before, row.number, left)
            maxima = [larger(*pair) for pair in zip(maxima, new, strict=True)]
        if lanes.inside is not None:
            maxima = [jnp.where(lanes.inside, x, np.int32(0)) for x in maxima]
        return [
            lanes.arrangement.maxima(x, lanes.tiling.block_size // size)
            for size, x in zip(sizes, maxima, strict=False)
        ]


class _Plain(typing.NamedTuple):
    """An operand or result with one element for each element of the leaf.

    If ``is_written``, programs write the array, so they do not read each other's
    elements.
    """

    number: int
    layer: jax.Array | None
    width: int
    is_written: bool

    def access(self, row: Row) -> Access:
        """Return the access to the elements of a row of lanes."""
        mask = row.exists if self.is_written else row.readable
        return Access(self.number, self.layer, row.offset, mask, self.width)


class _Repeated(typing.NamedTuple):
    """An operand with a single element along the axes ``repeated`` of the leaf."""

    number: int
    tiling: Tiling
    repeated: tuple[int, ...]

    def access(self, row: Row) -> Access:
        """Return the access to the elements that a row of lanes reads."""
        rest, place, stride = row.offset.astype(jnp.uint32), jnp.int32(0), 1
        axes = enumerate(self.tiling.shape)
        runs = itertools.groupby(axes, lambda axis: axis[0] in self.repeated)
        sizes = [(gone, math.prod(n for _, n in run)) for gone, run in runs]
        for gone, size in reversed(sizes):
            along = jnp.full_like(rest, size)
            if not gone:
                within = lax.rem(rest, along).astype(jnp.int32)
                place, stride = place + within * np.int32(stride), stride * size
            rest = lax.div(rest, along)
        # The lanes of a tile are neighbors along the last axis.
        width = 1 if len(self.tiling.shape) - 1 in self.repeated else self.tiling.width
        place = jnp.broadcast_to(place, row.offset.shape)
        return Access(self.number, None, place, row.readable, width)


class _PerBlock(typing.NamedTuple):
    """An operand or result with one element for each block."""

    number: int
    layer: jax.Array | None
    places: BlockPlaces

    def access(self, chunk: Scalar) -> Access:
        """Return the access to the values of the blocks in a chunk of rows."""
        tiles = self.places.block_size // TILE_SIZE
        place = self.places.of_chunk(chunk)
        return Access(self.number, self.layer, *place, tiles=tiles)
