"""What launchers for GPUs have in common: a kernel's description and its work.

A launcher is a module with ``update``, such as :mod:`.triton`. It says how large its
programs are, calls the kernel, and gives each program its arrays. The rest is here and
in :mod:`.program`.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.fused_update.gpu.tiling import Tiling
from pallas_kernels.fused_update.launchers import Call, manual_axes, result_shapes
from pallas_kernels.fused_update.sharded import Shard
from pallas_kernels.fused_update.spec import (
    MAX_ELEMENTS_OF_SMALL_LEAF,
    BlockBody,
    Body,
    Leaf,
    Operand,
    Result,
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large a launcher's programs are.

    Args:
      flat_width, flat_rows: lanes and rows of those of flat tilings.
      small_width: lanes where leaves differ in size; there is one row.
      lanes: of the others.
    """

    flat_width: int
    flat_rows: int
    small_width: int
    lanes: int

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


def max_leaves(sizes: Sizes, leaves: Sequence[Leaf], most: int) -> int:
    """How many of these leaves a kernel updates, with so many loads and stores."""
    rows = sizes.common_tiling([Shard(leaf, leaf.shape) for leaf in leaves]).chunk_rows
    accesses = sum(
        1 if x.block_size else rows if x.bits is None else max(1, rows * x.bits // 32)
        for x in (*leaves[0].operands, *leaves[0].results)
    )
    return max(1, most // accesses)


def can_share(sizes: Sizes, shards: Sequence[Shard]) -> bool:
    """Whether a kernel could find its leaf among these, or among shards of leaves.

    Their operands and results are of the same kinds.
    """
    tilings = [sizes.tiling(shard) for shard in shards]
    (first, *_) = tilings
    if all(tiling.is_flat for tiling in tilings):
        return True
    # Each step of a loop would load and store by branches.
    is_simple = first.chunk_rows == first.lane_rows
    return is_simple and all(tiling == first for tiling in tilings)


def prepare(sizes: Sizes, call: Call) -> tuple[Kernel, list[jax.Array]]:
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
    place = [call.rows, _bases(shards), call.layer]
    elements = tuple(math.prod(shard.shape) for shard in shards)
    kernel = Kernel(
        body=call.body,
        tiling=sizes.common_tiling(shards),
        sizes=None if len(set(elements)) == 1 else elements,
        leaves=len(shards),
        operands=tuple(dataclasses.replace(o, array=None) for o in leaf.operands),
        results=leaf.results,
        stacked=stacked,
        given=tuple(x is not None for x in place),
        table_width=call.table.shape[-1],
        leaf_size=math.prod(leaf.shape) % 2**32,
        when=call.when,
        interpret=call.interpret,
    )
    place = [x for x in place if x is not None]
    return kernel, [*place, call.table.reshape(-1), *arrays]


def outputs(shards: Sequence[Shard]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What a kernel writes: flat arrays, or stacks of flat layers."""
    return tuple(x for shard in shards for x in _outputs(shard))


def shaped(written: Sequence[jax.Array], shards: Sequence[Shard]) -> list[jax.Array]:
    """The same with the shapes that arrays of the leaves have."""
    shapes = [shape for shard in shards for shape in result_shapes(shard)]
    return [
        x if x.shape == shape else x.reshape(shape)
        for x, shape in zip(written, shapes, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Place:
    """Which leaf a program updates, and where in it.

    Args:
      program: int32 scalar, its number among the leaf's programs.
      leaf: int32 scalar, which of the kernel's.
      base: uint32 scalar, the index of its first element.
      size: int32 scalar, its elements; None if the tiling has as many.
      layer: int32 scalar, of the stacks.
      scalars: the body's.
      refs: the references that are left, to arrays of the leaves.
    """

    program: jax.Array
    leaf: jax.Array | np.int32
    base: jax.Array
    size: jax.Array | None
    layer: jax.Array
    scalars: list[jax.Array]
    refs: list


def place_of(kernel: Kernel, program: jax.Array, refs: Sequence) -> Place:
    """Where a program is.

    Args:
      kernel: which it is of.
      program: int32 scalar, its number among all programs.
      refs: to the kernel's arguments, and its results.
    """
    refs, leaf = list(refs), np.int32(0)
    if kernel.leaves > 1:
        # Beside the program's number a Python int is an int64 with 64-bit types on.
        programs = np.int32(kernel.tiling.programs)
        leaf, program = lax.div(program, programs), lax.rem(program, programs)
    row, base = (
        refs.pop(0)[leaf] if given else jnp.uint32(0) for given in kernel.given[:2]
    )
    layer = refs.pop(0)[np.int32(0)] if kernel.given[2] else jnp.int32(0)
    # Before any store, which might alias it.
    scalars = _scalars(refs.pop(0), row, kernel.table_width)
    base = base + layer.astype(jnp.uint32) * np.uint32(kernel.leaf_size)
    size = None
    if kernel.sizes is not None:
        size = jnp.int32(kernel.sizes[0])
        for number, (before, other) in enumerate(itertools.pairwise(kernel.sizes), 1):
            if before != other:
                size = jnp.where(leaf >= number, jnp.int32(other), size)
    return Place(program, leaf, base, size, layer, scalars, refs)


def _scalars(table, row: jax.Array, width: int) -> list[jax.Array]:
    """A row of the table."""
    first = row.astype(jnp.int32) * np.int32(width)
    return [table[first + np.int32(i)] for i in range(width)]


def _flat(x: jax.Array) -> jax.Array:
    return x if x.ndim == 1 else x.reshape(-1)


def _bases(shards: Sequence[Shard]) -> jax.Array | None:
    """The indices of the shards' first elements; None if all are 0."""
    bases = [shard.base for shard in shards]
    if all(base is None for base in bases):
        return None
    return jnp.stack([jnp.uint32(0) if base is None else base for base in bases])


def _outputs(shard: Shard) -> list[jax.ShapeDtypeStruct]:
    leaf = shard.leaf
    stacks = leaf.overwritten if leaf.stacked else ()
    return [
        jax.ShapeDtypeStruct(
            (shape[0], math.prod(shape[1:]))
            if r.overwrites in stacks
            else (math.prod(shape),),
            r.dtype,
            manual_axis_type=manual_axes(r, leaf.operands),
        )
        for r, shape in zip(leaf.results, result_shapes(shard), strict=True)
    ]
