"""What one program of a Triton kernel does: it reads rows, runs the body, and writes.

Loads and stores have offsets and masks of their own: a BlockSpec's have no masks on
this backend, and a ragged tail would be written out of bounds. What runs between them,
the body, is elementwise and knows nothing of the backend, so that another launcher can
take it over.
"""

import dataclasses
import typing
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.fused_update import xla
from pallas_kernels.fused_update.instructions import multiply_add
from pallas_kernels.fused_update.lanes import (
    BlockPlaces,
    Lanes,
    TiledLanes,
    expand_blocks,
)
from pallas_kernels.fused_update.short_forms import Byte, with_short_forms
from pallas_kernels.fused_update.spec import BlockBody, Body, Operand, Result
from pallas_kernels.fused_update.words import Reader, Writer


@dataclasses.dataclass(frozen=True)
class Program:
    """One program of the kernel.

    Args:
      lanes: its lanes.
      layer: int32 scalar, the layer of the stacks.
      stacked: numbers of the operands that are stacks.
      scalars: the body's.
      interpret: whether XLA runs the operations.
    """

    lanes: Lanes
    layer: jax.Array
    stacked: frozenset[int]
    scalars: list[jax.Array]
    interpret: bool

    def update(
        self,
        body: Body | BlockBody,
        operands: Sequence[tuple[typing.Any, Operand]],
        results: Sequence[tuple[typing.Any, Result]],
    ) -> None:
        """Update the lanes.

        Args:
          body: what to compute.
          operands, results: each with the kernel's reference to its array.
        """
        reads = [self._read(ref, x, i) for i, (ref, x) in enumerate(operands)]
        writes = [self._write(ref, result) for ref, result in results]
        of_rows = [x for x in writes if not isinstance(x, _PerBlock)]
        bytes_ = [
            i for i, x in enumerate(of_rows) if isinstance(x, Writer) and x.by_bytes
        ]
        run = with_instructions(typing.cast(Callable, body), self.interpret, bytes_)
        before = [x for x in reads if isinstance(x, _PerBlock)]
        after = [x for x in writes if isinstance(x, _PerBlock)]
        rows = _Rows(self.lanes, [x for x in reads if not isinstance(x, _PerBlock)])
        packed = [x for x in of_rows if isinstance(x, Writer)]

        def visit(chunk, carry):
            run_row, visited = run, rows.of(chunk)
            if before or after:
                visited = list(visited)
                run_row = self._with_blocks(
                    typing.cast(BlockBody, body), run, chunk, visited, before, after
                )
            for x, open_word in zip(packed, carry, strict=True):
                x.start(chunk, open_word)
            for row in visited:
                self._write_row(
                    row, run_row(row.values, self.scalars, row.index), of_rows
                )
            return [x.finish() for x in packed]

        rows.for_each_chunk(
            visit, [x.first_carry(self.lanes.tiling.lanes_shape) for x in packed]
        )

    @property
    def _tiles(self) -> TiledLanes:
        """The lanes of a leaf in which something is packed or per block."""
        return typing.cast(TiledLanes, self.lanes)

    def _read(
        self, ref, operand: Operand, number: int
    ) -> "_Plain | _PerBlock | Reader":
        at = self.layer if number in self.stacked else jnp.int32(0)
        if operand.block_size is not None:
            return _PerBlock(ref, at, self._tiles.blocks_of(operand.block_size))
        if operand.bits is None:
            return _Plain(ref, at)
        words = _Words(ref, at, self._tiles, operand.bits)
        by_bytes = operand.bits == 8 and not self.interpret
        return Reader(operand.bits, self.lanes.tiling.chunk_rows, words, by_bytes)

    def _write(self, ref, result: Result) -> "_Plain | _PerBlock | Writer":
        at = self.layer if result.overwrites in self.stacked else jnp.int32(0)
        if result.block_size is not None:
            return _PerBlock(ref, at, self._tiles.blocks_of(result.block_size))
        if result.bits is None:
            return _Plain(ref, at)
        words = _Words(ref, at, self._tiles, result.bits)
        by_bytes = result.bits == 8 and not self.interpret
        return Writer(result.bits, self.lanes.tiling.chunk_rows, words, by_bytes)

    def _write_row(self, row: "_Row", new: Sequence, writes: Sequence) -> None:
        for x, value in zip(writes, new, strict=True):
            if isinstance(x, _Plain):
                x.store(row.offset, value, row.exists)
            else:
                x.put(row.number, self._without_padding(value, row.exists))

    def _without_padding(self, fields, exists: jax.Array | None):
        """Fields that are 0 where there are no elements, as ``pack`` has them."""
        # Lanes that do not exist write no words.
        if exists is None or exists is self.lanes.inside:
            return fields
        return jax.tree.map(lambda x: jnp.where(exists, x, jnp.uint32(0)), fields)

    def _with_blocks(
        self,
        body: BlockBody,
        run: Callable,
        chunk: jax.Array,
        rows: Sequence["_Row"],
        reads: Sequence["_PerBlock"],
        writes: Sequence["_PerBlock"],
    ) -> Callable:
        """Take the maxima over blocks, and write what is per block.

        Returns:
          ``run`` of rows, given what it needs of their blocks.
        """
        tiling, blocks_of = self.lanes.tiling, self._tiles.blocks_of
        expand = lambda x: expand_blocks(x, tiling)
        statistics = with_instructions(body.statistics, self.interpret)
        decode, encode = body.before, body.after
        if not self.interpret:
            decode, encode = with_short_forms(decode), with_short_forms(encode)
        of_blocks = [x.load(chunk) for x in reads]
        before = jax.tree.map(expand, decode(of_blocks))
        maxima = [jnp.zeros(tiling.lanes_shape, jnp.int32)] * len(body.maxima)
        for row in rows:
            new = statistics(row.values, self.scalars, row.index, before)
            if row.exists is not None:
                new = [jnp.where(row.exists, x, jnp.int32(0)) for x in new]
            maxima = [jnp.maximum(*pair) for pair in zip(maxima, new, strict=True)]
        maxima = [
            blocks_of(size).maxima(x)
            for size, x in zip(body.maxima, maxima, strict=True)
        ]
        stored, after = encode(maxima, of_blocks)
        for x, value in zip(writes, stored, strict=True):
            x.store(chunk, value)
        after = jax.tree.map(expand, after)
        return lambda *args: run(*args, before, after)


