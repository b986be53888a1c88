"""The fused update as a Pallas kernel on the Triton backend.

What each program of the kernel does is in :mod:`.triton_program`.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.fused_update.lanes import lanes_of
from pallas_kernels.fused_update.sharded import Shard
from pallas_kernels.fused_update.spec import BlockBody, Body, Operand, Result
from pallas_kernels.fused_update.tiling import LANES, Tiling
from pallas_kernels.fused_update.triton_program import (
    Program,
    read_scalars,
    unless_skipped,
)

# Four elements per thread: 16 bytes of float32 or of words, which is what one
# instruction moves.
_FLAT_WIDTH = 512
_FLAT_WARPS = 4
_THREADS_OF_A_WARP = 32


def update(
    body: Body | BlockBody,
    shard: Shard,
    table: jax.Array,
    row: jax.Array | None = None,
    layer: jax.Array | None = None,
    *,
    when: int | None = None,
    interpret: bool = False,
) -> list[jax.Array]:
    """One kernel over a leaf, a shard of it, or one layer of a stack.

    Args:
      body: see :data:`pallas_kernels.fused_update.Body`.
      shard: the arrays on this device.
      table, row: as in :func:`pallas_kernels.fused_update`.
      layer: int32 vector of one element, which layer.
      when: as in :func:`pallas_kernels.fused_update`.
      interpret: run the kernel's operations with XLA, on any platform.

    Returns:
      One array per result.
    """
    leaf = shard.leaf
    tiling = Tiling(shard.shape, leaf.shape, leaf.packed, leaf.block_sizes, _FLAT_WIDTH)
    stacked = leaf.overwritten if leaf.stacked else frozenset[int]()
    arrays = [
        # A layer is indexed by itself: a stack may have more than 2^31 elements.
        o.array.reshape(o.array.shape[0] if i in stacked else 1, -1)
        for i, o in enumerate(leaf.operands)
    ]
    # What is not given is not replaced by a constant: XLA would launch a kernel of its
    # own to write it.
    place = [row, None if shard.base is None else shard.base.reshape(1), layer]
    statics = _Statics(
        body=body,
        tiling=tiling,
        operands=tuple(dataclasses.replace(o, array=None) for o in leaf.operands),
        results=leaf.results,
        stacked=stacked,
        given=tuple(x is not None for x in place),
        table_width=table.shape[-1],
        leaf_size=math.prod(leaf.shape) % 2**32,
        when=when,
        interpret=interpret,
    )
    place = [x for x in place if x is not None]
    shapes = _result_shapes(shard)
    outputs = _outputs(leaf.results, leaf.operands, arrays, shapes)
    written = _call(statics, tuple(outputs))(*place, table.reshape(-1), *arrays)
    return [x.reshape(shape) for x, shape in zip(written, shapes, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Statics:
    """What a kernel is compiled for.

    Args:
      body, tiling, operands, results, when, interpret: as they are named.
      stacked: numbers of the operands that are stacks of layers.
      given: whether the kernel gets the table's row, the shard's base, and the layer.
      table_width: scalars in a row of the table.
      leaf_size: elements of the leaf, or of one layer, modulo 2^32.
    """

    body: Body | BlockBody
    tiling: Tiling
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    stacked: frozenset[int]
    given: tuple[bool, ...]
    table_width: int
    leaf_size: int
    when: int | None
    interpret: bool


@functools.lru_cache(maxsize=1024)
def _call(statics: _Statics, outputs: tuple[jax.ShapeDtypeStruct, ...]):
    """The kernel as a function of its arrays.

    It is the same function for equal leaves, and when the same leaf is traced again, as
    JAX's transformations do; JAX then does not trace the kernel again.
    """
    tiling, first = statics.tiling, 1 + sum(statics.given)
    return pl.pallas_call(
        functools.partial(_kernel, statics),
        grid=(tiling.programs,),
        out_shape=outputs,
        input_output_aliases={
            first + r.overwrites: i
            for i, r in enumerate(statics.results)
            if r.overwrites is not None
        },
        # Left out, they would choose another backend.
        compiler_params=triton.CompilerParams(
            num_warps=_FLAT_WARPS if tiling.is_flat else LANES // _THREADS_OF_A_WARP,
            num_stages=1,
        ),
        interpret=statics.interpret,
        name="fused_update",
    )


def _kernel(statics: _Statics, *refs):
    refs = list(refs)
    row, base, layer = (
        refs.pop(0)[np.int32(0)] if given else jnp.uint32(0) for given in statics.given
    )
    scalars = read_scalars(refs.pop(0), row, statics.table_width)
    base = base + layer.astype(jnp.uint32) * jnp.uint32(statics.leaf_size)
    program = Program(
        lanes=lanes_of(statics.tiling, pl.program_id(0), base),
        layer=layer.astype(jnp.int32),
        stacked=statics.stacked,
        scalars=scalars,
        interpret=statics.interpret,
    )

    @unless_skipped(scalars, statics.when)
    def _():
        count = len(statics.operands)
        program.update(
            statics.body,
            list(zip(refs[:count], statics.operands, strict=True)),
            list(zip(refs[count:], statics.results, strict=True)),
        )


def _result_shapes(shard: Shard) -> list[tuple[int, ...]]:
    leaf = shard.leaf
    return [
        _share(leaf.stored_shape(r), shard)
        if r.overwrites is None
        else leaf.operands[r.overwrites].array.shape
        for r in leaf.results
    ]


def _share(stored: tuple[int, ...], shard: Shard) -> tuple[int, ...]:
    """The shard's share of an array's shape."""
    return tuple(
        n * part // whole if whole else n
        for n, part, whole in zip(stored, shard.shape, shard.leaf.shape, strict=True)
    )


def _outputs(results, operands, arrays, shapes) -> list[jax.ShapeDtypeStruct]:
    """What the kernel writes: as ``arrays``, with an axis of layers in front."""
    return [
        jax.ShapeDtypeStruct(
            (1, math.prod(shape))
            if r.overwrites is None
            else arrays[r.overwrites].shape,
            r.dtype,
            manual_axis_type=manual_axes(r, operands),
        )
        for r, shape in zip(results, shapes, strict=True)
    ]


def manual_axes(result: Result, operands: Sequence[Operand]):
    """How a result varies over the mesh of a ``jax.shard_map``: as what it replaces."""
    if result.overwrites is not None:
        return jax.typeof(operands[result.overwrites].array).manual_axis_type
    types = [jax.typeof(o.array).manual_axis_type for o in operands]
    return max(types, key=lambda each: len(each.varying))
