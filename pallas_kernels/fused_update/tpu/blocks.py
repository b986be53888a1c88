"""Load a program's blocks from arrays into registers, and store the results.

For a matrix, a register contains one row of each of 8 neighboring groups
(:mod:`.tiling`). Strided loads put neighboring groups into neighboring sublanes. The
bit offsets of packed fields are then static, and reading a field is one shift of a
register. For some widths, the offsets do not repeat within a group (for odd widths,
they repeat after 32 rows). Fields of these widths are unpacked into scratch memory
before a program's loop, and packed after it. Two rows of 16-bit elements, or four rows
of 8-bit elements, share 32-bit words and are read as words. Pallas' TPU simulator
cannot do that, so in the simulator, these rows are copied to scratch memory first.

A folded vector is loaded with 4 consecutive rows of 32 columns in the quarters of a
register. The quarters are exchanged among the registers of a unit, so that each quarter
of a register belongs to a different group.

For matrices side by side, a register contains one row of 8 neighboring matrices. Here,
elements of neighboring matrices share words, instead of elements of neighboring rows.
Therefore, 16-bit and 8-bit elements are widened to words in scratch memory before the
loop.

Before a program's loop, the scale of a block is repeated in all lanes of the block.
After the loop, the scales are gathered. Several programs with neighboring columns
share a row of 128 scales. The elements of repeated rows and columns are only read.

If a reference has two axes, it refers to one matrix. If it has three axes, it refers to
matrices side by side.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.bitfields import get_field, period, put_fields
from pallas_kernels.fused_update.tpu.arrays import KernelArray, RepeatedArray
from pallas_kernels.fused_update.tpu.evaluation import (
    Field,
    Narrow,
    shifted_left,
    whole,
)
from pallas_kernels.fused_update.tpu.tiling import LANES, SUBLANES
from pallas_kernels.layout import FOLD

Ref = typing.Any

QUARTERS = LANES // FOLD


def every(first: int, stride: int, size: int = SUBLANES):
    """Return an index that selects ``size`` rows, with ``stride`` as the step."""
    return pl.ds(first, size, stride=stride) if stride > 1 else pl.ds(first, size)


def part(ref: Ref, number: jax.Array, group: int) -> Ref:
    """Return a reference to the rows of a unit that has ``group`` rows per group."""
    if len(ref.shape) == 2:
        return ref.at[rows_of(number, group), :]
    registers = jnp.int32(ref.shape[1] // SUBLANES)
    first = lax.div(number, registers) * jnp.int32(group)
    return ref.at[pl.ds(first, group), rows_of(lax.rem(number, registers), 1), :]


def rows_of(number: jax.Array, group: int):
    """Return an index that selects the rows of 8 groups with ``group`` rows each."""
    rows = SUBLANES * group
    start = pl.multiple_of(number * jnp.int32(rows), rows)
    return pl.ds(start, rows)


def _register(ref: Ref, row: int, group: int):
    """Returns an index that selects the register with one row of a unit's groups."""
    return (every(row, group), slice(None)) if len(ref.shape) == 2 else row


def load(ref: Ref, group: int) -> list[jax.Array]:
    """Return registers; register r contains row r of each of 8 groups or matrices."""
    return [ref[_register(ref, row, group)] for row in range(group)]


def store(ref: Ref, rows: Iterable, group: int) -> None:
    """Write registers in the order in which :func:`load` reads them."""
    for row, value in enumerate(rows):
        ref[_register(ref, row, group)] = whole(value)


def in_steps(count: int, step: int, function: Callable[[jax.Array], None]) -> None:
    """Call a function with the int32 numbers 0, ``step``, ... below ``count``."""

    def call(number, _):
        function(number)
        return number + jnp.int32(step), None

    # With 64-bit types enabled, a fori_loop would count in int64.
    lax.scan(call, jnp.int32(0), length=count // step)


def exchanged(
    registers: Sequence[jax.Array], source: Callable[[int, int], tuple[int, int]]
) -> list[jax.Array]:
    """Return registers that are composed of quarters of the lanes of other registers.

    Args:
      registers: registers with 32-bit elements.
      source: a function from the indices of a new register and quarter to the indices
        of the old register and quarter.
    """
    lane = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)

    @functools.cache
    def moved(register: int, quarters: int) -> jax.Array:
        """Returns a register, rotated by a number of quarters."""
        x = registers[register]
        return pltpu.roll(x, jnp.int32(quarters * FOLD), 1) if quarters else x

    results = []
    for number in range(len(registers)):
        parts = []
        for place in range(QUARTERS):
            register, old = source(number, place)
            parts.append(moved(register, (place - old) % QUARTERS))
        result = parts[-1]
        for place in reversed(range(QUARTERS - 1)):
            if parts[place] is not parts[place + 1]:
                is_before = lane < jnp.int32((place + 1) * FOLD)
                result = jnp.where(is_before, parts[place], result)
        results.append(result)
    return results


