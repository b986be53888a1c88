"""The fused update as a Pallas kernel on the Triton backend.

What each program of the kernel does is in :mod:`.triton_program`; how one finds its
leaf among several, in :mod:`.memory`.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.fused_update.arrangement import ByBlocks
from pallas_kernels.fused_update.lanes import lanes_of
from pallas_kernels.fused_update.memory import Memory, OneLeaf, OneOfMany
from pallas_kernels.fused_update.sharded import Shard
from pallas_kernels.fused_update.spec import BlockBody, Body, Leaf, Operand, Result
from pallas_kernels.fused_update.tiling import Tiling
from pallas_kernels.fused_update.triton_instructions import INSTRUCTIONS
from pallas_kernels.fused_update.triton_program import (
    Program,
    read_scalars,
    unless_skipped,
)

MAX_ELEMENTS_OF_SMALL_LEAF = 4 * 4096
"""A leaf without words and blocks that has more shares a kernel only with its equals.

Where leaves differ in size, each has as many programs as the largest.
"""

# Loads and stores of a kernel. The time to compile grows as their square: one with 240
# takes 4 seconds, and one with 480 takes 10.
_MAX_ACCESSES = 250

# Four elements per thread: 16 bytes of float32 or of words, which is what one
# instruction moves.
_FLAT_WIDTH, _FLAT_ROWS = 512, 4
# Of small leaves many are vectors of some hundred elements.
_SMALL_WIDTH = 1024
_FLAT_WARPS = 4

# Lanes of a program of a tiled kernel: one per thread of two warps. Twice as many would
# fill a multiprocessor's registers less well, and small leaves would have too few
# programs.
_LANES, _WARPS = 64, 2


def max_leaves(leaves: Sequence[Leaf]) -> int:
    """How many of these leaves a kernel should update at most."""
    rows = _common_tiling([Shard(leaf, leaf.shape) for leaf in leaves]).chunk_rows
    accesses = sum(
        1 if x.block_size else rows if x.bits is None else max(1, rows * x.bits // 32)
        for x in (*leaves[0].operands, *leaves[0].results)
    )
    return max(1, _MAX_ACCESSES // accesses)


def can_share(shards: Sequence[Shard]) -> bool:
    """Whether these leaves, or shards of leaves, can share a kernel.

    Their operands and results are of the same kinds.
    """
    tilings = [_tiling(shard) for shard in shards]
    (first, *_) = tilings
    if all(tiling.is_flat for tiling in tilings):
        return True
    # Each step of a loop would load and store by branches. Of values that come out of
    # branches Triton cannot compile layouts that blocks of two sizes need ("requires
    # the same encoding for all operands and results").
    is_simple = first.chunk_rows == first.lane_rows and len(first.block_sizes) < 2
    return is_simple and all(tiling == first for tiling in tilings)


def update(
    body: Body | BlockBody,
    shards: Sequence[Shard],
    table: jax.Array,
    rows: jax.Array | None = None,
    layer: jax.Array | None = None,
    *,
    when: int | None = None,
    interpret: bool = False,
) -> list[jax.Array]:
    """One kernel over a leaf, a shard of it, one layer of a stack, or many leaves.

    Args:
      body: see :data:`pallas_kernels.fused_update.Body`.
      shards: the arrays on this device, of leaves that :func:`can_share` a kernel.
      table: uint32, rows of scalars; or one row, for one leaf.
      rows: uint32 vector, each leaf's row of the table.
      layer: int32 vector of one element, which layer; for one leaf.
      when: as in :func:`pallas_kernels.fused_update`.
      interpret: run the kernel's operations with XLA, on any platform.

    Returns:
      One array per result, of one leaf after the other.
    """
    leaf = shards[0].leaf
    stacked = leaf.overwritten if leaf.stacked else frozenset[int]()
    arrays = [
        # A layer is indexed by itself: a stack may have more than 2^31 elements.
        x.reshape(x.shape[0], -1) if i in stacked else x.reshape(-1)
        for shard in shards
        for i, x in enumerate(shard.leaf.arrays)
    ]
    # What is not given is not replaced by a constant: XLA would launch a kernel of its
    # own to write it.
    place = [rows, _bases(shards), layer]
    sizes = tuple(math.prod(shard.shape) for shard in shards)
    statics = _Statics(
        body=body,
        tiling=_common_tiling(shards),
        sizes=None if len(set(sizes)) == 1 else sizes,
        leaves=len(shards),
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
    outputs = tuple(x for shard in shards for x in _outputs(shard))
    written = _call(statics, outputs)(*place, table.reshape(-1), *arrays)
    shapes = [shape for shard in shards for shape in _result_shapes(shard)]
    return [x.reshape(shape) for x, shape in zip(written, shapes, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Statics:
    """What a kernel is compiled for.

    Args:
      body, operands, results, when, interpret: as they are named.
      tiling: of every leaf; of the longest, where sizes are given.
      sizes: elements of each leaf, where they differ.
      leaves: how many there are.
      stacked: numbers of the operands that are stacks of layers.
      given: whether the kernel gets the table's rows, the shards' bases, and the layer.
      table_width: scalars in a row of the table.
      leaf_size: elements of the leaf, or of one layer, modulo 2^32.
    """

    body: Body | BlockBody
    tiling: Tiling
    sizes: tuple[int, ...] | None
    leaves: int
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
    reads, writes = len(statics.operands), len(statics.results)
    return pl.pallas_call(
        functools.partial(_kernel, statics),
        grid=(statics.leaves * tiling.programs,),
        out_shape=outputs,
        input_output_aliases={
            first + leaf * reads + r.overwrites: leaf * writes + i
            for leaf in range(statics.leaves)
            for i, r in enumerate(statics.results)
            if r.overwrites is not None
        },
        # Left out, they would choose another backend.
        compiler_params=triton.CompilerParams(
            num_warps=_FLAT_WARPS if tiling.is_flat else _WARPS,
            num_stages=1,
        ),
        interpret=statics.interpret,
        name="fused_update" if statics.leaves == 1 else "fused_update_many",
    )


def _kernel(statics: _Statics, *refs):
    refs, program, leaf = list(refs), pl.program_id(0), np.int32(0)
    if statics.leaves > 1:
        # Beside the program's number a Python int is an int64 with 64-bit types on.
        programs = jnp.int32(statics.tiling.programs)
        leaf, program = lax.div(program, programs), lax.rem(program, programs)
    row, base = (
        refs.pop(0)[leaf] if given else jnp.uint32(0) for given in statics.given[:2]
    )
    layer = refs.pop(0)[np.int32(0)] if statics.given[2] else jnp.int32(0)
    scalars = read_scalars(refs.pop(0), row, statics.table_width)
    base = base + layer.astype(jnp.uint32) * jnp.uint32(statics.leaf_size)
    size = None
    if statics.sizes is not None:
        size = jnp.int32(statics.sizes[0])
        for number, other in enumerate(statics.sizes[1:], 1):
            size = jnp.where(leaf == number, jnp.int32(other), size)
    work = Program(
        lanes=lanes_of(ByBlocks(statics.tiling), program, base, size),
        memory=_memory(statics, leaf, refs),
        layer=layer,
        stacked=statics.stacked,
        scalars=scalars,
        instructions=None if statics.interpret else INSTRUCTIONS,
    )

    @unless_skipped(scalars, statics.when)
    def _():
        work.update(statics.body, statics.operands, statics.results)


def _memory(statics: _Statics, leaf, refs: Sequence) -> Memory:
    """The arrays of a program's leaf, among those of all leaves."""
    reads, writes = len(statics.operands), len(statics.results)
    operands, results = refs[: statics.leaves * reads], refs[statics.leaves * reads :]
    leaves = [
        OneLeaf(
            operands[n * reads :][:reads],
            results[n * writes :][:writes],
            statics.interpret,
        )
        for n in range(statics.leaves)
    ]
    if statics.leaves == 1:
        return leaves[0]
    return OneOfMany(leaf, leaves, statics.interpret)


