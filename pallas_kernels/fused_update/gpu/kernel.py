"""A kernel for GPUs: how it walks over leaves, its arguments, and its results.

A launcher is a module with ``update``, such as :mod:`.triton`. It says how large its
programs are, and calls the kernel. What a program does is in :mod:`.program`.

A program has lanes side by side, and rows of them one after the other. There are two
tilings:

- *Flat*, for leaves in which nothing is packed: a row is consecutive in memory, and
  each element of it is a lane.
- *By blocks*: a lane is 4 neighbouring columns, and goes down 8 rows (16 or 32 where
  fields repeat only after so many). So a thread has all words of its fields, bit
  offsets are static, and it has whole tiles of :mod:`pallas_kernels.layout`, whose
  maxima need no other thread. Its loads and stores are 4 elements wide where the number
  of columns is a multiple of 4. The tiles of a block are in Z-order: every smaller
  block is then a run of them, so leaves may have blocks of several sizes.

Offsets into arrays are int32, so an array has fewer than 2^31 elements. The *index* of
an element is its row-major place in the leaf, modulo 2^32. For a shard it is counted by
the leaf's strides from the index of the shard's first element.
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

# Programs beyond the leaves' end at once; a kernel has at most an eighth of such.
_STEPS_OF_A_DOUBLING = 8


class Shared(typing.NamedTuple):
    """A kernel's first arguments, which all its leaves share, in their order.

    Each field is an array, or a reference to one. If it is None, the kernel does not
    get the argument. A constant array instead of None would make XLA launch a kernel to
    write it.

    Args:
      rows: each leaf's row of the table of scalars.
      bases: the indices of the shards' first elements.
      layer: the layer of the stacks, an int32 vector of one element.
      numbers: the table of the leaves' numbers, see :mod:`.numbers`.
      table: the table of scalars, as a vector.
    """

    rows: typing.Any
    bases: typing.Any
    layer: typing.Any
    numbers: typing.Any
    table: typing.Any


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a kernel is compiled for.

    Args:
      body, when, interpret: as of :class:`.spec.Call`.
      leaf: the first, without arrays; all have the same kinds of operands and results.
      tiling: of every leaf; of the first, where there is a table of numbers.
      numbers: the table, if leaves differ in them.
      programs: how many it has.
      leaves: how many there are.
      shared: the structure of :class:`Shared`, which says what of it the kernel gets.
      table_width: scalars in a row of the table.
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
        """How many arguments are before the leaves' arrays."""
        return self.shared.num_leaves

    @property
    def arguments(self) -> int:
        """How many arguments it has."""
        return self.first_array + self.leaves * len(self.leaf.operands)

    @property
    def results(self) -> int:
        """How many results it has."""
        return self.leaves * len(self.leaf.results)

    @property
    def name(self) -> str:
        """As profilers show it."""
        return "fused_update" if self.leaves == 1 else "fused_update_many"

    @property
    def aliases(self) -> dict[int, int]:
        """Which argument each result overwrites, by their numbers."""
        reads, writes = len(self.leaf.operands), len(self.leaf.results)
        return {
            leaf * writes + i: self.first_array + leaf * reads + r.overwrites
            for leaf in range(self.leaves)
            for i, r in enumerate(self.leaf.results)
            if r.overwrites is not None
        }

    def named(self, refs: Iterable) -> tuple[Shared, list[list], list[list]]:
        """References to the shared arguments, and to each leaf's operands and results.

        Args:
          refs: to all arguments and all results, in their order.
        """
        refs, leaves = iter(refs), range(self.leaves)
        take = lambda count: list(itertools.islice(refs, count))
        shared = jax.tree.unflatten(self.shared, take(self.first_array))
        operands = [take(len(self.leaf.operands)) for _ in leaves]
        return shared, operands, [take(len(self.leaf.results)) for _ in leaves]


def prepare(
    size: Sharing, call: Call
) -> tuple[Kernel, tuple[jax.ShapeDtypeStruct, ...], list[jax.Array]]:
    """The kernel of a call, what it writes, and its arguments.

    The arguments are what all leaves share, and then all arrays of each leaf. Arrays
    are flat; stacks are of flat layers.
    """
    shards, leaf = call.shards, call.shards[0].leaf
    tilings = size.common_tilings(shards)
    numbers, words, programs = _table(tilings, call.room)
    table = call.table.reshape(-1)
    shared, structure = jax.tree.flatten(
        Shared(call.rows, _bases(shards), call.layer, words, table)
    )
    kernel = Kernel(
        body=call.body,
        leaf=leaf.with_arrays([None] * len(leaf.operands)),
        tiling=tilings[0],
        numbers=numbers,
        programs=programs,
        leaves=len(shards),
        shared=structure,
        table_width=call.table.shape[-1],
        when=call.when,
        interpret=call.interpret,
    )
    arrays = [
        # A layer is indexed by itself: a stack may have more than 2^31 elements.
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


def shaped(written: Sequence[jax.Array], shards: Sequence[Shard]) -> list[jax.Array]:
    """The same with the shapes that arrays of the leaves have."""
    shapes = [shape for shard in shards for shape in result_shapes(shard)]
    return [x.reshape(shape) for x, shape in zip(written, shapes, strict=True)]


def _bases(shards: Sequence[Shard]) -> jax.Array | None:
    """The indices of the shards' first elements; None if all are 0."""
    bases = [shard.base for shard in shards]
    if all(base is None for base in bases):
        return None
    return jnp.stack([jnp.uint32(0) if base is None else base for base in bases])


def _table(
    tilings: Sequence[Tiling], room: tuple[int, int]
) -> tuple[Table | None, jax.Array | None, int]:
    """``(table, words, programs)`` of a kernel; no table where all leaves are equal."""
    first, programs = tilings[0], [tiling.programs for tiling in tilings]
    is_many_small = first.is_small and len(tilings) > 1
    if all(tiling == first for tiling in tilings) and not is_many_small:
        return None, None, sum(programs)
    numbers = [tiling.numbers(are_equal=False) for tiling in tilings]
    words = Table.words(numbers, programs)
    return Table.of(numbers), words, _rounded(-(-sum(programs) * room[1] // room[0]))


def _rounded(programs: int) -> int:
    """At least as many, of which there are few for each doubling.

    XLA compiles kernels of one text once, if they have as many programs.
    """
    unit = 2 ** max(0, programs.bit_length() - _STEPS_OF_A_DOUBLING.bit_length())
    return math.ceil(programs / unit) * unit