def with_instructions(function: Callable, interpret: bool, bytes_: Sequence[int] = ()):
    """A body's function with the GPU's own instructions, unless interpreted."""

    def run(values, scalars, index, *of_blocks):
        chosen = xla.multiply_add if interpret else multiply_add
        return function(values, scalars, index, chosen, *of_blocks)

    return run if interpret else with_short_forms(run, bytes_)


def read_scalars(table, row: jax.Array, width: int) -> list[jax.Array]:
    """A row of the table; before any store, which might alias it."""
    first = row.astype(jnp.int32) * jnp.int32(width)
    return [table[first + jnp.int32(i)] for i in range(width)]


def unless_skipped(scalars: Sequence[jax.Array], when: int | None) -> Callable:
    """A decorator that runs a function at once, unless the scalar ``when`` is 0.

    Results are written over operands, so that what is not written keeps its value.
    """
    if when is None:
        return lambda function: function()
    return pl.when(scalars[when] != jnp.uint32(0))


@dataclasses.dataclass(frozen=True)
class _Row:
    """One row of a program, as it has been read.

    Args:
      number: in its chunk.
      values: of the operands that are not per block.
      index, offset: of the elements in the leaf and in plain arrays.
      exists: which lanes have an element; None if all have.
    """

    number: int
    values: list[jax.Array | Byte]
    index: jax.Array
    offset: jax.Array
    exists: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of a program, chunk by chunk."""

    lanes: Lanes
    reads: list

    def of(self, chunk: jax.Array) -> Iterable[_Row]:
        """The rows of a chunk, read as they are asked for."""
        lanes, chunk_rows = self.lanes, self.lanes.tiling.chunk_rows
        for x in self.reads:
            if isinstance(x, Reader):
                x.start(chunk)
        for r in range(chunk_rows):
            start = chunk * jnp.int32(chunk_rows)
            offset, exists = lanes.offset(start, r), lanes.exists(start, r)
            values = [
                x.load(offset, exists) if isinstance(x, _Plain) else x.field(r)
                for x in self.reads
            ]
            index = lanes.element(start + jnp.int32(r))
            yield _Row(r, values, index, offset, exists)

    def for_each_chunk(self, visit: Callable, carry):
        """The last of ``carry = visit(chunk, carry)`` over all chunks."""
        count = self.lanes.tiling.lane_rows // self.lanes.tiling.chunk_rows
        if count == 1:
            return visit(jnp.int32(0), carry)

        # A fori_loop of static length counts in int64 with 64-bit types on, which
        # takes registers.
        def step(counted, _):
            chunk, carry = counted
            return (chunk + jnp.int32(1), visit(chunk, carry)), None

        (_, carry), _ = lax.scan(step, (jnp.int32(0), carry), length=count)
        return carry


@dataclasses.dataclass(frozen=True)
class _Plain:
    """An array that is not packed, or a layer of a stack of them."""

    ref: typing.Any
    layer: jax.Array

    def load(self, offset: jax.Array | None, mask: jax.Array | None) -> jax.Array:
        return triton.load(self.ref.at[self.layer, offset], mask=mask)

    def store(self, offset: jax.Array | None, value: jax.Array, mask) -> None:
        triton.store(self.ref.at[self.layer, offset], value, mask=mask)


@dataclasses.dataclass(frozen=True)
class _PerBlock:
    """An array with one element per block, or a layer of a stack of them."""

    ref: typing.Any
    layer: jax.Array
    places: BlockPlaces

    def load(self, chunk: jax.Array) -> jax.Array:
        places = self.places
        at = self.ref.at[self.layer, places.offset(chunk)]
        return triton.load(at, mask=places.exists(chunk))

    def store(self, chunk: jax.Array, value: jax.Array) -> None:
        places = self.places
        at = self.ref.at[self.layer, places.offset(chunk)]
        triton.store(at, value, mask=places.exists(chunk))


@dataclasses.dataclass(frozen=True)
class _Words:
    """The words of the lanes."""

    ref: typing.Any
    layer: jax.Array
    lanes: TiledLanes
    bits: int

    def load(self, start: jax.Array, word: int = 0) -> jax.Array:
        offset = self.lanes.word_offset(self.bits, start, word)
        mask = self.lanes.has_word(self.bits, start + jnp.int32(word))
        return triton.load(self.ref.at[self.layer, offset], mask=mask)

    def store(
        self, start: jax.Array, word: int, value: jax.Array, when: jax.Array | None
    ) -> None:
        mask = self.lanes.has_word(self.bits, start + jnp.int32(word))
        if when is not None:
            when = jnp.broadcast_to(when, value.shape)
            mask = when if mask is None else mask & when
        offset = self.lanes.word_offset(self.bits, start, word)
        triton.store(self.ref.at[self.layer, offset], value, mask=mask)