def _tiling(shard: Shard) -> Tiling:
    leaf = shard.leaf
    return Tiling(
        shard.shape,
        leaf.shape,
        leaf.packed,
        leaf.block_sizes,
        _FLAT_WIDTH,
        _FLAT_ROWS,
        _LANES,
    )


def _common_tiling(shards: Sequence[Shard]) -> Tiling:
    """The tiling of leaves that share a kernel: of the longest, where sizes differ."""
    tilings = [_tiling(shard) for shard in shards]
    first, longest = tilings[0], max(tiling.size for tiling in tilings)
    is_small = first.is_flat and longest <= MAX_ELEMENTS_OF_SMALL_LEAF
    if all(each == first for each in tilings) and not (is_small and len(shards) > 1):
        return first
    return Tiling((longest,), (longest,), (), (), _SMALL_WIDTH, 1, _LANES)


def _bases(shards: Sequence[Shard]) -> jax.Array | None:
    """The indices of the shards' first elements; None if all are 0."""
    bases = [shard.base for shard in shards]
    if all(base is None for base in bases):
        return None
    return jnp.stack([jnp.uint32(0) if base is None else base for base in bases])


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


def _outputs(shard: Shard) -> list[jax.ShapeDtypeStruct]:
    """What the kernel writes: flat arrays, or stacks of flat layers."""
    leaf = shard.leaf
    stacks = leaf.overwritten if leaf.stacked else ()
    return [
        jax.ShapeDtypeStruct(
            (shape[0], math.prod(shape[1:]))
            if r.overwrites in stacks
            else (math.prod(shape),),
            r.dtype,
            manual_axis_type=_manual_axes(r, leaf.operands),
        )
        for r, shape in zip(leaf.results, _result_shapes(shard), strict=True)
    ]


def _manual_axes(result: Result, operands: Sequence[Operand]):
    """How a result varies over the mesh of a ``jax.shard_map``: as what it replaces."""
    if result.overwrites is not None:
        return jax.typeof(operands[result.overwrites].array).manual_axis_type
    types = [jax.typeof(o.array).manual_axis_type for o in operands]
    return max(types, key=lambda each: len(each.varying))
