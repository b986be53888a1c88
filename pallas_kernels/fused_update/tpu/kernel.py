"""The fused update as a Pallas kernel on the TPU backend.

It takes the state as kernels on GPUs do. What each program of the kernel does is in
:mod:`.tpu_program`. It updates leaves of two axes or more whose last two are large, and
are the rows and columns of what is packed, or become so by a copy. XLA updates the
others.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.fused_update import xla
from pallas_kernels.fused_update.spec import (
    BlockBody,
    Body,
    Call,
    Leaf,
    Operand,
    Result,
    Shard,
    manual_axes,
    result_shapes,
)
from pallas_kernels.fused_update.tpu.arrays import (
    as_given,
    as_held,
    as_matrices,
    held_as,
    is_transposed,
    merged_axes,
    swapped,
)
from pallas_kernels.fused_update.tpu.functions import traced
from pallas_kernels.fused_update.tpu.program import BlockProgram
from pallas_kernels.fused_update.tpu.quotients import generation_of_target
from pallas_kernels.fused_update.tpu.rules import DTYPES
from pallas_kernels.fused_update.tpu.scratch import arrays_of, scratch_of
from pallas_kernels.fused_update.tpu.tiling import (
    LANES,
    Tiling,
    tiling_of,
)
from pallas_kernels.layout import Layout, block_shape, layout_of

_LEAST_ELEMENTS = 2**14
_LEAST_COLUMNS = 16
"""With fewer, the lanes that a kernel has no use for cost more than XLA's passes."""
_MEMORY_LIMIT = 64 * 2**20
_OF_BLOCKS = frozenset(
    jnp.dtype(t) for t in (jnp.float32, jnp.int32, jnp.uint32, jnp.bfloat16)
)
"""The dtypes of what is stored per block."""


def max_leaves(leaves: Sequence[Leaf]) -> int:
    """One: each leaf has a kernel of its own, and equal ones are compiled once."""
    del leaves
    return 1


def can_share(shards: Sequence[Shard]) -> bool:
    """Whether these leaves, or shards of leaves, can share a kernel."""
    return len(shards) == 1


def accepts(body: Body | BlockBody, leaf: Leaf, scalars: int) -> bool:
    """Whether the kernel takes a leaf; if not, it is left to XLA.

    Args:
      body: of the update.
      leaf: whole, its operands with arrays or their ShapeDtypeStructs.
      scalars: how many the body gets.
    """
    if len(leaf.shape) < 2:
        return False
    leaf = leaf.with_arrays(
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaf.arrays]
    )
    leaf = merged_axes(Shard(leaf, leaf.shape)).leaf
    if leaf.has_words_or_blocks and leaf.layout.axis != -2:
        return False
    if math.prod(leaf.shape[-2:]) < _LEAST_ELEMENTS or not _is_wide(leaf, leaf.shape):
        return False
    both = [*((o, o.array.dtype) for o in leaf.operands)]
    both += [(r, r.dtype) for r in leaf.results]
    if not all(dtype in _dtypes(like, leaf) for like, dtype in both):
        return False
    return _functions(body, _without_arrays(leaf.operands), scalars).are_supported


def _dtypes(like: Operand | Result, leaf: Leaf) -> frozenset:
    """The dtypes that an operand or result may have."""
    if like.block_size is not None:
        return _OF_BLOCKS
    # Of plain arrays XLA makes one pass, which is less than to copy float16.
    return DTYPES if leaf.has_words_or_blocks else DTYPES - {jnp.dtype(jnp.float16)}


