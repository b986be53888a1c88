"""A program of a TPU kernel, which loops over the units of its blocks.

:mod:`.tiling` defines groups and units, and :mod:`.blocks` loads and stores them.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.fused_update.tpu.blocks import Block
from pallas_kernels.fused_update.tpu.functions import Evaluation, Functions, Known
from pallas_kernels.fused_update.tpu.registers import in_steps
from pallas_kernels.fused_update.tpu.repeated_blocks import ScaleBlock
from pallas_kernels.fused_update.tpu.tiling import LANES, REGISTER, SUBLANES, Tiling
from pallas_kernels.fused_update.tpu.values import Sum, whole
from pallas_kernels.layout import FOLD


@dataclasses.dataclass(frozen=True)
class BlockProgram:
    """One program of a kernel.

    Args:
      tiling: tiling of the leaf.
      functions: functions of the body.
      rules: see :data:`.rules.RULES`.
      scalars: scalars of the body.
      operands, results: the program's blocks.
      first: uint32 scalar, the index of the program's first element in the whole leaf.
      place: int32 indices of the program's block of rows and block of columns.
    """

    tiling: Tiling
    functions: Functions
    rules: Mapping
    scalars: list[jax.Array]
    operands: Sequence[Block]
    results: Sequence[Block]
    first: jax.Array
    place: tuple[jax.Array, jax.Array]

    def update(self) -> None:
        """Update all blocks."""
        known: Known = {}
        self.functions.run.add_known(self.scalars, known)
        for statistics, _ in self.functions.rounds:
            statistics.add_known(self.scalars, known)
        for block in (*_scales(self.operands), *_plain(self.operands)):
            block.open(self.place[1])

        unroll = self.tiling.unroll

        def units(first: jax.Array) -> None:
            for offset in range(unroll):
                self._unit(first, offset, Evaluation(dict(known), self.rules))

        in_steps(self.tiling.units, unroll, units)
        for block in (*_plain(self.results), *_scales(self.results)):
            block.close(self.place[1])

    def keep(self) -> None:
        """Copy each overwritten operand to its result, instead of updating it."""
        for block in self.results:
            if block.array.overwrites is not None:
                block.ref[...] = self.operands[block.array.overwrites].ref[...]

    def _unit(self, first: jax.Array, offset: int, evaluation: Evaluation) -> None:
        """Updates the unit ``first + offset`` of the block."""
        group, unit = range(self.tiling.group), first + jnp.int32(offset)
        columns = [block.load(unit) for block in _plain(self.operands)]
        rows = [list(values) for values in zip(*columns, strict=True)]
        exist = [self._exists(unit, row) for row in group]
        index = [self._index(self.first, first, offset, row) for row in group]
        arguments = [(rows[row], self.scalars, index[row]) for row in group]
        run, new = self.functions.run, []
        count = self.tiling.stacked_blocks
        height = self.tiling.group // count
        for block in range(count):
            rows = slice(block * height, (block + 1) * height)
            of_blocks = []
            if self.functions.before is not None:
                of_blocks = self._update_scales(
                    evaluation, (unit, block), arguments[rows], exist[rows]
                )
            new += [run(evaluation, *x, *of_blocks) for x in arguments[rows]]
        for block, values in zip(
            _plain(self.results), zip(*new, strict=True), strict=True
        ):
            block.store(unit, values, exist)

    def _index(self, start: jax.Array, first: jax.Array, offset: int, row: int) -> Sum:
        """Returns the indices of the elements in a row, counted from ``start``."""
        tiling = self.tiling
        group, stride = tiling.group, tiling.row_stride
        constant = row * stride
        if tiling.side_by_side is not None:
            rows, aside = self._of_unit(first + jnp.int32(offset))
            within = _iota(0) * jnp.int32(tiling.whole[-1]) + _iota(1)
            before = rows * jnp.int32(_signed(group * stride))
            before = before + aside * jnp.int32(SUBLANES * tiling.whole[-1])
        else:
            within, rows = _iota(1), group
            if tiling.is_folded:
                # The quarters of a register belong to neighboring groups.
                quarter = _iota(1) // jnp.int32(FOLD)
                within = within + quarter * jnp.int32((group - 1) * FOLD)
                rows = group * LANES // FOLD
            within = within + _iota(0) * jnp.int32(_signed(rows * stride))
            step = SUBLANES * rows * stride
            before = first * jnp.int32(_signed(step))
            constant += offset * step
        scalar = start + before.astype(jnp.uint32)
        return Sum(within.astype(jnp.uint32), scalar, constant % 2**32)

    def _of_unit(self, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the indices of a unit along the rows and along matrices side by side.

        For one matrix, they are ``unit`` and 0.
        """
        count = jnp.int32(self.tiling.registers)
        return lax.div(unit, count), lax.rem(unit, count)

    def _exists(self, unit: jax.Array, row: int) -> jax.Array | None:
        """Returns a mask of elements in the array; None if no word or block is cut."""
        tiling = self.tiling
        if tiling.is_even:
            return None
        rows, columns = self.place
        if tiling.is_folded:
            start = rows.astype(jnp.uint32) * jnp.uint32(tiling.block_rows * LANES)
            place = whole(self._index(start, unit, 0, row))
            return place < jnp.uint32(tiling.shape[-1])
        start = rows * jnp.int32(tiling.block_rows) + jnp.int32(row)
        start = start + self._of_unit(unit)[0] * jnp.int32(tiling.unit_rows)
        group = tiling.group if tiling.side_by_side is None else 0
        below = _iota(0) * jnp.int32(group) + start < jnp.int32(tiling.rows)
        column = _iota(1) + columns * jnp.int32(LANES)
        return below & (column < jnp.int32(tiling.columns))

    def _update_scales(
        self,
        evaluation: Evaluation,
        place: tuple[jax.Array, int],
        arguments: Sequence[tuple],
        exist: Sequence,
    ) -> list:
        """Writes the per-block results and returns the body's ``before`` and ``after``.

        Args:
          evaluation: evaluates the functions of the unit's values.
          place: index of the unit, and index of the block in its groups.
          arguments: values, scalars and indices of each row of the block.
          exist: for each row, a mask of the elements inside the array, or None for all.
        """
        functions = self.functions
        assert functions.before is not None
        values = [block.load_elements(*place) for block in _scales(self.operands)]
        given, maxima, stored = [functions.before(evaluation, values)], [], []
        for statistics, of_maxima in functions.rounds:
            rows = [statistics(evaluation, *x, *given) for x in arguments]
            sizes = functions.block_sizes[len(maxima) :]
            maxima += [
                self._maximum(list(map(whole, values)), exist, size)
                for size, values in zip(sizes, zip(*rows, strict=True), strict=False)
            ]
            stored, after = of_maxima(evaluation, maxima, values)
            given[1:] = [after]
        for block, value in zip(_scales(self.results), stored, strict=True):
            block.store_elements(*place, value)
        return given

    def _maximum(
        self, rows: Sequence[jax.Array], exist: Sequence, size: int
    ) -> jax.Array:
        """Returns the maximum of each block, but at least 0, repeated in the block."""
        zero = jnp.zeros((), rows[0].dtype)
        maximum = jnp.zeros(REGISTER, zero.dtype)
        for x, here in zip(rows, exist, strict=True):
            x = x if here is None else jnp.where(here, x, zero)
            maximum = jnp.maximum(maximum, x)
        return _block_maximum(maximum, *self.tiling.block_in_registers(size))


