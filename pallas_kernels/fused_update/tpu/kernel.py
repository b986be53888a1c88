"""The launcher for TPUs, which runs fused updates as kernels of Pallas' TPU backend.

A leaf's arrays are viewed as matrices (:mod:`.arrays`) and divided among the programs
of the kernel's grid (:mod:`.tiling`). Each program loops over its block
(:mod:`.program`), loads and stores registers (:mod:`.blocks`, :mod:`.repeated_blocks`,
:mod:`.registers`), and evaluates the body with 32-bit operations (:mod:`.functions`,
:mod:`.rules`). XLA updates leaves that are small, have few columns, or are stored in
another order.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.fused_update import xla
from pallas_kernels.fused_update.spec import BlockBody, Body, Call, Leaf, Shard, shaped
from pallas_kernels.fused_update.tpu.arrays import KernelArray, kernel_arrays
from pallas_kernels.fused_update.tpu.functions import traced
from pallas_kernels.fused_update.tpu.program import BlockProgram
from pallas_kernels.fused_update.tpu.repeated_blocks import blocks_of
from pallas_kernels.fused_update.tpu.rules import (
    DTYPES,
    generation_of_target,
    rules_for,
)
from pallas_kernels.fused_update.tpu.tiling import (
    LANES,
    Tiling,
    size_for_kernel,
    tiling_of,
)
from pallas_kernels.layout import layout_of

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


def update(call: Call) -> list[jax.Array]:
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


def _by_kernel(call: Call, shard: Shard) -> list[jax.Array]:
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