def update(call: Call) -> list[jax.Array]:
    """The results of a call's kernel, for one leaf that it :func:`accepts`.

    Interpreted, it is run by Pallas' model of a TPU.
    """
    (given,) = call.shards
    shard = merged_axes(given)
    table, rows, layer = call.table, call.rows, call.layer
    leaf, tiling = shard.leaf, tiling_of(shard)
    if not _is_wide(leaf, shard.shape):
        local = dataclasses.replace(leaf, shape=shard.shape)
        within = shard.base, leaf.shape
        scalars = xla.row_of(table, rows)
        written = xla.update(call.body, local, scalars, layer, call.when, within)
        return _as_given(written, given)
    shapes = result_shapes(shard)
    zero = jnp.zeros((1,), jnp.uint32)
    base = zero if shard.base is None else shard.base.reshape(1)
    place = [zero if rows is None else rows, base]
    kernel = _Kernel(
        call.body,
        tiling,
        _without_arrays(leaf.operands),
        leaf.results,
        leaf.overwritten if leaf.stacked else frozenset[int](),
        tuple(
            is_transposed(tiling, like, shape)
            for like, shape in (
                *((o, o.array.shape) for o in leaf.operands),
                *zip(leaf.results, shapes, strict=True),
            )
        ),
        table.shape[-1],
        call.when,
        call.interpret,
        None if call.interpret else generation_of_target(),
    )
    if layer is None:
        layer = jnp.zeros((1,), jnp.int32)
    of_operands, of_results = kernel.transposed_by_kind
    arrays = [as_held(as_matrices(x)) for x in leaf.arrays]
    outputs = _outputs(shard)
    if call.interpret:
        arrays = [
            kernel.padded(x, o) for x, o in zip(arrays, leaf.operands, strict=True)
        ]
        outputs = tuple(
            _shape_after(functools.partial(kernel.padded, like=r), x)
            for x, r in zip(outputs, leaf.results, strict=True)
        )
    arrays = [swapped(*each) for each in zip(arrays, of_operands, strict=True)]
    outputs = tuple(
        _shape_after(functools.partial(swapped, yes=yes), x)
        for x, yes in zip(outputs, of_results, strict=True)
    )
    if not call.interpret:
        # Else XLA copies parts of them to a TPU's vector memory beforehand.
        in_memory = pltpu.MemorySpace.HBM
        arrays = [pltpu.with_memory_space_constraint(x, in_memory) for x in arrays]
    # Jitted, so that equal leaves are traced and lowered once.
    written = _call(kernel, outputs)(
        layer.astype(jnp.int32), jnp.concatenate(place), table.reshape(-1), *arrays
    )
    written = [swapped(*each) for each in zip(written, of_results, strict=True)]
    if call.interpret:
        pairs = zip(written, shapes, strict=True)
        written = [x[:, : shape[-2], : shape[-1]] for x, shape in pairs]
    written = [as_given(x, r.dtype) for x, r in zip(written, leaf.results, strict=True)]
    return _as_given(written, given)


