"""One kernel over many small leaves of which nothing is packed.

A launch takes some microseconds, many times as long as the update of a small leaf. Here
each leaf gets some of one kernel's programs. A program first finds its leaf's arrays;
the body then runs on what was loaded.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as backend

from pallas_kernels.fused_update import triton
from pallas_kernels.fused_update.sharded import Shard
from pallas_kernels.fused_update.spec import Body
from pallas_kernels.fused_update.triton_program import (
    read_scalars,
    unless_skipped,
    with_instructions,
)

MAX_ELEMENTS_OF_SMALL_LEAF = 4 * 4096
"""A leaf with more elements is worth a kernel of its own."""

# 25 leaves of AdamW's nine arrays. They compile in a second, and twice as many in four.
# The hardware's limit is about 500: 4 KiB of pointers.
_MAX_ARRAYS = 225
_WIDTH = 1024


def max_leaves(arrays: int) -> int:
    """How many leaves fit into one launch, by the operands and results of each."""
    return max(1, _MAX_ARRAYS // arrays)


def update(
    body: Body,
    shards: Sequence[Shard],
    table: jax.Array,
    rows: jax.Array,
    *,
    when: int | None = None,
    interpret: bool = False,
) -> list[jax.Array]:
    """One kernel over leaves with the same kinds of operands and results.

    Args:
      body: see :data:`pallas_kernels.fused_update.Body`.
      shards: leaves, or shards that are consecutive in their leaf.
      table: uint32, rows of scalars.
      rows: uint32 vector, each leaf's row of the table.
      when: as in :func:`pallas_kernels.fused_update`.
      interpret: run the kernel's operations with XLA, on any platform.

    Returns:
      The leaves' results, one leaf after the other.
    """
    leaf = shards[0].leaf
    sizes = tuple(math.prod(shard.shape) for shard in shards)
    arrays = [x.reshape(-1) for shard in shards for x in shard.leaf.arrays]
    shared = [rows, table.reshape(-1)]
    bases = [shard.base for shard in shards]
    if any(base is not None for base in bases):
        bases = [jnp.uint32(0) if base is None else base for base in bases]
        shared.append(jnp.stack(bases))
    statics = _Statics(
        body=body,
        sizes=sizes,
        blocks=max(-(-size // _WIDTH) for size in sizes),
        operands=len(leaf.operands),
        results=len(leaf.results),
        table_width=table.shape[-1],
        shared=len(shared),
        when=when,
        interpret=interpret,
    )
    outputs = [
        jax.ShapeDtypeStruct(
            (size,),
            result.dtype,
            manual_axis_type=triton.manual_axes(result, shard.leaf.operands),
        )
        for size, shard in zip(sizes, shards, strict=True)
        for result in leaf.results
    ]
    overwrites = tuple(result.overwrites for result in leaf.results)
    written = _call(statics, tuple(outputs), overwrites)(*shared, *arrays)
    shapes = [shard.shape for shard in shards for _ in leaf.results]
    return [x.reshape(shape) for x, shape in zip(written, shapes, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Statics:
    """What a kernel is compiled for.

    Args:
      body, when, interpret: as in :func:`update`.
      sizes: elements of each leaf.
      blocks: programs for each leaf.
      operands, results: how many each leaf has.
      table_width: scalars in a row of the table.
      shared: how many arrays come before the leaves' own.
    """

    body: Body
    sizes: tuple[int, ...]
    blocks: int
    operands: int
    results: int
    table_width: int
    shared: int
    when: int | None
    interpret: bool


@functools.lru_cache(maxsize=1024)
def _call(statics: _Statics, outputs, overwrites: tuple[int | None, ...]):
    """The kernel as a function of its arrays: one function, which JAX traces once."""
    return pl.pallas_call(
        functools.partial(_kernel, statics),
        grid=(len(statics.sizes) * statics.blocks,),
        out_shape=outputs,
        input_output_aliases={
            statics.shared + n * statics.operands + number: n * statics.results + i
            for n in range(len(statics.sizes))
            for i, number in enumerate(overwrites)
            if number is not None
        },
        compiler_params=backend.CompilerParams(num_warps=4, num_stages=1),
        interpret=statics.interpret,
        name="fused_update_many",
    )


def _kernel(statics: _Statics, *refs):
    rows, table, *bases = refs[: statics.shared]
    refs = refs[statics.shared :]
    sizes = statics.sizes
    reads = refs[: statics.operands * len(sizes)]
    writes = refs[statics.operands * len(sizes) :]
    program = pl.program_id(0)
    # Beside the program's number a Python int is an int64 with 64-bit types on.
    leaf = lax.div(program, jnp.int32(statics.blocks))
    block = lax.rem(program, jnp.int32(statics.blocks))
    offset = block * jnp.int32(_WIDTH) + lax.iota(jnp.int32, _WIDTH)
    size = jnp.int32(sizes[0])
    for number, other in enumerate(sizes[1:], 1):
        size = jnp.where(leaf == number, jnp.int32(other), size)
    exists = offset < size

    def load(number: int):
        own = reads[number * statics.operands : (number + 1) * statics.operands]
        return tuple(backend.load(ref.at[offset], mask=exists) for ref in own)

    def store(number: int, *values):
        own = writes[number * statics.results : (number + 1) * statics.results]
        for ref, value in zip(own, values, strict=True):
            backend.store(ref.at[offset], value, mask=exists)

    scalars = read_scalars(table, rows[leaf], statics.table_width)

    @unless_skipped(scalars, statics.when)
    def _():
        values = _for_leaf(leaf, range(len(sizes)), load)
        index = offset.astype(jnp.uint32)
        if bases:
            index = index + bases[0][leaf]
        run = with_instructions(statics.body, statics.interpret)
        new = run(list(values), scalars, index)
        _for_leaf(leaf, range(len(sizes)), store, *new)


def _for_leaf(leaf: jax.Array, numbers: range, fn, *args):
    """``fn(leaf, *args)`` with a static leaf, by a tree of branches.

    A ``lax.switch`` becomes a chain of branches on this backend, which takes several
    times as long to compile.
    """
    if len(numbers) == 1:
        return fn(numbers[0], *args)
    half = len(numbers) // 2
    left = functools.partial(_for_leaf, leaf, numbers[:half], fn)
    right = functools.partial(_for_leaf, leaf, numbers[half:], fn)
    return lax.cond(leaf < numbers[half], left, right, *args)
