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

from pallas_kernels.fused_update.gpu.array_access import PerBlock, Plain, WordsInMemory
from pallas_kernels.fused_update.gpu.chunk import ChunkUpdate, packed
from pallas_kernels.fused_update.gpu.lanes import (
    Lanes,
    TiledLanes,
)
from pallas_kernels.fused_update.gpu.memory import Memory
from pallas_kernels.fused_update.gpu.words import Reader, Writer
from pallas_kernels.fused_update.spec import BlockBody, Body, Operand, Result
from pallas_kernels.gpu.instructions import Instructions


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
        writers = packed(writes)
        update = ChunkUpdate(
            self.lanes,
            self.memory,
            self.scalars,
            self.instructions,
            body,
            reads,
            writes,
        )

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

    def _read(self, operand: Operand, number: int) -> Plain | PerBlock | Reader:
        at = self.layer if number in self.stacked else None
        if operand.block_size is not None:
            return PerBlock(number, at, self._tiles.blocks_of(operand.block_size))
        if operand.bits is None:
            return Plain(number, at, self.lanes.tiling.width)
        words = self._words(number, at, operand.bits)
        by_bytes = operand.bits == 8 and self.instructions is not None
        return Reader(operand.bits, self.lanes.tiling.chunk_rows, words, by_bytes)

    def _write(self, result: Result, number: int) -> Plain | PerBlock | Writer:
        at = self.layer if result.overwrites in self.stacked else None
        if result.block_size is not None:
            return PerBlock(number, at, self._tiles.blocks_of(result.block_size))
        if result.bits is None:
            return Plain(number, at, self.lanes.tiling.width)
        words = self._words(number, at, result.bits)
        by_bytes = self.instructions if result.bits == 8 else None
        return Writer(result.bits, self.lanes.tiling.chunk_rows, words, by_bytes)

    def _words(self, number: int, layer: jax.Array | None, bits: int) -> WordsInMemory:
        return WordsInMemory(self.memory, number, layer, self._tiles, bits)

    @property
    def _tiles(self) -> TiledLanes:
        """The lanes of a leaf in which something is packed or per block."""
        return typing.cast(TiledLanes, self.lanes)


def unless_skipped(scalars: Sequence[jax.Array], when: int | None) -> Callable:
    """A decorator that runs a function at once, unless the scalar ``when`` is 0.

    Results are written over operands, so that what is not written keeps its value.
    """
    if when is None:
        return lambda function: function()
    return pl.when(scalars[when] != np.uint32(0))