def _shape_after(
    change: Callable[[jax.Array], jax.Array], x: jax.ShapeDtypeStruct
) -> jax.ShapeDtypeStruct:
    """``jax.eval_shape``, which takes no shapes that vary in a ``jax.shard_map``."""
    new = jax.eval_shape(change, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return jax.ShapeDtypeStruct(
        new.shape, new.dtype, manual_axis_type=x.manual_axis_type
    )


def _as_given(written: Sequence[jax.Array], given: Shard) -> list[jax.Array]:
    """The results in the shapes of the part before its axes were merged."""
    shapes = result_shapes(given)
    return [x.reshape(shape) for x, shape in zip(written, shapes, strict=True)]


def _is_wide(leaf: Leaf, shape: tuple[int, ...]) -> bool:
    """Whether a part of this shape is better updated by a kernel than by XLA.

    A kernel takes 128 columns at a time, whether or not there are so many. Of plain
    arrays XLA makes one pass itself.
    """
    if leaf.has_words_or_blocks:
        return shape[-1] >= _LEAST_COLUMNS or layout_of(shape) != Layout(shape, -2)
    return shape[-1] % LANES == 0


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What a kernel is compiled for.

    Args:
      body, tiling, operands, results, when, interpret: as they are named.
      stacked: numbers of the operands that are stacks of layers.
      transposed: of the operands and then of the results, which are transposed.
      table_width: scalars in a row of the table.
      generation: of the TPU; None if it is not known, or interpreted.
    """

    body: Body | BlockBody
    tiling: Tiling
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    stacked: frozenset[int]
    transposed: tuple[bool, ...]
    table_width: int
    when: int | None
    interpret: bool
    generation: int | None

    @property
    def transposed_by_kind(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """The operands' part of ``transposed``, and the results'."""
        count = len(self.operands)
        return self.transposed[:count], self.transposed[count:]

    def spec(
        self, like: Operand | Result, stacked: bool, transposed: bool
    ) -> pl.BlockSpec:
        """Which block of an array a program has."""
        width = 1 if like.block_size is None else block_shape(like.block_size)[1]
        matrices = self.tiling.matrices if stacked else 0

        def block(matrix, rows, columns, layer, *_):
            # Divided as int32, as the program's numbers are.
            first = layer[0] * jnp.int32(matrices) if matrices else jnp.int32(0)
            columns = lax.div(columns, jnp.int32(width))
            place = (columns, rows) if transposed else (rows, columns)
            return first + matrix, *place

        shape = self.tiling.stored_rows(like), LANES
        return pl.BlockSpec((None, *(shape[::-1] if transposed else shape)), block)

    def padded(self, x: jax.Array, like: Operand | Result) -> jax.Array:
        """Matrices with whole blocks, all bits set where there is nothing.

        Pallas' model of a TPU does not write blocks that reach beyond an array in the
        place of an operand.
        """
        width = 1 if like.block_size is None else block_shape(like.block_size)[1]
        _, rows, columns = self.tiling.grid
        rows = rows * self.tiling.stored_rows(like) - x.shape[-2]
        columns = math.ceil(columns / width) * LANES - x.shape[-1]
        unsigned = f"uint{8 * x.dtype.itemsize}"
        bits = lax.bitcast_convert_type(x, unsigned)
        ones = np.iinfo(unsigned).max
        bits = jnp.pad(
            bits,
            [(0, 0), (0, rows), (0, columns)],
            constant_values=bits.dtype.type(ones),
        )
        return lax.bitcast_convert_type(bits, x.dtype)


@functools.lru_cache(maxsize=1024)
def _call(kernel: _Kernel, outputs: tuple[jax.ShapeDtypeStruct, ...]):
    """The kernel as a jitted function of its arrays."""
    of_operands, of_results = kernel.transposed_by_kind
    specs = [
        kernel.spec(o, i in kernel.stacked, of_operands[i])
        for i, o in enumerate(kernel.operands)
    ]
    return jax.jit(
        pl.pallas_call(
            functools.partial(_program, kernel),
            out_shape=outputs,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                # All scalars: the index map that Pallas gives to others counts in
                # int64 with 64-bit types on, which a TPU does not.
                num_scalar_prefetch=3,
                grid=kernel.tiling.grid,
                in_specs=specs,
                out_specs=[
                    kernel.spec(r, r.overwrites in kernel.stacked, yes)
                    for r, yes in zip(kernel.results, of_results, strict=True)
                ],
                scratch_shapes=scratch_of(
                    kernel.tiling, kernel.operands, kernel.results, kernel.transposed
                ),
            ),
            input_output_aliases={
                3 + r.overwrites: i
                for i, r in enumerate(kernel.results)
                if r.overwrites is not None
            },
            compiler_params=pltpu.CompilerParams(
                # Programs with neighbouring columns write the same row of scales.
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=_MEMORY_LIMIT,
            ),
            interpret=pltpu.InterpretParams() if kernel.interpret else False,
            name="fused_update",
        )
    )


def _program(kernel: _Kernel, layer, place, table, *refs):
    tiling = kernel.tiling
    matrix, rows, columns = (pl.program_id(axis) for axis in range(3))
    row = place[0].astype(jnp.int32) * jnp.int32(kernel.table_width)
    scalars = [table[row + jnp.int32(i)] for i in range(kernel.table_width)]
    whole = tiling.whole
    size = math.prod(whole) % 2**32
    first = place[1] + layer[0].astype(jnp.uint32) * jnp.uint32(size)
    for length, stride in reversed(tiling.strides()):
        number = lax.rem(matrix, jnp.int32(length)).astype(jnp.uint32)
        matrix = lax.div(matrix, jnp.int32(length))
        first = first + number * jnp.uint32(stride)
    rows_before = jnp.uint32(tiling.block_rows * whole[-1] % 2**32)
    first = first + rows.astype(jnp.uint32) * rows_before
    first = first + columns.astype(jnp.uint32) * jnp.uint32(LANES)
    arrays, turned = arrays_of(kernel.operands, kernel.results, kernel.transposed, refs)
    for like, ref, block in turned:
        if isinstance(like, Operand):
            block[...] = ref[...].T
    work = BlockProgram(
        tiling=tiling,
        functions=_functions(kernel.body, kernel.operands, kernel.table_width),
        rounds=_rounds(kernel.body, kernel.operands),
        scalars=scalars,
        arrays=arrays,
        first=first,
        place=(rows, columns),
        generation=kernel.generation,
    )
    if kernel.when is None:
        work.update()
    else:
        proceeds = scalars[kernel.when] != jnp.uint32(0)
        pl.when(proceeds)(work.update)
        pl.when(jnp.logical_not(proceeds))(work.keep)
    for like, ref, block in turned:
        if isinstance(like, Result):
            ref[...] = block[...].T


def _functions(body: Body | BlockBody, operands: tuple[Operand, ...], scalars: int):
    """The body's functions, traced once for equal leaves."""
    integers = jax.dtypes.canonicalize_dtype(np.int64)
    return _traced(body, operands, scalars, integers)


@functools.lru_cache(maxsize=1024)
def _traced(body, operands: tuple[Operand, ...], scalars: int, integers: np.dtype):
    """With the dtype of integers, by which 64-bit types are on or off."""
    del integers
    sizes = [o.block_size for o in operands if o.block_size is not None]
    return traced(body, operands, sizes, scalars)


def _rounds(body, operands: Sequence[Operand]) -> Sequence[Sequence[int]]:
    has_blocks = any(o.block_size is not None for o in operands)
    return body.rounds if has_blocks else ()


def _without_arrays(operands: Sequence[Operand]) -> tuple[Operand, ...]:
    """The operands, with dtypes in place of arrays."""
    return tuple(
        dataclasses.replace(o, array=jax.ShapeDtypeStruct((), o.array.dtype))
        for o in operands
    )


def _outputs(shard: Shard) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What the kernel writes."""
    results, operands = shard.leaf.results, shard.leaf.operands
    return tuple(
        jax.ShapeDtypeStruct(
            (math.prod(shape[:-2]), *shape[-2:]),
            held_as(r.dtype),
            manual_axis_type=manual_axes(r, operands),
        )
        for r, shape in zip(results, result_shapes(shard), strict=True)
    )
