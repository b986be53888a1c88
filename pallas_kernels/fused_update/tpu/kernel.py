"""The launcher for TPUs, which runs fused updates as kernels of Pallas' TPU backend.

A leaf's arrays are viewed as matrices (:mod:`.arrays`) and divided among the programs
of the kernel's grid (:mod:`.tiling`). Each program loops over the units of its block,
loads and stores registers (:mod:`.blocks`), and evaluates the body with 32-bit
operations (:mod:`.evaluation`). XLA updates leaves that are small, have few columns, or
are stored in another order.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.fused_update import xla
from pallas_kernels.fused_update.spec import (
    BlockBody,
    Body,
    KernelCall,
    Leaf,
    Shard,
    shaped,
)
from pallas_kernels.fused_update.tpu.arrays import KernelArray, kernel_arrays
from pallas_kernels.fused_update.tpu.blocks import (
    Block,
    ScaleBlock,
    blocks_of,
    in_steps,
)
from pallas_kernels.fused_update.tpu.evaluation import (
    DTYPES,
    Evaluation,
    Functions,
    Known,
    Sum,
    generation_of_target,
    rules_for,
    traced,
    whole,
)
from pallas_kernels.fused_update.tpu.tiling import (
    LANES,
    REGISTER,
    SUBLANES,
    Tiling,
    size_for_kernel,
    tiling_of,
)
from pallas_kernels.layout import FOLD, layout_of


@dataclasses.dataclass(frozen=True)
class BlockProgram:
    """One program of a kernel.

    Args:
      tiling: tiling of the leaf.
      functions: functions of the body.
      rules: see :data:`.evaluation.RULES`.
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


_MIN_ELEMENTS = 2**14
_MIN_COLUMNS = 4
"""With fewer columns, the unused lanes of a kernel cost more than XLA's passes."""
_MEMORY_LIMIT = 64 * 2**20
_OF_BLOCKS = frozenset(
    jnp.dtype(t) for t in (jnp.float32, jnp.int32, jnp.uint32, jnp.bfloat16)
)
"""Supported dtypes of arrays with one element per block."""


def parts(leaves: Sequence[Leaf]) -> list[tuple[list[int], tuple[int, int]]]:
    """Return a separate kernel for each leaf. Equal kernels are compiled once."""
    return [([index], (1, 1)) for index in range(len(leaves))]


def groups(shards: Sequence[Shard]) -> list[list[int]]:
    """Return a separate group for each leaf, as the indices ``[[0], [1], ...]``.

    A TPU kernel updates one leaf, because its blocks have the layout of that leaf.
    """
    return [[index] for index in range(len(shards))]


def refusal(body: Body | BlockBody, leaf: Leaf, scalars: int) -> str | None:
    """Return why XLA updates a leaf instead of a kernel, or None if a kernel does.

    Args:
      body: body of the update.
      leaf: whole leaf, with arrays or their ShapeDtypeStructs.
      scalars: number of the body's scalars.
    """
    rank = len(leaf.shape)
    for operand in leaf.operands:
        axes, dtype = operand.repeated, operand.array.dtype
        if not axes:
            continue
        if axes not in ((rank - 1,), (rank - 2,)) or leaf.layout.axis != -2:
            return (
                "TPU kernels support repeated arrays only along one of the last two "
                f"axes, got one that is repeated along {list(axes)}"
            )
        if dtype.itemsize != 4:
            return f"TPU kernels do not support repeated arrays of {dtype}"
    if math.prod(leaf.shape) < _MIN_ELEMENTS:
        return f"it has fewer than {_MIN_ELEMENTS} elements"
    if not _is_better(leaf, leaf.shape, _MIN_ELEMENTS):
        return (
            f"shape {list(leaf.shape)} has too few rows or columns for TPU kernels, or "
            "XLA:TPU stores it in an order that they do not support"
        )
    # XLA updates a plain leaf in one pass, which costs less than copying float16.
    plain = DTYPES if leaf.has_words_or_blocks else DTYPES - {jnp.dtype(jnp.float16)}
    operands = [(o.array.dtype, o.block_size) for o in leaf.operands]
    results = [(r.dtype, r.block_size) for r in leaf.results]
    for dtype, block_size in (*operands, *results):
        if dtype not in (plain if block_size is None else _OF_BLOCKS):
            return f"TPU kernels do not support {dtype} arrays without a copy"
    operations = traced(body, operands, scalars).unsupported
    if operations:
        return f"TPU kernels do not support {operations[0]}"
    return None


def _is_better(leaf: Leaf, shape: tuple[int, ...], min_elements: int = 1) -> bool:
    """Returns whether a kernel is probably faster than XLA for a part of this shape.

    A kernel always processes 128 columns at a time. XLA needs only one pass for a plain
    leaf.
    """
    elements, columns = size_for_kernel(leaf, shape)
    if not leaf.has_words_or_blocks and columns % LANES:
        return False
    return elements >= min_elements and columns >= _MIN_COLUMNS


def update(call: KernelCall) -> list[jax.Array]:
    """Update one leaf for which :func:`refusal` returns None, and return its results.

    If ``call.interpret`` is True, Pallas simulates a TPU.
    """
    (shard,) = call.shards
    leaf, shape = shard.leaf, shard.shape
    # XLA might store the part and the leaf in different orders.
    is_alike = not leaf.has_words_or_blocks or layout_of(shape).axis == leaf.layout.axis
    if _is_better(leaf, shape) or not is_alike:
        written = _by_kernel(call, shard)
    else:
        written = xla.update(
            call.body,
            dataclasses.replace(leaf, shape=shape),
            xla.row_of(call.scalars, call.scalars.rows),
            call.layer,
            call.scalars.when,
            xla.index_of(shape, leaf.shape, shard.base, call.layer),
        )
    return shaped(written, call.shards)


