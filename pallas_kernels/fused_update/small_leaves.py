"""One kernel over many small leaves of which nothing is packed.

A launch costs some microseconds, as much as a small leaf's update itself many times
over. Here the programs are dealt out to the leaves; what a program does first is to
find its leaf's arrays, and the body runs on whatever it loaded.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as backend

from pallas_kernels.fused_update import triton
from pallas_kernels.fused_update.sharded import Shard
from pallas_kernels.fused_update.spec import Body

LARGEST = 4 * 4096
"""Leaves with more elements than this are worth a kernel of their own."""

# 25 leaves of AdamW's nine arrays. What compiles in a second then takes four with twice
# as many; the hardware's limit is 500, 4 KiB of pointers.
_MOST_ARRAYS = 225
_WIDTH = 1024


def most_leaves(arrays: int) -> int:
    """How many leaves of so many operands and results fit into one launch."""
    return max(1, _MOST_ARRAYS // arrays)


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
      shards: whole leaves, or shards that are one piece of their whole.
      table: uint32, rows of scalars.
      rows: uint32 vector, each leaf's row of the table.
      when: as in :func:`pallas_kernels.fused_update`.
      interpret: run the kernel's operations with XLA, on any platform.

    Returns:
      The leaves' results, one leaf after the other.
    """
    first = shards[0].leaf
    sizes = tuple(int(np.prod(shard.shape)) for shard in shards)
    blocks = max(-(-size // _WIDTH) for size in sizes)
    arrays = [x.reshape(-1) for shard in shards for x in shard.leaf.arrays]
    per_leaf = len(first.operands)
    bases = [shard.base for shard in shards]
    shared = [rows, table.reshape(-1)]
    if any(base is not None for base in bases):
        bases = [jnp.uint32(0) if base is None else base for base in bases]
        shared.append(jnp.stack(bases))
    outputs = [
        jax.ShapeDtypeStruct(
            (size,),
            result.dtype,
            manual_axis_type=triton.manual_axes(result, shard.leaf.operands),
        )
        for size, shard in zip(sizes, shards, strict=True)
        for result in first.results
    ]
    aliases = {
        len(shared) + leaf * per_leaf + result.overwrites: leaf * len(first.results) + i
        for leaf in range(len(shards))
        for i, result in enumerate(first.results)
        if result.overwrites is not None
    }
    written = pl.pallas_call(
        functools.partial(
            _kernel,
            body,
            sizes,
            blocks,
            (per_leaf, len(first.results)),
            table.shape[-1],
            len(shared),
            when,
            interpret,
        ),
        grid=(len(shards) * blocks,),
        out_shape=outputs,
        input_output_aliases=aliases,
        compiler_params=backend.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="fused_update_many",
    )(*shared, *arrays)
    shapes = [shard.shape for shard in shards for _ in first.results]
    return [x.reshape(shape) for x, shape in zip(written, shapes, strict=True)]


def _kernel(body, sizes, blocks, counts, width, shared, when, interpret, *refs):
    rows, table, *bases = refs[:shared]
    refs = refs[shared:]
    reads, writes = refs[: counts[0] * len(sizes)], refs[counts[0] * len(sizes) :]
    program = pl.program_id(0)
    # A Python int would be an int64 beside the program's number with 64-bit types on.
    leaf = lax.div(program, jnp.int32(blocks))
    block = lax.rem(program, jnp.int32(blocks))
    offset = block * jnp.int32(_WIDTH) + lax.iota(jnp.int32, _WIDTH)
    size = jnp.int32(sizes[0])
    for number, other in enumerate(sizes[1:], 1):
        size = jnp.where(leaf == number, jnp.int32(other), size)
    exists = offset < size

    def load(number: int):
        own = reads[number * counts[0] : (number + 1) * counts[0]]
        return tuple(backend.load(ref.at[offset], mask=exists) for ref in own)

    def store(number: int, *values):
        own = writes[number * counts[1] : (number + 1) * counts[1]]
        for ref, value in zip(own, values, strict=True):
            backend.store(ref.at[offset], value, mask=exists)

    scalars = triton.read_scalars(table, rows[leaf], width)

    @triton.unless_skipped(scalars, when)
    def _():
        values = _for_leaf(leaf, range(len(sizes)), load)
        index = offset.astype(jnp.uint32)
        if bases:
            index = index + bases[0][leaf]
        run = triton.with_instructions(body, interpret)
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
