"""The arguments and results of a GPU kernel, and the terms that describe its work.

A kernel runs as *programs*, the instances of Pallas's grid. A program is a block of
threads with Triton, and a warpgroup with Mosaic GPU. A program's arrays have one
element per *lane*. Each lane processes several *rows*, one element per row. A *chunk*
is a group of rows that the kernel's code unrolls; if a program has several chunks, it
loops over them. There are two tilings:

- *Flat*, for leaves without packed fields and blocks: the lanes of a row are
  consecutive in memory.
- *By blocks*: a thread has 4 lanes, which are neighboring columns, and processes 8
  rows, or 16 or 32 if the bit offsets of fields repeat only then. It therefore has all
  words of its fields, at static bit offsets. It also has whole tiles of
  :mod:`pallas_kernels.layout`, so it can compute their maxima without other threads. It
  loads and stores 4 elements at once if the number of columns is a multiple of 4. The
  tiles of a block are in Z-order, so every smaller block is a run of tiles, and a leaf
  may have blocks of several sizes.

Offsets into arrays are int32, so an array must have fewer than 2^31 elements. The
*index* of an element is its row-major position in the leaf, modulo 2^32. In a shard, it
is the index of the shard's first element plus a distance computed with the leaf's
strides.
"""

import dataclasses
import itertools
import math
import typing
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.fused_update.gpu.numbers import Table
from pallas_kernels.fused_update.gpu.sharing import Sharing
from pallas_kernels.fused_update.gpu.tiling import Tiling
from pallas_kernels.fused_update.spec import (
    BlockBody,
    Body,
    Call,
    Leaf,
    Shard,
    manual_axes,
    result_shapes,
)

# Surplus programs return immediately. At most an eighth of the programs are surplus.
_STEPS_OF_A_DOUBLING = 8


class Shared(typing.NamedTuple):
    """The first arguments of a kernel, in order. All leaves of the kernel share them.

    Each field is an array, a reference to one, or None if the kernel does not need it.
    To pass a constant array instead of None, XLA would have to launch another kernel.

    Args:
      rows: for each leaf, the index of its row in the table of scalars.
      bases: the indices of the shards' first elements.
      layer: the index of the layer in stacks, an int32 vector with one element.
      numbers: the table of the leaves' sizes and strides; see :mod:`.numbers`.
      table: the table of scalars, as a vector.
    """

    rows: typing.Any
    bases: typing.Any
    layer: typing.Any
    numbers: typing.Any
    table: typing.Any


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The static properties for which a kernel is compiled.

    Args:
      body, interpret: see :class:`.spec.Call`.
      when: see :class:`.spec.Scalars`.
      leaf: the first leaf, without arrays; all leaves have the same kinds of operands
        and results.
      tiling: the tiling of all leaves, or of the first leaf if ``numbers`` is not None.
      numbers: the table of the leaves' sizes and strides; None if they are constants.
      programs: the number of programs.
      leaves: the number of leaves.
      shared: the tree structure of :class:`Shared`, which omits fields that are None.
      table_width: the number of scalars in a row of the table.
    """

    body: Body | BlockBody
    leaf: Leaf
    tiling: Tiling
    numbers: Table | None
    programs: int
    leaves: int
    shared: typing.Any
    table_width: int
    when: int | None
    interpret: bool

    @property
    def first_array(self) -> int:
        """The number of arguments before the leaves' arrays."""
        return self.shared.num_leaves

    @property
    def arguments(self) -> int:
        return self.first_array + self.leaves * len(self.leaf.operands)

    @property
    def results(self) -> int:
        return self.leaves * len(self.leaf.results)

    @property
    def name(self) -> str:
        """The kernel's name in profilers."""
        return "fused_update" if self.leaves == 1 else "fused_update_many"

    @property
    def aliases(self) -> dict[int, int]:
        """Maps the index of a result to the index of the argument it overwrites."""
        reads, writes = len(self.leaf.operands), len(self.leaf.results)
        return {
            leaf * writes + i: self.first_array + leaf * reads + r.overwrites
            for leaf in range(self.leaves)
            for i, r in enumerate(self.leaf.results)
            if r.overwrites is not None
        }

    def named(self, refs: Iterable) -> tuple[Shared, list[list], list[list]]:
        """Return ``(shared, operands, results)``, the last two with a list per leaf.

        Args:
          refs: references to all arguments and then to all results, in order.
        """
        refs, leaves = iter(refs), range(self.leaves)
        take = lambda count: list(itertools.islice(refs, count))
        shared = jax.tree.unflatten(self.shared, take(self.first_array))
        operands = [take(len(self.leaf.operands)) for _ in leaves]
        return shared, operands, [take(len(self.leaf.results)) for _ in leaves]


