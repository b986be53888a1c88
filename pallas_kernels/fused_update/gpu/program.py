"""What a program of a kernel does: it finds its leaf, reads, runs the body, writes.

Where it reads and writes is decided by :mod:`.lanes`, and in which leaf's arrays by
:mod:`.arrays`. What runs between, the body, is elementwise. None of it knows which
launcher runs it.
"""

import dataclasses
import itertools
import typing
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.fused_update.gpu.arrays import (
    Access,
    Arrangement,
    Memory,
    OneOfMany,
)
from pallas_kernels.fused_update.gpu.kernel import Kernel
from pallas_kernels.fused_update.gpu.lanes import Lanes, TiledLanes, lanes_of
from pallas_kernels.fused_update.gpu.operands import PerBlock, Plain, Reader, Writer
from pallas_kernels.fused_update.gpu.peephole import (
    Byte,
    with_instructions,
    with_peephole_rules,
)
from pallas_kernels.fused_update.spec import BlockBody, Operand, Result
from pallas_kernels.gpu.instructions import Instructions

OneLeaf = Callable[[Sequence, Sequence, int], Memory]
"""A leaf's arrays: of the references to its operands and results, and its number."""


def run_program(
    kernel: Kernel,
    program: jax.Array,
    refs: Iterable,
    arrangement: Arrangement,
    one_leaf: OneLeaf,
    instructions: Instructions | None,
    *,
    mark: Callable[[jax.Array, int], jax.Array] | None = None,
    guard: Callable[[Callable], None] = lambda work: work(),
) -> None:
    """Do what a program of a kernel does.

    Args:
      kernel: which it is of.
      program: int32 scalar, its number among all programs.
      refs: to the kernel's arguments, and to all results.
      arrangement: of its lanes in arrays.
      one_leaf: makes a leaf's memory.
      instructions: of the launcher; None if XLA runs the operations.
      mark: see :class:`.arrays.OneOfMany`.
      guard: runs the update that it is given, or not.
    """
    refs, leaf = list(refs), np.int32(0)
    if kernel.leaves > 1:
        # Beside the program's number a Python int is an int64 with 64-bit types on.
        programs = np.int32(kernel.tiling.programs)
        leaf, program = lax.div(program, programs), lax.rem(program, programs)
    row, base = (
        refs.pop(0)[leaf] if given else jnp.uint32(0) for given in kernel.given[:2]
    )
    layer = refs.pop(0)[np.int32(0)] if kernel.given[2] else jnp.int32(0)
    # Before any store, which might alias it.
    table, first = refs.pop(0), row.astype(jnp.int32) * np.int32(kernel.table_width)
    scalars = [table[first + np.int32(i)] for i in range(kernel.table_width)]
    base = base + layer.astype(jnp.uint32) * np.uint32(kernel.leaf_size)
    size = None
    if kernel.sizes is not None:
        size = jnp.int32(kernel.sizes[0])
        for number, (before, other) in enumerate(itertools.pairwise(kernel.sizes), 1):
            if before != other:
                size = jnp.where(leaf >= number, jnp.int32(other), size)

    def update():
        lanes = lanes_of(arrangement, program, base, size)
        memory = _memory(kernel, leaf, refs, one_leaf, mark)
        _Program(kernel, lanes, memory, layer, scalars, instructions).update()

    if kernel.when is None:
        guard(update)
    else:
        # Results are written over operands: what is not written keeps its value.
        pl.when(scalars[kernel.when] != np.uint32(0))(lambda: guard(update))


def _memory(kernel: Kernel, leaf, refs, one_leaf: OneLeaf, mark) -> Memory:
    """The arrays of a program's leaf, among those of all leaves."""
    reads, writes = len(kernel.operands), len(kernel.results)
    results = refs[kernel.leaves * reads :]
    leaves = [
        one_leaf(refs[n * reads :][:reads], results[n * writes :][:writes], n)
        for n in range(kernel.leaves)
    ]
    if kernel.leaves == 1:
        return leaves[0]
    return OneOfMany(leaf, leaves, mark)


class _Program:
    """The update of a program's lanes.

    Args:
      kernel: which the program is of.
      lanes, memory: the program's.
      layer: int32 scalar, the layer of the stacks.
      scalars: the body's.
      instructions: of the launcher; None if XLA runs the operations.
    """

    def __init__(
        self,
        kernel: Kernel,
        lanes: Lanes,
        memory: Memory,
        layer: jax.Array,
        scalars: list[jax.Array],
        instructions: Instructions | None,
    ):
        self._kernel, self._body = kernel, kernel.body
        self._lanes, self._memory, self._layer = lanes, memory, layer
        self._scalars, self._instructions = scalars, instructions
        self._reads = [
            self._array(operand, i, i, Reader)
            for i, operand in enumerate(kernel.operands)
        ]
        self._writes = [
            self._array(result, i, result.overwrites, Writer)
            for i, result in enumerate(kernel.results)
        ]
        self._of_rows = [x for x in self._writes if not isinstance(x, PerBlock)]
        self._packed = [x for x in self._of_rows if isinstance(x, Writer)]
        bytes_ = tuple(
            i
            for i, x in enumerate(self._of_rows)
            if isinstance(x, Writer) and x.by_bytes
        )
        self._run = with_instructions(self._body, None, instructions, bytes_)
        every = (*self._reads, *self._writes)
        self._has_blocks = any(isinstance(x, PerBlock) for x in every)
        # Rows that are read and written one by one take fewer registers.
        self._at_once = self._has_blocks or memory.has_branches

    def _array(self, like: Operand | Result, number: int, operand, packed: type):
        """How an operand or result is found.

        Args:
          like: the operand or result.
          number: of it.
          operand: in whose place it is, if any.
          packed: what it is if it is packed.
        """
        layer = self._layer if operand in self._kernel.stacked else None
        lanes = typing.cast(TiledLanes, self._lanes)
        if like.block_size is not None:
            return PerBlock(number, layer, lanes.blocks_of(like.block_size))
        if like.bits is not None:
            return packed(number, layer, lanes, like.bits, self._instructions)
        return Plain(number, layer, lanes.tiling.width)

    def update(self) -> None:
        """Update the lanes, chunk by chunk of their rows."""
        tiling, arrangement = self._lanes.tiling, self._lanes.arrangement

        def visit(chunk, carry):
            for x, open_word in zip(self._packed, carry, strict=True):
                x.start(chunk, open_word)
            self._update_chunk(chunk)
            return [x.open_word for x in self._packed]

        carry = [x.first_carry() for x in self._packed]
        count = tiling.lane_rows // tiling.chunk_rows
        if count == 1:
            visit(jnp.int32(0), carry)
            return

        # A fori_loop of static length counts in int64 with 64-bit types on, which
        # takes registers.
        def step(counted, _):
            chunk, carry = counted
            new = visit(chunk, carry)
            carry = [x if x is None else arrangement.carried(x) for x in new]
            return (chunk + np.int32(1), carry), None

        lax.scan(step, (jnp.int32(0), carry), length=count)

    def _update_chunk(self, chunk: jax.Array) -> None:
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
        memory.store([*stores, *(s for x in self._packed for s in x.finish())])

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

    def _stores(self, row: "_Row", new: Sequence) -> "Stores":
        """What a row's results write at once; fields wait until words are full."""
        stores = []
        for x, value in zip(self._of_rows, new, strict=True):
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
    ) -> tuple[Callable, "Stores"]:
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
        statistics = with_instructions(body, number, self._instructions)
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


Stores = list[tuple[Access, jax.Array]]

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