def _plain(blocks: Sequence[Block]) -> list[Block]:
    return [x for x in blocks if not isinstance(x, ScaleBlock)]


def _scales(blocks: Sequence[Block]) -> list[ScaleBlock]:
    return [x for x in blocks if isinstance(x, ScaleBlock)]


def _block_maximum(x: jax.Array, sublanes: int, lanes: int) -> jax.Array:
    """Returns the maximum of neighboring sublanes and lanes, repeated in each."""
    for axis, count in enumerate((sublanes, lanes)):
        distance = 1
        while distance < count:
            x = jnp.maximum(x, _swapped(x, distance, axis))
            distance *= 2
    return x


def _swapped(x: jax.Array, distance: int, axis: int) -> jax.Array:
    """Exchanges elements whose distance along an axis is the given power of two."""
    if 2 * distance == x.shape[axis]:
        return pltpu.roll(x, jnp.int32(distance), axis)
    # One permutation replaces two rotations and a selection with vector arithmetic.
    source = _iota(axis) ^ jnp.int32(distance)
    return jnp.take_along_axis(x, source, axis, mode="promise_in_bounds")


def _iota(axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, REGISTER, axis)


def _signed(number: int) -> int:
    """Returns the int32 that has the same bits as ``number`` modulo 2^32."""
    return (number + 2**31) % 2**32 - 2**31