def prepare(
    size: Sharing, call: Call
) -> tuple[Kernel, tuple[jax.ShapeDtypeStruct, ...], list[jax.Array]]:
    """Return the kernel of a call, the shapes of its results, and its arguments.

    The arguments are the shared arguments, followed by all arrays of each leaf. Arrays
    are flat; stacks consist of flat layers.
    """
    shards, leaf, scalars = call.shards, call.shards[0].leaf, call.scalars
    tilings = size.common_tilings(shards)
    numbers, words, programs = _table(tilings, call.room)
    table = scalars.table.reshape(-1)
    shared, structure = jax.tree.flatten(
        Shared(scalars.rows, _bases(shards), call.layer, words, table)
    )
    kernel = Kernel(
        body=call.body,
        leaf=leaf.with_arrays([None] * len(leaf.operands)),
        tiling=tilings[0],
        numbers=numbers,
        programs=programs,
        leaves=len(shards),
        shared=structure,
        table_width=scalars.table.shape[-1],
        when=scalars.when,
        interpret=call.interpret,
    )
    arrays = [
        # Keep the axis of layers, because a stack may have more than 2^31 elements.
        x.reshape((x.shape[0], -1) if i in leaf.in_stacks else -1)
        for shard in shards
        for i, x in enumerate(shard.leaf.arrays)
    ]
    written = tuple(
        jax.ShapeDtypeStruct(
            (shape[0], math.prod(shape[1:]))
            if r.overwrites in leaf.in_stacks
            else (math.prod(shape),),
            r.dtype,
            manual_axis_type=manual_axes(r, shard.leaf.operands),
        )
        for shard in shards
        for r, shape in zip(leaf.results, result_shapes(shard), strict=True)
    )
    return kernel, written, [*shared, *arrays]


def _bases(shards: Sequence[Shard]) -> jax.Array | None:
    """Return the indices of the shards' first elements, or None if all are 0."""
    bases = [shard.base for shard in shards]
    if all(base is None for base in bases):
        return None
    return jnp.stack([jnp.uint32(0) if base is None else base for base in bases])


def _table(
    tilings: Sequence[Tiling], room: tuple[int, int]
) -> tuple[Table | None, jax.Array | None, int]:
    """Return ``(table, words, programs)``; the first two are None if not needed."""
    first, programs = tilings[0], [tiling.programs for tiling in tilings]
    is_many_small = first.is_small and len(tilings) > 1
    if all(tiling == first for tiling in tilings) and not is_many_small:
        return None, None, sum(programs)
    numbers = [tiling.numbers(are_equal=False) for tiling in tilings]
    words = Table.words(numbers, programs)
    return Table.of(numbers), words, _rounded(-(-sum(programs) * room[1] // room[0]))


def _rounded(programs: int) -> int:
    """Round the number of programs up to one of eight values per doubling.

    XLA compiles kernels once if they have the same text and number of programs.
    """
    unit = 2 ** max(0, programs.bit_length() - _STEPS_OF_A_DOUBLING.bit_length())
    return math.ceil(programs / unit) * unit