def _by_kernel(call: KernelCall, shard: Shard) -> list[jax.Array]:
    interpret, scalars = call.interpret, call.scalars
    zero = jnp.zeros((1,), jnp.uint32)
    row = zero if scalars.rows is None else scalars.rows
    base = zero if shard.base is None else shard.base.reshape(1)
    layer = jnp.zeros((1,), jnp.int32) if call.layer is None else call.layer
    tiling = tiling_of(shard)
    operands, results = kernel_arrays(shard, tiling, interpret)
    kernel = _Kernel(
        body=call.body,
        tiling=tiling,
        operands=operands,
        results=results,
        table_width=scalars.table.shape[-1],
        when=scalars.when,
        interpret=interpret,
        generation=None if interpret else generation_of_target(),
    )
    pairs = zip(operands, shard.leaf.arrays, strict=True)
    arrays = [each.to_kernel(x) for each, x in pairs]
    if not interpret:
        # Without the constraint, XLA first copies parts of the arrays to vector memory.
        in_memory = pltpu.MemorySpace.HBM
        arrays = [pltpu.with_memory_space_constraint(x, in_memory) for x in arrays]
    # The call is jitted, so that equal leaves are traced and lowered once.
    written = _call(kernel)(
        layer.astype(jnp.int32),
        jnp.concatenate([row, base]),
        scalars.table.reshape(-1),
        *arrays,
    )
    pairs = zip(results, written, strict=True)
    return [each.from_kernel(x) for each, x in pairs]


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """Static arguments of a kernel. Equal kernels are traced once."""

    body: Body | BlockBody
    tiling: Tiling
    operands: tuple[KernelArray, ...]
    results: tuple[KernelArray, ...]
    table_width: int
    when: int | None
    interpret: bool
    generation: int | None


@functools.lru_cache(maxsize=1024)
def _call(kernel: _Kernel):
    """Returns the kernel as a jitted function of its arrays."""
    arrays = (*kernel.operands, *kernel.results)
    return jax.jit(
        pl.pallas_call(
            functools.partial(_program, kernel),
            out_shape=[x.output() for x in kernel.results],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                # All scalars are prefetched. With 64-bit types enabled, Pallas gives
                # other scalars an index map in int64, which TPUs do not support.
                num_scalar_prefetch=3,
                grid=kernel.tiling.grid,
                in_specs=[x.spec() for x in kernel.operands],
                out_specs=[x.spec() for x in kernel.results],
                scratch_shapes=[memory for x in arrays for memory in x.scratch()],
            ),
            input_output_aliases={
                3 + x.overwrites: number
                for number, x in enumerate(kernel.results)
                if x.overwrites is not None
            },
            compiler_params=pltpu.CompilerParams(
                # Programs with neighboring columns write the same row of scales.
                dimension_semantics=("parallel",) * 3 + ("arbitrary",),
                vmem_limit_bytes=_MEMORY_LIMIT,
            ),
            interpret=pltpu.InterpretParams() if kernel.interpret else False,
            name="fused_update",
        )
    )


def _program(kernel: _Kernel, layer, place, table, *refs):
    position = [pl.program_id(axis) for axis in range(4)]
    row = place[0].astype(jnp.int32) * jnp.int32(kernel.table_width)
    scalars = [table[row + jnp.int32(i)] for i in range(kernel.table_width)]
    arrays = *kernel.operands, *kernel.results
    blocks = blocks_of(arrays, refs)
    count = len(kernel.operands)
    operands, results = blocks[:count], blocks[count:]
    size = math.prod(kernel.tiling.whole) % 2**32
    first = place[1] + layer[0].astype(jnp.uint32) * jnp.uint32(size)
    for operand in operands:
        operand.fetch()
    kinds = [(x.dtype, x.block_size) for x in kernel.operands]
    program = BlockProgram(
        tiling=kernel.tiling,
        functions=traced(kernel.body, kinds, kernel.table_width),
        rules=rules_for(kernel.generation),
        scalars=scalars,
        operands=operands,
        results=results,
        first=_first_element(kernel.tiling, first, position),
        place=(position[2], position[3]),
    )
    if kernel.when is None:
        program.update()
    else:
        proceeds = scalars[kernel.when] != jnp.uint32(0)
        pl.when(proceeds)(program.update)
        pl.when(jnp.logical_not(proceeds))(program.keep)
    for result in results:
        result.flush()


def _first_element(
    tiling: Tiling, first: jax.Array, position: Sequence[jax.Array]
) -> jax.Array:
    """Returns the index of a program's first element in the whole leaf.

    Args:
      tiling: tiling of the leaf.
      first: index of the shard's first element.
      position: the program's indices along the axes of the grid.
    """
    (matrix, aside, rows, columns), whole = position, tiling.whole

    def stride(axis: int) -> int:
        return math.prod(whole[len(whole) + axis + 1 :])

    steps = [
        (rows, tiling.block_rows * (LANES if tiling.is_folded else tiling.row_stride)),
        (columns, LANES),
        (aside, (tiling.side_by_side or 0) * stride(-2)),
    ]
    for axis in reversed(tiling.matrix_axes):
        length = jnp.int32(tiling.shape[axis])
        steps.append((lax.rem(matrix, length), stride(axis)))
        matrix = lax.div(matrix, length)
    for number, step in steps:
        first = first + number.astype(jnp.uint32) * jnp.uint32(step % 2**32)
    return first
