"""A program's blocks: rows of registers from what is stored, and back.

A register has one row of each of 8 neighbouring groups. It is loaded with a stride, so
that neighbouring groups are in neighbouring sublanes, and offsets of packed fields are
static: a field is a shift of a register and nothing more. The offsets of some widths do
not repeat within a group (those of odd widths repeat after 32 rows). Their fields are
unpacked into scratch memory before a program's loop, and packed after it. Rows of 16
bits lie in pairs in 32-bit words, those of 8 bits in fours, and are read as such. For
Pallas' model of a TPU, which cannot do that, they are copied to scratch memory first.

Scales of blocks are spread over the lanes of their blocks before the loop, and gathered
after it. A row of 128 scales serves several programs with neighbouring columns.
"""

import dataclasses
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.bitfields import get_field, period, put_fields
from pallas_kernels.fused_update.tpu.arrays import KernelArray
from pallas_kernels.fused_update.tpu.tiling import LANES, SUBLANES
from pallas_kernels.fused_update.tpu.values import Field, Narrow, shifted_left, whole

Ref = typing.Any


@dataclasses.dataclass(frozen=True)
class Block:
    """A program's block of an array.

    Args:
      array: of which it is.
      outside: reference to the block as XLA lays it out.
      ref: to the block with its rows and columns; ``outside`` unless transposed.
      scratch: to words, fields or spread elements; None if the array needs none.
    """

    array: KernelArray
    outside: Ref
    ref: Ref
    scratch: Ref

    def fetch(self) -> None:
        """Transpose what XLA stores transposed."""
        if self.array.is_transposed:
            self.ref[...] = self.outside[...].T

    def flush(self) -> None:
        """The inverse of :meth:`fetch`."""
        if self.array.is_transposed:
            self.outside[...] = self.ref[...].T

    def open(self, column_block: jax.Array) -> None:
        """Unpack fields into scratch memory, before the loop over units."""
        del column_block
        if self.array.has_scratch_fields:
            self._for_periods(self._unpack_period)

    def close(self, column_block: jax.Array) -> None:
        """Pack the fields in scratch memory, after the loop over units."""
        del column_block
        if self.array.has_scratch_fields:
            self._for_periods(self._pack_period)

    def load(self, unit: jax.Array) -> list:
        """The values of each row of a unit's groups."""
        array, group = self.array, self.array.tiling.group
        if array.is_narrow:
            if self.scratch is not None:
                rows = self._rows(unit)[...]
                self._words(unit)[...] = pltpu.bitcast(rows, jnp.uint32)
            words = _load(self._words(unit), group // self._rows_per_word)
            width = 8 * array.dtype.itemsize
            return [
                Narrow(_shifted(word, 32 - end), array.dtype)
                for word in words
                for end in range(width, 33, width)
            ]
        if array.has_scratch_fields:
            return _load(part(self.scratch, unit, group), group)
        if array.bits is not None:
            count = group * array.bits // 32
            words = _load(part(self.ref, unit, count), count)
            return [_field(words, row, array.bits) for row in range(group)]
        return _load(self._rows(unit), group)

    def store(
        self, unit: jax.Array, rows: Sequence, exist: Sequence[jax.Array | None]
    ) -> None:
        """Write values of each row of a unit's groups.

        Args:
          unit: its number.
          rows: the values.
          exist: which of them there are; None for all. Other fields are 0.
        """
        array = self.array
        if array.is_narrow:
            count = self._rows_per_word
            words = [
                _joined_rows(rows[i : i + count]) for i in range(0, len(rows), count)
            ]
            _store(self._words(unit), words, len(words))
            if self.scratch is not None:
                words = self._words(unit)[...]
                self._rows(unit)[...] = pltpu.bitcast(words, self.ref.dtype)
            return
        ref = self.ref
        if array.bits is not None:
            rows = [
                x if here is None else jnp.where(here, whole(x), jnp.uint32(0))
                for x, here in zip(rows, exist, strict=True)
            ]
            if array.has_scratch_fields:
                ref = self.scratch
            else:
                rows = _joined(rows, array.bits)
        _store(part(ref, unit, len(rows)), rows, len(rows))

    @property
    def _rows_per_word(self) -> int:
        return 4 // self.array.dtype.itemsize

    def _rows(self, unit: jax.Array) -> Ref:
        return part(self.ref, unit, self.array.tiling.group)

    def _words(self, unit: jax.Array) -> Ref:
        """The words of a unit's rows of fewer bits, without a copy if compiled."""
        if self.scratch is None:
            return self._rows(unit).bitcast(jnp.uint32)
        return part(self.scratch, unit, self.array.tiling.group // self._rows_per_word)

    def _for_periods(self, function: Callable[[jax.Array, int], None]) -> None:
        """Call a function of each register's number of periods, and of their width."""
        bits = typing.cast(int, self.array.bits)

        def call(number, _):
            function(number, bits)
            return number + jnp.int32(1), None

        count = self.ref.shape[0] // (SUBLANES * period(bits)[1])
        # A fori_loop counts in int64 with 64-bit types on.
        lax.scan(call, jnp.int32(0), length=count)

    def _unpack_period(self, number: jax.Array, bits: int) -> None:
        height, count = period(bits)
        words = _load(part(self.ref, number, count), count)
        fields = (_field(words, row, bits) for row in range(height))
        _store(part(self.scratch, number, height), fields, height)

    def _pack_period(self, number: jax.Array, bits: int) -> None:
        height, count = period(bits)
        fields = _load(part(self.scratch, number, height), height)
        _store(part(self.ref, number, count), put_fields(fields, bits), count)


class ScaleBlock(Block):
    """A program's block of an array with one element per block of elements."""

    def open(self, column_block: jax.Array) -> None:
        """Write each element to all groups and lanes of its block."""
        height, width = self._block_in_registers
        stored = _as_integers(self.ref[...])
        lane = lax.broadcasted_iota(jnp.int32, stored.shape, 1)
        first = lax.rem(column_block, jnp.int32(width)) * jnp.int32(LANES // width)
        words = lax.bitcast_convert_type(
            _permuted(stored, lane // jnp.int32(width) + first), jnp.uint32
        )
        for groups in range(height):
            self.scratch[every(groups, height, len(words)), :] = words

    def close(self, column_block: jax.Array) -> None:
        """Write the elements of this program's share of the lanes."""
        ref, (height, width) = self.ref, self._block_in_registers
        words = self.scratch[every(0, height, ref.shape[0]), :]
        stored = lax.bitcast_convert_type(words, jnp.int32)
        lane = lax.broadcasted_iota(jnp.int32, stored.shape, 1)
        chosen = _permuted(stored, (lane * jnp.int32(width)) & jnp.int32(LANES - 1))
        share = lax.rem(column_block, jnp.int32(width))

        @pl.when(share == jnp.int32(0))
        def _():
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

        here = lane // jnp.int32(LANES // width) == share
        new = jnp.where(here, chosen, _as_integers(ref[...]))
        if ref.dtype.itemsize == 2:
            ref[...] = lax.bitcast_convert_type(new, jnp.float32).astype(ref.dtype)
        else:
            ref[...] = lax.bitcast_convert_type(new, ref.dtype)

    def load_elements(self, unit: jax.Array, block: int):
        """The element of each value of a unit's groups.

        Args:
          unit: its number.
          block: that of the values' block among those below each other.
        """
        word, dtype = self._elements(unit)[self._every(block)], self.array.dtype
        if dtype.itemsize == 2:
            return Narrow(word, dtype)
        return lax.bitcast_convert_type(word, dtype)

    def store_elements(self, unit: jax.Array, block: int, value) -> None:
        """Write elements that are the same for all values of a block."""
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


def blocks_of(
    arrays: Sequence[KernelArray], refs: Sequence[Ref], interpret: bool
) -> list[Block]:
    """A program's blocks, from references to arrays and then to scratch memory."""
    outside, scratch = refs[: len(arrays)], iter(refs[len(arrays) :])
    pairs = zip(arrays, outside, strict=True)
    return [_block(*each, scratch, interpret) for each in pairs]


def _block(
    array: KernelArray, outside: Ref, scratch: Iterator[Ref], interpret: bool
) -> Block:
    ref = next(scratch) if array.is_transposed else outside
    kind = Block if array.block_size is None else ScaleBlock
    has_scratch = array.scratch_rows(interpret) > 0
    return kind(array, outside, ref, next(scratch) if has_scratch else None)


def every(first: int, stride: int, size: int = SUBLANES):
    """An index of so many rows at a distance from each other."""
    return pl.ds(first, size, stride=stride) if stride > 1 else pl.ds(first, size)


def part(ref: Ref, number: jax.Array, group: int) -> Ref:
    """A reference to the rows of a unit, whose groups have so many."""
    return ref.at[_groups(number, group), :]


def _groups(number: jax.Array, group: int):
    rows = SUBLANES * group
    start = pl.multiple_of(number * jnp.int32(rows), rows)
    return pl.ds(start, rows)


def _load(ref: Ref, group: int) -> list[jax.Array]:
    """For each row of a group, a register with that row of 8 groups."""
    return [ref[every(row, group), :] for row in range(group)]


def _store(ref: Ref, rows: Iterable, group: int) -> None:
    """The inverse of :func:`_load`."""
    for row, value in enumerate(rows):
        ref[every(row, group), :] = whole(value)


def _field(words: Sequence[jax.Array], row: int, bits: int):
    """Fields of a row of a group; those that lie in two words as an array."""
    word, shift = divmod(row * bits, 32)
    if shift + bits <= 32:
        return Field(words[word], shift, bits)
    return get_field(words, row, bits)


def _joined(fields: Sequence, bits: int) -> list[jax.Array]:
    """The words of the fields of each row of a group."""
    if 32 % bits:
        return put_fields([whole(x) for x in fields], bits)
    count, words = 32 // bits, []
    for start in range(0, len(fields), count):
        word = whole(fields[start])
        for number, value in enumerate(fields[start + 1 : start + count], 1):
            word = word | shifted_left(value, number * bits)
        words.append(word)
    return words


def _shifted(word: jax.Array, places: int) -> jax.Array:
    return word << jnp.uint32(places) if places else word


def _joined_rows(rows: Sequence[Narrow]) -> jax.Array:
    """The words of as many rows as fit into one."""
    width, word = rows[0].width, rows[-1].alone()
    for number, row in enumerate(rows[:-1]):
        place = number * width
        mask = jnp.uint32(((1 << width) - 1) << place)
        moved = row.word >> jnp.uint32(32 - width - place)
        word = word | (moved & mask if place else moved)
    return word


def _as_integers(x: jax.Array) -> jax.Array:
    """int32 with the patterns of values of 32 bits, or of bfloat16s in upper halves."""
    wide = x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
    return lax.bitcast_convert_type(wide, jnp.int32)


def _permuted(x: jax.Array, lanes: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, lanes, 1, mode="promise_in_bounds")