def permuted(x: jax.Array, lanes: jax.Array) -> jax.Array:
    """Return, for each row, the elements in the lanes that ``lanes`` contains."""
    return jnp.take_along_axis(x, lanes, 1, mode="promise_in_bounds")


_ROWS_AT_ONCE = 8
"""Rows of matrices side by side that are widened in each iteration."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A program's block of an array.

    Args:
      array: the array.
      outside: reference to the block in XLA's layout.
      ref: reference to the block with rows before columns. It is ``outside`` unless XLA
        stores the array transposed.
      scratch: reference to scratch memory (:meth:`.KernelArray.scratch_shape`) or None.
    """

    array: KernelArray
    outside: Ref
    ref: Ref
    scratch: Ref

    def fetch(self) -> None:
        """Transpose the block if XLA stores the array transposed."""
        if self.array.is_transposed:
            self.ref[...] = self.outside[...].T

    def flush(self) -> None:
        """Invert :meth:`fetch`."""
        if self.array.is_transposed:
            self.outside[...] = self.ref[...].T

    def open(self, column_block: jax.Array) -> None:
        """Unpack or widen the elements into scratch memory, before the loop."""
        del column_block
        if self.array.has_scratch_fields:
            self._for_periods(self._unpack_period)
        elif self._is_wide:
            self._for_rows(self._widen)

    def close(self, column_block: jax.Array) -> None:
        """Pack or narrow the results in scratch memory, after the loop."""
        del column_block
        if self.array.has_scratch_fields:
            self._for_periods(self._pack_period)
        elif self._is_wide:
            self._for_rows(self._narrow)

    def load(self, unit: jax.Array) -> Sequence:
        """Return the values of a unit, with one register for each row of a group."""
        array, group = self.array, self.array.tiling.group
        if self._is_wide:
            words = load(part(self.scratch, unit, group), group)
            return [Narrow(word, array.dtype) for word in words]
        if array.is_narrow:
            if self.scratch is not None:
                rows = self._rows(unit)[...]
                self._words(unit)[...] = pltpu.bitcast(rows, jnp.uint32)
            words = load(self._words(unit), group // self._rows_per_word)
            width = 8 * array.dtype.itemsize
            rows = [
                _shifted(word, 32 - end)
                for word in words
                for end in range(width, 33, width)
            ]
            return [Narrow(word, array.dtype) for word in self._folded(rows)]
        if array.has_scratch_fields:
            return load(part(self.scratch, unit, group), group)
        if array.bits is not None:
            count = group * array.bits // 32
            words = self._folded(load(part(self.ref, unit, count), count))
            return [_field(words, row, array.bits) for row in range(group)]
        return self._folded(load(self._rows(unit), group))

    def store(
        self, unit: jax.Array, rows: Sequence, exist: Sequence[jax.Array | None]
    ) -> None:
        """Write the values of a unit.

        Args:
          unit: index of the unit.
          rows: one register for each row of a group.
          exist: for each row, a mask of the elements inside the array, or None for all.
            Fields outside of the array become 0.
        """
        array = self.array
        if self._is_wide:
            words = [row.word for row in rows]
            store(part(self.scratch, unit, len(words)), words, len(words))
            return
        if array.is_narrow:
            count = self._rows_per_word
            unfolded = self._unfolded([row.word for row in rows])
            rows = [Narrow(word, array.dtype) for word in unfolded]
            words = [
                _joined_rows(rows[i : i + count]) for i in range(0, len(rows), count)
            ]
            store(self._words(unit), words, len(words))
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
        store(part(ref, unit, len(rows)), self._unfolded(rows), len(rows))

    def _folded(self, registers: Sequence) -> Sequence:
        """Rearranges registers of a folded vector into rows of 4 adjacent groups."""
        count = len(registers)

        def source(row: int, quarter: int) -> tuple[int, int]:
            return divmod(quarter * count + row, QUARTERS)

        is_folded = self.array.tiling.is_folded
        return exchanged(registers, source) if is_folded else registers

    def _unfolded(self, rows: Sequence) -> Sequence:
        """Inverts :meth:`_folded`."""
        count = len(rows)

        def source(number: int, quarter: int) -> tuple[int, int]:
            quarter, row = divmod(number * QUARTERS + quarter, count)
            return row, quarter

        is_folded = self.array.tiling.is_folded
        return exchanged([whole(x) for x in rows], source) if is_folded else rows

    @property
    def _rows_per_word(self) -> int:
        return 4 // self.array.dtype.itemsize

    def _rows(self, unit: jax.Array) -> Ref:
        return part(self.ref, unit, self.array.tiling.group)

    def _words(self, unit: jax.Array) -> Ref:
        """Returns the words of a unit's rows of narrow elements."""
        if self.scratch is None:
            return self._rows(unit).bitcast(jnp.uint32)
        return part(self.scratch, unit, self.array.tiling.group // self._rows_per_word)

    @property
    def _is_wide(self) -> bool:
        """Whether scratch memory has a word for each narrow element."""
        return self.array.is_narrow and self.array.tiling.side_by_side is not None

    def _for_rows(self, function: Callable[[jax.Array], None]) -> None:
        """Calls a function with the index of each row."""
        rows, at_once = self.ref.shape[0], math.gcd(self.ref.shape[0], _ROWS_AT_ONCE)

        def of_rows(first: jax.Array) -> None:
            for row in range(at_once):
                function(first + jnp.int32(row))

        in_steps(rows, at_once, of_rows)

    def _widen(self, row: jax.Array) -> None:
        """Moves each element of a row to the upper bits of its own word."""
        words = pltpu.bitcast(self.ref[row], jnp.uint32)
        count, width = self._rows_per_word, 8 * self.array.dtype.itemsize
        for number in range(count):
            places = every(number, count, len(words))
            self.scratch[row, places, :] = _shifted(words, 32 - width * (number + 1))

    def _narrow(self, row: jax.Array) -> None:
        """Inverts :meth:`_widen`."""
        count, dtype = self._rows_per_word, self.array.dtype
        size = self.ref.shape[1] // count
        parts = [
            Narrow(self.scratch[row, every(number, count, size), :], dtype)
            for number in range(count)
        ]
        self.ref[row] = pltpu.bitcast(_joined_rows(parts), self.ref.dtype)

    def _for_periods(self, function: Callable[[jax.Array, int], None]) -> None:
        """Calls a function with the index of each group of 8 periods, and the width."""
        bits = typing.cast(int, self.array.bits)
        rows, *aside, _ = self.ref.shape
        count = rows * math.prod(aside) // (SUBLANES * period(bits)[1])
        in_steps(count, 1, lambda number: function(number, bits))

    def _unpack_period(self, number: jax.Array, bits: int) -> None:
        height, count = period(bits)
        words = load(part(self.ref, number, count), count)
        fields = (_field(words, row, bits) for row in range(height))
        store(part(self.scratch, number, height), fields, height)

    def _pack_period(self, number: jax.Array, bits: int) -> None:
        height, count = period(bits)
        fields = load(part(self.scratch, number, height), height)
        store(part(self.ref, number, count), put_fields(fields, bits), count)


def _field(words: Sequence[jax.Array], row: int, bits: int):
    """Returns the fields of a row, lazily unless a field is split between two words."""
    word, shift = divmod(row * bits, 32)
    if shift + bits <= 32:
        return Field(words[word], shift, bits)
    return get_field(words, row, bits)


def _joined(fields: Sequence, bits: int) -> list[jax.Array]:
    """Packs the fields of a group into words."""
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
    """Returns words that contain one element of each row."""
    width, word = rows[0].width, rows[-1].alone()
    for number, row in enumerate(rows[:-1]):
        place = number * width
        mask = jnp.uint32(((1 << width) - 1) << place)
        moved = row.word >> jnp.uint32(32 - width - place)
        word = word | (moved & mask if place else moved)
    return word


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
