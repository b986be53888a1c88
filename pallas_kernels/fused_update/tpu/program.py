"""What each program of a TPU kernel does: it goes through its block, unit by unit.

Blocks, groups and units are those of :mod:`.tiling`. A row of a group is loaded
with a stride, so that neighbouring groups are in neighbouring sublanes; fields are then
shifts of whole registers. Rows of 16 bits lie in pairs in 32-bit words, those of 8 bits
in fours, and are copied as such before.

Scales of blocks are spread over the lanes of their blocks before the loop, and gathered
after it. A row of 128 scales serves several programs with neighbouring columns.
"""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.fused_update.spec import Operand, Result
from pallas_kernels.fused_update.tpu.functions import REGISTER, Functions
from pallas_kernels.fused_update.tpu.tiling import LANES, SUBLANES, Tiling
from pallas_kernels.fused_update.tpu.values import Narrow, Sum, whole
from pallas_kernels.fused_update.tpu.words import (
    every,
    field,
    joined,
    pack,
    part,
    unpack,
)
from pallas_kernels.layout import block_shape, is_unrolled


@dataclasses.dataclass(frozen=True)
class Arrays:
    """A program's blocks of all arrays, and its scratch memory.

    Args:
      operands, results: references, with what they are.
      words: of each operand, then each result, of 8 or 16 bits: its words.
      fields: of each packed one whose offsets do not repeat within a group: its fields.
      spread: of each operand per block, its elements per group.
      gathered: of each result per block.
    """

    operands: list[tuple[Operand, typing.Any]]
    results: list[tuple[Result, typing.Any]]
    words: dict[tuple[str, int], typing.Any]
    fields: dict[tuple[str, int], typing.Any]
    spread: list
    gathered: list


