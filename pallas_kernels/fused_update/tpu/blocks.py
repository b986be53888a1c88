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
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.bitfields import get_field, period, put_fields
from pallas_kernels.fused_update.tpu.arrays import KernelArray
from pallas_kernels.fused_update.tpu.registers import (
    QUARTERS,
    Ref,
    every,
    exchanged,
    in_steps,
    load,
    part,
    store,
)
from pallas_kernels.fused_update.tpu.tiling import SUBLANES
from pallas_kernels.fused_update.tpu.values import Field, Narrow, shifted_left, whole

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
