"""Blocks of arrays whose elements are repeated, and the choice among kinds of blocks.

Before a program's loop, the scale of a block is repeated in all lanes of the block.
After the loop, the scales are gathered. Several programs with neighboring columns
share a row of 128 scales. The elements of rows and columns are only read.
"""

import math
import typing
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.fused_update.tpu.arrays import KernelArray, RepeatedArray
from pallas_kernels.fused_update.tpu.blocks import Block
from pallas_kernels.fused_update.tpu.registers import Ref, every, load, part, permuted
from pallas_kernels.fused_update.tpu.tiling import LANES, SUBLANES
from pallas_kernels.fused_update.tpu.values import Narrow, whole


class ScaleBlock(Block):
    """A program's block of an array with one element per block of values."""

    def open(self, column_block: jax.Array) -> None:
        """Repeat each element for all groups and lanes of its block."""
        height, width = self._block_in_registers
        stored = _as_integers(self.ref[...]).reshape(-1, LANES)
        share = lax.rem(column_block, jnp.int32(width))
        if self.array.tiling.is_folded:
            for number in range(width):
                words = self._spread(stored, jnp.int32(number))
                self.scratch[every(number, width, len(words)), :] = words
            return
        words = self._spread(stored, share)
        for groups in range(height):
            self.scratch[every(groups, height, len(words)), :] = words

    def close(self, column_block: jax.Array) -> None:
        """Gather the elements of this program from scratch memory and write them."""
        ref, (height, width) = self.ref, self._block_in_registers
        rows = math.prod(ref.shape[:-1])
        if self.array.tiling.is_folded:
            new = jnp.zeros((rows, LANES), jnp.int32)
            for number in range(width):
                words = self.scratch[every(number, width, rows), :]
                new = self._gathered(words, jnp.int32(number), new)
        else:
            words = self.scratch[every(0, height, rows), :]
            share = lax.rem(column_block, jnp.int32(width))

            @pl.when(share == jnp.int32(0))
            def _():
                ref[...] = jnp.zeros(ref.shape, ref.dtype)

            old = _as_integers(ref[...]).reshape(-1, LANES)
            new = self._gathered(words, share, old)
        new = new.reshape(ref.shape)
        if ref.dtype.itemsize == 2:
            ref[...] = lax.bitcast_convert_type(new, jnp.float32).astype(ref.dtype)
        else:
            ref[...] = lax.bitcast_convert_type(new, ref.dtype)

    def _spread(self, stored: jax.Array, share: jax.Array) -> jax.Array:
        """Returns one share of the elements, each repeated in its block's lanes."""
        _, width = self._block_in_registers
        lane = lax.broadcasted_iota(jnp.int32, stored.shape, 1)
        first = share * jnp.int32(LANES // width)
        spread = permuted(stored, lane // jnp.int32(width) + first)
        return lax.bitcast_convert_type(spread, jnp.uint32)

    def _gathered(self, words: jax.Array, share: jax.Array, old: jax.Array):
        """Inverts :meth:`_spread`, and keeps ``old`` outside the share."""
        _, width = self._block_in_registers
        stored = lax.bitcast_convert_type(words, jnp.int32)
        lane = lax.broadcasted_iota(jnp.int32, stored.shape, 1)
        chosen = permuted(stored, (lane * jnp.int32(width)) & jnp.int32(LANES - 1))
        return jnp.where(lane // jnp.int32(LANES // width) == share, chosen, old)

    def load_elements(self, unit: jax.Array, block: int):
        """Return the repeated elements for one block of rows in a unit's groups."""
        word, dtype = self._elements(unit)[self._every(block)], self.array.dtype
        if dtype.itemsize == 2:
            return Narrow(word, dtype)
        return lax.bitcast_convert_type(word, dtype)

    def store_elements(self, unit: jax.Array, block: int, value) -> None:
        """Write the repeated elements for one block of rows in a unit's groups."""
        if isinstance(value, Narrow):
            word = value.alone()
        else:
            word = lax.bitcast_convert_type(whole(value), jnp.uint32)
        self._elements(unit)[self._every(block)] = word

    def _elements(self, unit: jax.Array) -> Ref:
        return part(self.scratch, unit, self.array.tiling.stacked_blocks)

    def _every(self, block: int) -> tuple:
        return every(block, self.array.tiling.stacked_blocks), slice(None)

    @property
    def _block_in_registers(self) -> tuple[int, int]:
        size = typing.cast(int, self.array.block_size)
        return self.array.tiling.block_in_registers(size)


class RepeatedBlock(Block):
    """A program's block of an array with one element for each row or column."""

    def open(self, column_block: jax.Array) -> None:
        """Repeat each element in all lanes of its row, or in all sublanes."""
        if not self._is_of_rows:
            self._repeat(SUBLANES)
            return
        # Programs with the same rows follow each other and use the same scratch memory.
        pl.when(column_block == jnp.int32(0))(lambda: self._repeat(LANES))

    def _repeat(self, count: int) -> None:
        words = lax.bitcast_convert_type(self.ref[...], jnp.uint32)
        repeated = jnp.broadcast_to(words, (count, words.shape[-1]))
        self.scratch[...] = repeated.T if self._is_of_rows else repeated

    def load(self, unit: jax.Array) -> Sequence:
        group = self.array.tiling.group
        if self._is_of_rows:
            words = load(part(self.scratch, unit, group), group)
        else:
            words = [self.scratch[...]] * group
        return [lax.bitcast_convert_type(word, self.array.dtype) for word in words]

    @property
    def _is_of_rows(self) -> bool:
        return typing.cast(RepeatedArray, self.array).is_of_rows


def blocks_of(arrays: Sequence[KernelArray], refs: Sequence[Ref]) -> list[Block]:
    """Return a program's blocks, given references to arrays and to scratch memory."""
    outside, scratch = refs[: len(arrays)], iter(refs[len(arrays) :])
    pairs = zip(arrays, outside, strict=True)
    return [_block(array, ref, scratch) for array, ref in pairs]


def _block(array: KernelArray, outside: Ref, scratch: Iterator[Ref]) -> Block:
    ref = next(scratch) if array.is_transposed else outside
    kind = Block if array.block_size is None else ScaleBlock
    kind = RepeatedBlock if isinstance(array, RepeatedArray) else kind
    has_scratch = array.scratch_shape is not None
    return kind(array, outside, ref, next(scratch) if has_scratch else None)


def _as_integers(x: jax.Array) -> jax.Array:
    """Returns the bits of ``x`` as int32, after converting bfloat16 to float32."""
    wide = x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
    return lax.bitcast_convert_type(wide, jnp.int32)
