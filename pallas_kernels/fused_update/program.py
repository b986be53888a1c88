"""What one program of a kernel does: it reads rows, runs the body, and writes.

Where it reads and writes is decided by :mod:`.lanes`, and in which leaf's arrays by
:mod:`.memory`. What runs between, the body, is elementwise. None of it knows which
launcher runs it.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.fused_update.instructions import Instructions
from pallas_kernels.fused_update.lanes import (
    BlockPlaces,
    Lanes,
    TiledLanes,
)
from pallas_kernels.fused_update.memory import Access, Memory
from pallas_kernels.fused_update.short_forms import (
    Byte,
    with_instructions,
    with_short_forms,
)
from pallas_kernels.fused_update.spec import BlockBody, Body, Operand, Result
from pallas_kernels.fused_update.words import Reader, Writer
from pallas_kernels.layout import TILE_SIZE

Stores = list[tuple[Access, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Program:
    """One program of the kernel.

    Args:
      lanes: its lanes.
      memory: the arrays of its leaf.
      layer: int32 scalar, the layer of the stacks.
      stacked: numbers of the operands that are stacks.
      scalars: the body's.
      instructions: of the launcher; None if XLA runs the operations.
    """

    lanes: Lanes
    memory: Memory
    layer: jax.Array
    stacked: frozenset[int]
    scalars: list[jax.Array]
    instructions: Instructions | None

    def update(
        self,
        body: Body | BlockBody,
        operands: Sequence[Operand],
        results: Sequence[Result],
    ) -> None:
        """Update the lanes.

        Args:
          body: what to compute.
          operands, results: of the leaf, without arrays.
        """
        tiling = self.lanes.tiling
        reads = [self._read(operand, i) for i, operand in enumerate(operands)]
        writes = [self._write(result, i) for i, result in enumerate(results)]
        writers = _packed(writes)
        update = _ChunkUpdate(self, body, reads, writes)

        def visit(chunk, carry):
            for x, open_word in zip(writers, carry, strict=True):
                x.start(chunk, open_word)
            update(chunk)
            return [x.open_word for x in writers]

        carry = [x.first_carry(self.lanes.arrangement) for x in writers]
        count = tiling.lane_rows // tiling.chunk_rows
        if count == 1:
            visit(jnp.int32(0), carry)
            return

        # A fori_loop of static length counts in int64 with 64-bit types on, which
        # takes registers.
        def step(counted, _):
            chunk, carry = counted
            carry = [
                x if x is None else self.lanes.arrangement.carried(x)
                for x in visit(chunk, carry)
            ]
            return (chunk + np.int32(1), carry), None

        lax.scan(step, (jnp.int32(0), carry), length=count)

    def _read(self, operand: Operand, number: int) -> "_Plain | _PerBlock | Reader":
        at = self.layer if number in self.stacked else None
        if operand.block_size is not None:
            return _PerBlock(number, at, self._tiles.blocks_of(operand.block_size))
        if operand.bits is None:
            return _Plain(number, at, self.lanes.tiling.width)
        words = self._words(number, at, operand.bits)
        by_bytes = operand.bits == 8 and self.instructions is not None
        return Reader(operand.bits, self.lanes.tiling.chunk_rows, words, by_bytes)

    def _write(self, result: Result, number: int) -> "_Plain | _PerBlock | Writer":
        at = self.layer if result.overwrites in self.stacked else None
        if result.block_size is not None:
            return _PerBlock(number, at, self._tiles.blocks_of(result.block_size))
        if result.bits is None:
            return _Plain(number, at, self.lanes.tiling.width)
        words = self._words(number, at, result.bits)
        by_bytes = self.instructions if result.bits == 8 else None
        return Writer(result.bits, self.lanes.tiling.chunk_rows, words, by_bytes)

    def _words(self, number: int, layer: jax.Array | None, bits: int) -> "_Words":
        return _Words(self.memory, number, layer, self._tiles, bits)

    @property
    def _tiles(self) -> TiledLanes:
        """The lanes of a leaf in which something is packed or per block."""
        return typing.cast(TiledLanes, self.lanes)


class _ChunkUpdate:
    """The update of the rows that a loop's body unrolls.

    Args:
      program: the program.
      body: what to compute.
      reads, writes: how operands and results are found, in their order.
    """

    def __init__(self, program: Program, body: Body | BlockBody, reads, writes):
        self._program, self._body = program, body
        self._reads: Sequence[_Plain | _PerBlock | Reader] = reads
        self._writes: Sequence[_Plain | _PerBlock | Writer] = writes
        of_rows = [x for x in writes if not isinstance(x, _PerBlock)]
        bytes_ = tuple(
            i for i, x in enumerate(of_rows) if isinstance(x, Writer) and x.by_bytes
        )
        self._run = with_instructions(body, None, program.instructions, bytes_)
        self._has_blocks = any(isinstance(x, _PerBlock) for x in (*reads, *writes))
        # Rows that are read and written one by one take fewer registers.
        self._at_once = self._has_blocks or program.memory.has_branches

    def __call__(self, chunk: jax.Array) -> None:
        """Update a chunk, by its number."""
        rows, memory = self._rows(chunk), self._program.memory
        wanted = self._words_and_blocks(chunk)
        loaded = self._load(wanted | (self._plain(rows) if self._at_once else {}))
        for number, x in enumerate(self._reads):
            if isinstance(x, Reader):
                x.words = [loaded[key] for key in wanted if key[0] == number]
        run, stores = self._run, []
        if self._has_blocks:
            run, stores = self._with_blocks(chunk, rows, loaded)
        for row in rows:
            if not self._at_once:
                loaded |= self._load(self._plain([row]))
            new = run(self._values(row, loaded), self._program.scalars, row.index)
            stores += self._stores(row, new)
            if not memory.has_branches:
                # Backwards: what was computed last is written first. With float16
                # weights, the compiler otherwise keeps up to 29 registers more.
                memory.store(stores[::-1])
                stores = []
        memory.store([*stores, *(s for x in _packed(self._writes) for s in x.finish())])

    def _rows(self, chunk: jax.Array) -> list["_Row"]:
        lanes = self._program.lanes
        count = lanes.tiling.chunk_rows
        start = chunk * np.int32(count)
        return [
            _Row(
                number=r,
                index=lanes.element(start + np.int32(r)),
                offset=offset,
                exists=lanes.exists(start, r),
            )
            for r, offset in enumerate(lanes.offsets(start, count))
        ]

    def _words_and_blocks(self, chunk: jax.Array) -> "_Accesses":
        """What the chunk needs of packed operands and of those that are per block."""
        wanted = {}
        for number, x in enumerate(self._reads):
            if isinstance(x, Reader):
                words = x.start(chunk)
                wanted |= {(number, j): access for j, access in enumerate(words)}
            elif isinstance(x, _PerBlock):
                wanted[number, 0] = x.access(chunk)
        return wanted

    def _plain(self, rows: Sequence["_Row"]) -> "_Accesses":
        """What these rows need of the other operands."""
        return {
            (number, row.number): x.access(row.offset, row.exists)
            for row in rows
            for number, x in enumerate(self._reads)
            if isinstance(x, _Plain)
        }

    def _load(self, wanted: "_Accesses") -> dict[tuple[int, int], jax.Array]:
        values = self._program.memory.load(list(wanted.values()))
        return dict(zip(wanted, values, strict=True))

    def _values(self, row: "_Row", loaded) -> list[jax.Array | Byte]:
        """The elements of a row, per operand that is not per block."""
        return [
            x.field(row.number) if isinstance(x, Reader) else loaded[number, row.number]
            for number, x in enumerate(self._reads)
            if not isinstance(x, _PerBlock)
        ]

    def _stores(self, row: "_Row", new: Sequence) -> Stores:
        """What a row's results write at once; fields wait until words are full."""
        stores = []
        of_rows = [x for x in self._writes if not isinstance(x, _PerBlock)]
        for x, value in zip(of_rows, new, strict=True):
            if isinstance(x, _Plain):
                stores.append((x.access(row.offset, row.exists), value))
            else:
                x.put(row.number, self._without_padding(value, row.exists))
        return stores

    def _without_padding(self, fields, exists: jax.Array | None):
        """Fields that are 0 where there are no elements, as ``pack`` has them."""
        # Lanes that do not exist write no words.
        if exists is None or exists is self._program.lanes.inside:
            return fields
        return jax.tree.map(lambda x: jnp.where(exists, x, np.uint32(0)), fields)

    def _with_blocks(
        self, chunk: jax.Array, rows: Sequence["_Row"], loaded
    ) -> tuple[Callable, Stores]:
        """Take the maxima over blocks.

        Returns:
          ``run`` of rows, given what it needs of their blocks, and what is to be
          written per block.
        """
        program, body = self._program, typing.cast(BlockBody, self._body)
        lanes = typing.cast(TiledLanes, program.lanes)
        expand = lanes.arrangement.expand
        instructions = program.instructions
        decode, encode = body.before, body.after
        if instructions is not None:
            decode = with_short_forms(decode, instructions)
            encode = with_short_forms(encode, instructions)
        reads = [n for n, x in enumerate(self._reads) if isinstance(x, _PerBlock)]
        of_blocks = [loaded[n, 0] for n in reads]
        before = jax.tree.map(expand, decode(of_blocks))
        maxima, stored, after = [], [], ()
        for number in range(len(body.rounds)):
            maxima += self._maxima(number, rows, loaded, before, after)
            stored, after = encode(maxima, of_blocks, program.scalars)
            after = jax.tree.map(expand, after)
        writes = (x for x in self._writes if isinstance(x, _PerBlock))
        stores = [(x.access(chunk), v) for x, v in zip(writes, stored, strict=True)]
        return lambda *args: self._run(*args, before, after), stores

    def _maxima(self, number: int, rows: Sequence["_Row"], loaded, *of_blocks) -> list:
        """The maxima of a round, over the blocks of the rows."""
        program, body = self._program, typing.cast(BlockBody, self._body)
        lanes = typing.cast(TiledLanes, program.lanes)
        statistics = with_instructions(body, number, program.instructions)
        sizes = body.rounds[number]
        maxima = [lanes.arrangement.zeros(jnp.int32)] * len(sizes)
        for row in rows:
            values = self._values(row, loaded)
            new = statistics(values, program.scalars, row.index, *of_blocks)
            if row.exists is not None:
                new = [jnp.where(row.exists, x, np.int32(0)) for x in new]
            maxima = [jnp.maximum(*pair) for pair in zip(maxima, new, strict=True)]
        return [
            lanes.blocks_of(size).maxima(x)
            for size, x in zip(sizes, maxima, strict=True)
        ]


