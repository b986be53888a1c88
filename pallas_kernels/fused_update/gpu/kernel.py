"""A kernel for GPUs: what it is compiled for, its arguments, and its results.

A launcher is a module with ``update``, such as :mod:`.triton`. It says how large its
programs are, and calls the kernel. What a program does is in :mod:`.program`.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.fused_update.gpu.tiling import Tiling
from pallas_kernels.fused_update.spec import (
    MAX_ELEMENTS_OF_SMALL_LEAF,
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

# Loads and stores of a kernel. The time to compile grows as their square: one of
# Triton's with 240 takes 4 seconds, and one with 480 takes 10.
_MAX_ACCESSES = 250


@dataclasses.dataclass(frozen=True)
class ProgramSize:
    """How large a launcher's programs are.

    Args:
      flat_width, flat_rows: lanes and rows of those of flat tilings.
      small_width: lanes where leaves differ in size; there is one row.
      lanes: of the others.
      cost_of_two: how many times as long a load or a store takes to compile where
        blocks are of two sizes.
    """

    flat_width: int
    flat_rows: int
    small_width: int
    lanes: int
    cost_of_two: int = 1

    def tiling(self, shard: Shard) -> Tiling:
        """The tiling of a leaf's part."""
        leaf = shard.leaf
        return Tiling(
            shard.shape,
            leaf.shape,
            leaf.packed,
            leaf.block_sizes,
            self.flat_width,
            self.flat_rows,
            self.lanes,
        )

    def common_tiling(self, shards: Sequence[Shard]) -> Tiling:
        """The tiling of leaves that share a kernel; of the longest if sizes differ."""
        tilings = [self.tiling(shard) for shard in shards]
        first, longest = tilings[0], max(tiling.size for tiling in tilings)
        is_small = first.is_flat and longest <= MAX_ELEMENTS_OF_SMALL_LEAF
        if all(each == first for each in tilings) and not (
            is_small and len(shards) > 1
        ):
            return first
        whole = (longest,)
        return Tiling(whole, whole, (), (), self.small_width, 1, self.lanes)

    def max_leaves(self, leaves: Sequence[Leaf]) -> int:
        """How many of these leaves a kernel should update at most."""
        shards = [Shard(leaf, leaf.shape) for leaf in leaves]
        rows = self.common_tiling(shards).chunk_rows
        accesses = sum(
            1
            if x.block_size
            else rows
            if x.bits is None
            else max(1, rows * x.bits // 32)
            for x in (*leaves[0].operands, *leaves[0].results)
        )
        has_two_sizes = len(leaves[0].block_sizes) > 1
        cost = self.cost_of_two if has_two_sizes else 1
        return max(1, _MAX_ACCESSES // (cost * accesses))

    def can_share(self, shards: Sequence[Shard]) -> bool:
        """Whether these leaves, or shards of leaves, can share a kernel.

        Their operands and results are of the same kinds.
        """
        tilings = [self.tiling(shard) for shard in shards]
        (first, *_) = tilings
        if len(shards) == 1 or all(tiling.is_flat for tiling in tilings):
            return True
        # Each step of a loop would load and store by branches.
        is_simple = first.chunk_rows == first.lane_rows
        return is_simple and all(tiling == first for tiling in tilings)


@dataclasses.dataclass(frozen=True)
class Kernel:
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

    @property
    def first_array(self) -> int:
        """How many arguments are before the leaves' arrays."""
        return 1 + sum(self.given)

    @property
    def name(self) -> str:
        """As profilers show it."""
        return "fused_update" if self.leaves == 1 else "fused_update_many"

    @property
    def aliases(self) -> dict[int, int]:
        """Which argument each result overwrites, by their numbers."""
        reads, writes = len(self.operands), len(self.results)
        return {
            leaf * writes + i: self.first_array + leaf * reads + r.overwrites
            for leaf in range(self.leaves)
            for i, r in enumerate(self.results)
            if r.overwrites is not None
        }


def prepare(size: ProgramSize, call: Call) -> tuple[Kernel, list[jax.Array]]:
    """The kernel of a call, and its arguments.

    They are all arrays of each leaf, after what all leaves share.
    """
    shards, leaf = call.shards, call.shards[0].leaf
    stacked = leaf.overwritten if leaf.stacked else frozenset[int]()
    arrays = [
        # A layer is indexed by itself: a stack may have more than 2^31 elements.
        x.reshape(x.shape[0], -1) if i in stacked else _flat(x)
        for shard in shards
        for i, x in enumerate(shard.leaf.arrays)
    ]
    # What is not given is not replaced by a constant: XLA would launch a kernel of its
    # own to write it.
    given = [call.rows, _bases(shards), call.layer]
    elements = tuple(math.prod(shard.shape) for shard in shards)
    kernel = Kernel(
        body=call.body,
        tiling=size.common_tiling(shards),
        sizes=None if len(set(elements)) == 1 else elements,
        leaves=len(shards),
        operands=tuple(dataclasses.replace(o, array=None) for o in leaf.operands),
        results=leaf.results,
        stacked=stacked,
        given=tuple(x is not None for x in given),
        table_width=call.table.shape[-1],
        leaf_size=math.prod(leaf.shape) % 2**32,
        when=call.when,
        interpret=call.interpret,
    )
    given = [x for x in given if x is not None]
    return kernel, [*given, call.table.reshape(-1), *arrays]


def outputs(shards: Sequence[Shard]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What a kernel writes: flat arrays, or stacks of flat layers."""
    return tuple(
        jax.ShapeDtypeStruct(
            (shape[0], math.prod(shape[1:]))
            if shard.leaf.stacked and r.overwrites is not None
            else (math.prod(shape),),
            r.dtype,
            manual_axis_type=manual_axes(r, shard.leaf.operands),
        )
        for shard in shards
        for r, shape in zip(shard.leaf.results, result_shapes(shard), strict=True)
    )


def shaped(written: Sequence[jax.Array], shards: Sequence[Shard]) -> list[jax.Array]:
    """The same with the shapes that arrays of the leaves have."""
    shapes = [shape for shard in shards for shape in result_shapes(shard)]
    return [
        x if x.shape == shape else x.reshape(shape)
        for x, shape in zip(written, shapes, strict=True)
    ]


def _flat(x: jax.Array) -> jax.Array:
    return x if x.ndim == 1 else x.reshape(-1)


def _bases(shards: Sequence[Shard]) -> jax.Array | None:
    """The indices of the shards' first elements; None if all are 0."""
    bases = [shard.base for shard in shards]
    if all(base is None for base in bases):
        return None
    return jnp.stack([jnp.uint32(0) if base is None else base for base in bases])
