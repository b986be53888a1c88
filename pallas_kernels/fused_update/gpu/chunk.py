"""The update of the rows that a loop of :mod:`.program` unrolls: load, run, store."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.fused_update import xla
from pallas_kernels.fused_update.gpu.array_access import PerBlock, Plain
from pallas_kernels.fused_update.gpu.lanes import Lanes, TiledLanes
from pallas_kernels.fused_update.gpu.memory import Access, Memory
from pallas_kernels.fused_update.gpu.peephole import Byte, with_peephole_rules
from pallas_kernels.fused_update.gpu.words import Reader, Writer
from pallas_kernels.fused_update.spec import BlockBody, Body
from pallas_kernels.gpu.instructions import Instructions

Stores = list[tuple[Access, jax.Array]]


class ChunkUpdate:
    """The update of the rows that a loop's body unrolls.

    Args:
      lanes, memory, scalars, instructions: see :class:`.program.Program`.
      body: what to compute.
      reads, writes: how operands and results are found, in their order.
    """

    def __init__(
        self,
        lanes: Lanes,
        memory: Memory,
        scalars: list[jax.Array],
        instructions: Instructions | None,
        body: Body | BlockBody,
        reads: Sequence[Plain | PerBlock | Reader],
        writes: Sequence[Plain | PerBlock | Writer],
    ):
        self._lanes, self._memory, self._scalars = lanes, memory, scalars
        self._instructions, self._body = instructions, body
        self._reads, self._writes = reads, writes
        of_rows = [x for x in writes if not isinstance(x, PerBlock)]
        bytes_ = tuple(
            i for i, x in enumerate(of_rows) if isinstance(x, Writer) and x.by_bytes
        )
        self._run = _with_instructions(body, None, instructions, bytes_)
        self._has_blocks = any(isinstance(x, PerBlock) for x in (*reads, *writes))
        # Rows that are read and written one by one take fewer registers.
        self._at_once = self._has_blocks or memory.has_branches

    def __call__(self, chunk: jax.Array) -> None:
        """Update a chunk, by its number."""
        rows, memory = self._rows(chunk), self._memory
        wanted = self._words_and_blocks(chunk)
        loaded = self._load(wanted | (self._plain(rows) if self._at_once else {}))
        for number, x in enumerate(self._reads):
            if isinstance(x, Reader):
                x.take([loaded[key] for key in wanted if key[0] == number])
        run, stores = self._run, []
        if self._has_blocks:
            run, stores = self._with_blocks(chunk, rows, loaded)
        for row in rows:
            if not self._at_once:
                loaded |= self._load(self._plain([row]))
            new = run(self._values(row, loaded), self._scalars, row.index)
            stores += self._stores(row, new)
            if not memory.has_branches:
                # Backwards: what was computed last is written first. With float16
                # weights, the compiler otherwise keeps up to 29 registers more.
                memory.store(stores[::-1])
                stores = []
        memory.store([*stores, *(s for x in packed(self._writes) for s in x.finish())])

    def _rows(self, chunk: jax.Array) -> list["_Row"]:
        lanes = self._lanes
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
            elif isinstance(x, PerBlock):
                wanted[number, 0] = x.access(chunk)
        return wanted

    def _plain(self, rows: Sequence["_Row"]) -> "_Accesses":
        """What these rows need of the other operands."""
        return {
            (number, row.number): x.access(row.offset, row.exists)
            for row in rows
            for number, x in enumerate(self._reads)
            if isinstance(x, Plain)
        }

    def _load(self, wanted: "_Accesses") -> dict[tuple[int, int], jax.Array]:
        values = self._memory.load(list(wanted.values()))
        return dict(zip(wanted, values, strict=True))

    def _values(self, row: "_Row", loaded) -> list[jax.Array | Byte]:
        """The elements of a row, per operand that is not per block."""
        return [
            x.field(row.number) if isinstance(x, Reader) else loaded[number, row.number]
            for number, x in enumerate(self._reads)
            if not isinstance(x, PerBlock)
        ]

    def _stores(self, row: "_Row", new: Sequence) -> Stores:
        """What a row's results write at once; fields wait until words are full."""
        stores = []
        of_rows = [x for x in self._writes if not isinstance(x, PerBlock)]
        for x, value in zip(of_rows, new, strict=True):
            if isinstance(x, Plain):
                stores.append((x.access(row.offset, row.exists), value))
            else:
                x.put(self._without_padding(value, row.exists))
        return stores

    def _without_padding(self, fields, exists: jax.Array | None):
        """Fields that are 0 where there are no elements, as ``pack`` has them."""
        # Lanes that do not exist write no words.
        if exists is None or exists is self._lanes.inside:
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
        body = typing.cast(BlockBody, self._body)
        lanes = typing.cast(TiledLanes, self._lanes)
        expand, instructions = lanes.arrangement.expand, self._instructions
        decode, encode = body.before, body.after
        if instructions is not None:
            decode = with_peephole_rules(decode, instructions)
            encode = with_peephole_rules(encode, instructions)
        reads = [n for n, x in enumerate(self._reads) if isinstance(x, PerBlock)]
        of_blocks = [loaded[n, 0] for n in reads]
        before = jax.tree.map(expand, decode(of_blocks))
        maxima, stored, after = [], [], ()
        for number in range(len(body.rounds)):
            maxima += self._maxima(number, rows, loaded, before, after)
            stored, after = encode(maxima, of_blocks, self._scalars)
            after = jax.tree.map(expand, after)
        writes = (x for x in self._writes if isinstance(x, PerBlock))
        stores = [(x.access(chunk), v) for x, v in zip(writes, stored, strict=True)]
        return lambda *args: self._run(*args, before, after), stores

    def _maxima(self, number: int, rows: Sequence["_Row"], loaded, *of_blocks) -> list:
        """The maxima of a round, over the blocks of the rows."""
        body = typing.cast(BlockBody, self._body)
        lanes = typing.cast(TiledLanes, self._lanes)
        statistics = _with_instructions(body, number, self._instructions)
        sizes = body.rounds[number]
        maxima = [lanes.arrangement.zeros(jnp.int32)] * len(sizes)
        for row in rows:
            values = self._values(row, loaded)
            new = statistics(values, self._scalars, row.index, *of_blocks)
            if row.exists is not None:
                new = [jnp.where(row.exists, x, np.int32(0)) for x in new]
            maxima = [jnp.maximum(*pair) for pair in zip(maxima, new, strict=True)]
        return [
            lanes.blocks_of(size).maxima(x)
            for size, x in zip(sizes, maxima, strict=True)
        ]


@functools.lru_cache(maxsize=256)
def _with_instructions(
    body: Body | BlockBody,
    number: int | None,
    instructions: Instructions | None,
    bytes_: tuple[int, ...] = (),
) -> Callable:
    """A body with a launcher's own instructions, unless XLA runs it.

    It is jitted, so that JAX traces it once for all rows, and for all kernels whose
    bodies are equal.

    Args:
      body: the body.
      number: of the round whose statistics are meant; None for the body itself.
      instructions: of the launcher.
      bytes_: numbers of the results that are fields of 8 bits.
    """
    function: Callable = body
    if number is not None:
        of_blocks = typing.cast(BlockBody, body)
        function = functools.partial(of_blocks.statistics, number)

    def run(values, scalars, index, *of_blocks):
        chosen = (instructions or xla).multiply_add
        return function(values, scalars, index, chosen, *of_blocks)

    if instructions is None:
        return jax.jit(run)
    return jax.jit(with_peephole_rules(run, instructions, bytes_))


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


def packed(writes: Sequence) -> list[Writer]:
    """The results that are packed, whose words may be open from chunk to chunk."""
    return [x for x in writes if isinstance(x, Writer)]