@dataclasses.dataclass(frozen=True)
class BlockProgram:
    """One program of a kernel.

    Args:
      tiling: of the leaf.
      functions: the body's.
      rounds: for each round, sizes of the blocks of which the body wants maxima.
      scalars: the body's.
      arrays: the program's.
      first: uint32 scalar, the index of its first element in the whole leaf.
      place: int32 scalars, its number among blocks of rows, and of columns.
      generation: of the TPU; None when interpreted.
    """

    tiling: Tiling
    functions: Functions
    rounds: Sequence[Sequence[int]]
    scalars: list[jax.Array]
    arrays: Arrays
    first: jax.Array
    place: tuple[jax.Array, jax.Array]
    generation: int | None = None

    def update(self) -> None:
        """Update the block."""
        run = self.functions.run.of_scalars(self.scalars)
        rounds = [x.of_scalars(self.scalars) for x, _ in self.functions.rounds]

        count, unroll = self.tiling.units, self.tiling.unroll

        def units(first, _):
            for offset in range(unroll):
                self._unit(first, offset, run, rounds)
            return first + jnp.int32(unroll), None

        self._spread()
        self._unpack()
        # A fori_loop counts in int64 with 64-bit types on.
        lax.scan(units, jnp.int32(0), length=count // unroll)
        self._pack()
        self._gather()

    def keep(self) -> None:
        """Write what is overwritten as it is."""
        for result, ref in self.arrays.results:
            if result.overwrites is not None:
                ref[...] = self.arrays.operands[result.overwrites][1][...]

    def _unit(self, first: jax.Array, offset: int, hoisted, of_rounds: Sequence):
        """Update one unit.

        Args:
          first: int32 scalar, the number in the block of the loop body's first unit.
          offset: of the unit from this one.
          hoisted, of_rounds: what the body's functions compute of scalars.
        """
        rows, known, unit = range(self.tiling.group), {}, first + jnp.int32(offset)
        values = self._loaded(unit)
        exist = [self._exists(unit, row) for row in rows]
        index = [self._index(first, offset, row) for row in rows]
        of_blocks = []
        if self.functions.before is not None:
            of_blocks = self._with_blocks(unit, values, index, exist, known, of_rounds)
        new = [
            self.functions.run(
                values[row],
                self.scalars,
                index[row],
                *of_blocks,
                known=known,
                hoisted=hoisted,
                generation=self.generation,
            )
            for row in rows
        ]
        plain = ((r, ref) for r, ref in self.arrays.results if r.block_size is None)
        for number, (result, ref) in enumerate(plain):
            fields = [new[row][number] for row in rows]
            if result.bits is None:
                self._store(unit, number, ref, fields)
                continue
            fields = [
                x if here is None else jnp.where(here, whole(x), jnp.uint32(0))
                for x, here in zip(fields, exist, strict=True)
            ]
            if is_unrolled(result.bits):
                fields = joined(fields, result.bits)
            else:
                ref = self.arrays.fields["result", number]
            here = part(ref, unit, SUBLANES * len(fields))
            for row, value in enumerate(fields):
                here[every(row, len(fields)), :] = whole(value)

    def _loaded(self, unit: jax.Array) -> list[list]:
        """The values of each row of the groups, per operand that is not per block."""
        group, columns = self.tiling.group, []
        plain = ((o, ref) for o, ref in self.arrays.operands if o.block_size is None)
        for number, (operand, ref) in enumerate(plain):
            if operand.bits is not None and is_unrolled(operand.bits):
                count = group * operand.bits // 32
                here = part(ref, unit, SUBLANES * count)
                words = [here[every(w, count), :] for w in range(count)]
                columns.append(
                    [field(words, row, operand.bits) for row in range(group)]
                )
                continue
            if operand.bits is not None:
                ref = self.arrays.fields["operand", number]
            if ref.dtype.itemsize < 4:
                here = part(ref, unit, self.tiling.unit_rows)
                words = self._words("operand", number, unit, ref)
                words[...] = pltpu.bitcast(here[...], jnp.uint32)
                columns.append(_narrow(words, group, operand.array.dtype))
            else:
                here = part(ref, unit, self.tiling.unit_rows)
                columns.append([here[every(row, group), :] for row in range(group)])
        return [list(values) for values in zip(*columns, strict=True)]

    def _store(self, unit: jax.Array, number: int, ref, rows: Sequence) -> None:
        """Store the rows of the groups in a plain array."""
        group = self.tiling.group
        here = part(ref, unit, self.tiling.unit_rows)
        if ref.dtype.itemsize == 4:
            for row, value in enumerate(rows):
                here[every(row, group), :] = whole(value)
            return
        words = self._words("result", number, unit, ref)
        count = 4 // ref.dtype.itemsize
        for row in range(0, group, count):
            together = _together(rows[row : row + count])
            words[every(row // count, group // count), :] = together
        here[...] = pltpu.bitcast(words[...], ref.dtype)

    def _words(self, of: str, number: int, unit: jax.Array, ref):
        rows = self.tiling.unit_rows * ref.dtype.itemsize // 4
        return part(self.arrays.words[of, number], unit, rows)

    def _index(self, first: jax.Array, offset: int, row: int) -> Sum:
        """The elements' indices in the whole leaf."""
        columns, group = self.tiling.whole[-1], self.tiling.group
        within = _iota(0) * jnp.int32(group * columns) + _iota(1)
        step = self.tiling.unit_rows * columns
        start = first * jnp.int32(_signed(step))
        constant = (offset * step + row * columns) % 2**32
        scalar = self.first + start.astype(jnp.uint32)
        return Sum(within.astype(jnp.uint32), scalar, constant)

    def _exists(self, unit: jax.Array, row: int) -> jax.Array | None:
        """Which elements there are; None if no word and no block is cut."""
        tiling = self.tiling
        if tiling.is_even:
            return None
        rows, columns = self.place
        start = rows * jnp.int32(tiling.block_rows) + jnp.int32(row)
        start = start + unit * jnp.int32(tiling.unit_rows)
        below = _iota(0) * jnp.int32(tiling.group) + start < jnp.int32(tiling.rows)
        column = _iota(1) + columns * jnp.int32(LANES)
        return below & (column < jnp.int32(tiling.columns))

    def _with_blocks(self, unit, values, index, exist, known, of_rounds) -> list:
        """Take maxima over blocks and write what is per block.

        Returns:
          What decoding and encoding need of the blocks, for each element.
        """
        functions, arrays = self.functions, self.arrays
        how = {"known": known, "generation": self.generation}
        assert functions.before is not None
        start = pl.multiple_of(unit * jnp.int32(SUBLANES), SUBLANES)
        groups = pl.ds(start, SUBLANES)
        raw = [
            _as_value(ref[groups, :], operand.array.dtype)
            for ref, (operand, _) in zip(arrays.spread, self._per_block(), strict=True)
        ]
        before = functions.before(raw, **how)
        maxima, stored, after = [], [], ()
        for number, (statistics, after_round) in enumerate(functions.rounds):
            rows = [
                statistics(
                    *(values[row], self.scalars, index[row], before, after),
                    hoisted=of_rounds[number],
                    **how,
                )
                for row in range(len(exist))
            ]
            maxima += self._maxima(rows, exist, self.rounds[number])
            stored, after = after_round(maxima, raw, self.scalars, **how)
        for ref, value in zip(arrays.gathered, stored, strict=True):
            ref[groups, :] = _as_word(value)
        return [before, after]

    def _maxima(self, rows: Sequence, exist, sizes: Sequence[int]) -> list:
        """The maxima over blocks of the values of each row of the groups."""
        maxima = [jnp.zeros(REGISTER, jnp.int32)] * len(sizes)
        for new, here in zip(rows, exist, strict=True):
            new = [whole(x) for x in new]
            if here is not None:
                new = [jnp.where(here, x, jnp.int32(0)) for x in new]
            maxima = [jnp.maximum(*pair) for pair in zip(maxima, new, strict=True)]
        return [
            _block_maximum(x, *self._sublanes_and_lanes(size))
            for x, size in zip(maxima, sizes, strict=True)
        ]

    def _per_block(self) -> list:
        return [(o, ref) for o, ref in self.arrays.operands if o.block_size is not None]

    def _sublanes_and_lanes(self, size: int) -> tuple[int, int]:
        """The height and width of a block in registers."""
        height, width = block_shape(size)
        return height // self.tiling.group, width

    def _unpack(self) -> None:
        """Write fields to their own memory."""
        plain = ((o, ref) for o, ref in self.arrays.operands if o.block_size is None)
        for number, (operand, ref) in enumerate(plain):
            rows = self.arrays.fields.get(("operand", number))
            if rows is not None:
                unpack(ref, rows, operand.bits or 0)

    def _pack(self) -> None:
        """Write words of the fields in their own memory."""
        plain = ((r, ref) for r, ref in self.arrays.results if r.block_size is None)
        for number, (result, ref) in enumerate(plain):
            rows = self.arrays.fields.get(("result", number))
            if rows is not None:
                pack(rows, ref, result.bits or 0)

    def _spread(self) -> None:
        """Write each element per block to all groups and lanes of the block."""
        for (operand, ref), spread in zip(
            self._per_block(), self.arrays.spread, strict=True
        ):
            height, width = self._sublanes_and_lanes(operand.block_size or 0)
            stored = _as_integers(ref[...])
            lane = lax.broadcasted_iota(jnp.int32, stored.shape, 1)
            first = lax.rem(self.place[1], jnp.int32(width)) * jnp.int32(LANES // width)
            chosen = jnp.take_along_axis(
                stored, lane // jnp.int32(width) + first, 1, mode="promise_in_bounds"
            )
            words = lax.bitcast_convert_type(chosen, jnp.uint32)
            for groups in range(height):
                spread[every(groups, height, len(words)), :] = words

    def _gather(self) -> None:
        """Write the elements per block, of the programs' share of their lanes."""
        results = [(r, x) for r, x in self.arrays.results if r.block_size is not None]
        for (result, ref), gathered in zip(results, self.arrays.gathered, strict=True):
            height, width = self._sublanes_and_lanes(result.block_size or 0)
            words = gathered[every(0, height, ref.shape[0]), :]
            stored = lax.bitcast_convert_type(words, jnp.int32)
            lane = lax.broadcasted_iota(jnp.int32, stored.shape, 1)
            source = (lane * jnp.int32(width)) & jnp.int32(LANES - 1)
            chosen = jnp.take_along_axis(stored, source, 1, mode="promise_in_bounds")
            share = lax.rem(self.place[1], jnp.int32(width))

            @pl.when(share == jnp.int32(0))
            def _(ref=ref):
                ref[...] = jnp.zeros(ref.shape, ref.dtype)

            here = lane // jnp.int32(LANES // width) == share
            new = jnp.where(here, chosen, _as_integers(ref[...]))
            if ref.dtype.itemsize == 2:
                wide = lax.bitcast_convert_type(new, jnp.float32)
                ref[...] = wide.astype(ref.dtype)
            else:
                ref[...] = lax.bitcast_convert_type(new, ref.dtype)


def _narrow(words, group: int, dtype) -> list[Narrow]:
    """The rows of the groups, of words that have several rows each."""
    dtype = jnp.dtype(dtype)
    count = 4 // dtype.itemsize
    held = [words[every(i, group // count), :] for i in range(group // count)]
    return [
        Narrow(word << jnp.uint32(32 - place) if place < 32 else word, dtype)
        for word in held
        for place in range(32 // count, 33, 32 // count)
    ]


def _together(rows: Sequence[Narrow]) -> jax.Array:
    """The words of as many rows as fit into one."""
    width, word = rows[0].width, rows[-1].alone()
    for number, row in enumerate(rows[:-1]):
        place = number * width
        mask = jnp.uint32(((1 << width) - 1) << place)
        moved = row.word >> jnp.uint32(32 - width - place)
        word = word | (moved & mask if place else moved)
    return word


def _as_value(word: jax.Array, dtype):
    """A value of 16 or 32 bits from the word, or the upper half of it."""
    if jnp.dtype(dtype).itemsize == 2:
        return Narrow(word, jnp.dtype(dtype))
    return lax.bitcast_convert_type(word, dtype)


def _as_word(value) -> jax.Array:
    if isinstance(value, Narrow):
        return value.alone()
    return lax.bitcast_convert_type(whole(value), jnp.uint32)


def _as_integers(x: jax.Array) -> jax.Array:
    """int32 with the patterns of values of 32 bits, or of bfloat16s in upper halves."""
    wide = x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
    return lax.bitcast_convert_type(wide, jnp.int32)


def _block_maximum(x: jax.Array, sublanes: int, lanes: int) -> jax.Array:
    """The maximum of neighbouring sublanes and lanes, in each of them."""
    for axis, count in enumerate((sublanes, lanes)):
        distance = 1
        while distance < count:
            x = jnp.maximum(x, _swapped(x, distance, axis))
            distance *= 2
    return x


def _swapped(x: jax.Array, distance: int, axis: int) -> jax.Array:
    """Neighbours at a distance that is a power of two, exchanged in pairs."""
    if 2 * distance == x.shape[axis]:
        return pltpu.roll(x, jnp.int32(distance), axis)
    # One permutation, where two rotations and a selection would be vector arithmetic.
    source = _iota(axis) ^ jnp.int32(distance)
    return jnp.take_along_axis(x, source, axis, mode="promise_in_bounds")


def _iota(axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, REGISTER, axis)


def _signed(number: int) -> int:
    """A number modulo 2^32 as int32 has it."""
    return (number + 2**31) % 2**32 - 2**31