def unless_skipped(scalars: Sequence[jax.Array], when: int | None) -> Callable:
    """A decorator that runs a function at once, unless the scalar ``when`` is 0.

    Results are written over operands, so that what is not written keeps its value.
    """
    if when is None:
        return lambda function: function()
    return pl.when(scalars[when] != np.uint32(0))


_Accesses = dict[tuple[int, int], Access]
"""By the number of the operand, and of the row or word: what is to be loaded."""


@dataclasses.dataclass(frozen=True)
class _Row:
    """One row of a chunk.

    Args:
      number: in its chunk.
      index, offset: of the elements in the leaf and in plain arrays.
      exists: which lanes have an element; None if all have.
    """

    number: int
    index: jax.Array
    offset: jax.Array
    exists: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Plain:
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
        return Access(self.number, self.layer, offset, exists, self.width)


@dataclasses.dataclass(frozen=True)
class _PerBlock:
    """An array with one element per block, or a layer of a stack of them.

    Args:
      number, layer: as of :class:`_Plain`.
      places: of the blocks.
    """

    number: int
    layer: jax.Array | None
    places: BlockPlaces

    def access(self, chunk: jax.Array) -> Access:
        places = self.places
        return Access(
            self.number,
            self.layer,
            places.offset(chunk),
            places.exists(chunk),
            tiles=places.block_size // TILE_SIZE,
        )


def _packed(writes: Sequence) -> list[Writer]:
    return [x for x in writes if isinstance(x, Writer)]


@dataclasses.dataclass(frozen=True)
class _Words:
    """The words of the lanes; see :class:`.words.Words`."""

    memory: Memory
    number: int
    layer: jax.Array | None
    lanes: TiledLanes
    bits: int

    def load(self, start: jax.Array) -> jax.Array:
        (word,) = self.memory.load(self.accesses(start, 1))
        return word

    def store(self, start: jax.Array, value: jax.Array, when: jax.Array) -> None:
        (access,) = self.accesses(start, 1)
        when = jnp.broadcast_to(when, value.shape)
        mask = when if access.mask is None else access.mask & when
        self.memory.store([(dataclasses.replace(access, mask=mask), value)])

    def accesses(self, start: jax.Array, count: int) -> list[Access]:
        return [
            Access(
                self.number,
                self.layer,
                offset,
                self.lanes.has_word(self.bits, start + np.int32(word)),
                self.lanes.tiling.word_width,
            )
            for word, offset in enumerate(
                self.lanes.word_offsets(self.bits, start, count)
            )
        ]
