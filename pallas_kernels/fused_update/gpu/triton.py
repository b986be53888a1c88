"""The fused update as a Pallas kernel on the Triton backend.

What each program of the kernel does is in :mod:`.program`; how one finds its leaf among
several, in :mod:`.memory`.
"""

import functools
from collections.abc import Sequence

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.fused_update.gpu import launch
from pallas_kernels.fused_update.gpu.arrangement import ByBlocks
from pallas_kernels.fused_update.gpu.lanes import lanes_of
from pallas_kernels.fused_update.gpu.memory import Memory, OneOfMany
from pallas_kernels.fused_update.gpu.program import Program, unless_skipped
from pallas_kernels.fused_update.gpu.triton_memory import OneLeaf
from pallas_kernels.fused_update.sharded import Shard
from pallas_kernels.fused_update.spec import Leaf
from pallas_kernels.gpu.instructions import Instructions

# Loads and stores of a kernel. The time to compile grows as their square: one with 240
# takes 4 seconds, and one with 480 takes 10.
_MAX_ACCESSES = 250

_SIZES = launch.Sizes(
    # Four elements per thread: 16 bytes of float32 or of words, which is what one
    # instruction moves.
    flat_width=512,
    flat_rows=4,
    # Of small leaves many are vectors of some hundred elements.
    small_width=1024,
    # One per thread of two warps. Twice as many would fill a multiprocessor's registers
    # less well, and small leaves would have too few programs.
    lanes=64,
)
_FLAT_WARPS, _WARPS = 4, 2

INSTRUCTIONS = Instructions(triton.elementwise_inline_asm)


def max_leaves(leaves: Sequence[Leaf]) -> int:
    """How many of these leaves a kernel should update at most."""
    # Blocks of two sizes are loaded by branches of their own: LPMM's Adam takes 3
    # seconds to compile for one leaf, 6 for 3 and 14 for 6.
    has_two_sizes = len(leaves[0].block_sizes) > 1
    most = _MAX_ACCESSES // 2 if has_two_sizes else _MAX_ACCESSES
    return launch.max_leaves(_SIZES, leaves, most)


def can_share(shards: Sequence[Shard]) -> bool:
    """Whether these leaves, or shards of leaves, can share a kernel."""
    return launch.can_share(_SIZES, shards)


def update(call: launch.Call) -> list[jax.Array]:
    """The results of a call's kernel, of one leaf after the other."""
    kernel, args = launch.prepare(_SIZES, call)
    written = _call(kernel, launch.outputs(call.shards))(*args)
    return launch.shaped(written, call.shards)


@functools.lru_cache(maxsize=1024)
def _call(kernel: launch.Kernel, outputs: tuple[jax.ShapeDtypeStruct, ...]):
    """The kernel as a function of its arrays.

    It is the same function for equal leaves, and when the same leaf is traced again, as
    JAX's transformations do; JAX then does not trace the kernel again.
    """
    tiling, first = kernel.tiling, kernel.first_array
    reads, writes = len(kernel.operands), len(kernel.results)
    return pl.pallas_call(
        functools.partial(_program, kernel),
        grid=(kernel.leaves * tiling.programs,),
        out_shape=outputs,
        input_output_aliases={
            first + leaf * reads + r.overwrites: leaf * writes + i
            for leaf in range(kernel.leaves)
            for i, r in enumerate(kernel.results)
            if r.overwrites is not None
        },
        # Left out, they would choose another backend.
        compiler_params=triton.CompilerParams(
            num_warps=_FLAT_WARPS if tiling.is_flat else _WARPS, num_stages=1
        ),
        interpret=kernel.interpret,
        name=kernel.name,
    )


def _program(kernel: launch.Kernel, *refs):
    place = launch.place_of(kernel, pl.program_id(0), refs)
    arrangement = ByBlocks(kernel.tiling)
    work = Program(
        lanes=lanes_of(arrangement, place.program, place.base, place.size),
        memory=_memory(kernel, place.leaf, place.refs),
        layer=place.layer,
        stacked=kernel.stacked,
        scalars=place.scalars,
        instructions=None if kernel.interpret else INSTRUCTIONS,
    )

    @unless_skipped(place.scalars, kernel.when)
    def _():
        work.update(kernel.body, kernel.operands, kernel.results)


def _memory(kernel: launch.Kernel, leaf, refs: Sequence) -> Memory:
    """The arrays of a program's leaf, among those of all leaves."""
    reads, writes = len(kernel.operands), len(kernel.results)
    operands, results = refs[: kernel.leaves * reads], refs[kernel.leaves * reads :]
    leaves = [
        OneLeaf(
            operands[n * reads :][:reads],
            results[n * writes :][:writes],
            kernel.interpret,
        )
        for n in range(kernel.leaves)
    ]
    if kernel.leaves == 1:
        return leaves[0]
    return OneOfMany(leaf, leaves, None if kernel.interpret else INSTRUCTIONS.opaque)
