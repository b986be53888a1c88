"""The choice of the leaves that share a GPU kernel, and its arguments and results.

:mod:`.tiling` defines the terms. Leaves with different shapes can share a kernel that
reads their sizes and strides from a table. The text of the kernel then does not depend
on the shapes.
"""

import dataclasses
import itertools
import math
import typing
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.fused_update.gpu.tiling import (
    FlatTiling,
    ProgramSize,
    Table,
    Tiling,
)
from pallas_kernels.fused_update.spec import (
    BlockBody,
    Body,
    KernelCall,
    Leaf,
    Shard,
    manual_axes,
    result_shapes,
)

# The maximum number of loads and stores in a kernel. Compile time grows faster than
# their number: a Triton kernel with 240 takes 4 seconds, and one with 480 takes 10. The
# limit is lower for large leaves, because a launch is a small part of their time.
_MAX_ACCESSES, _MAX_ACCESSES_OF_LARGE = 250, 170
_LARGE = 2**17
_LEAST_LEAVES = 3


@dataclasses.dataclass(frozen=True)
class Sharing(ProgramSize):
    """The sizes of a launcher's programs, and the leaves that share its kernels."""

    def common_tilings(self, shards: Sequence[Shard]) -> list[Tiling]:
        """Return the tilings with which leaves can share one kernel."""
        tilings = [self.tiling(shard) for shard in shards]
        if len(shards) == 1 or not tilings[0].is_small:
            return tilings
        small = dataclasses.replace(
            self,
            flat_width=self.small_width,
            flat_rows=1,
            aligned=min(tiling.width for tiling in tilings),
        )
        return [dataclasses.replace(tiling, program=small) for tiling in tilings]

    def parts(self, leaves: Sequence[Leaf]) -> list[tuple[list[int], tuple[int, int]]]:
        """See :meth:`.spec.Launcher.parts`."""
        parts = _dealt(len(leaves), self._max_leaves(leaves))
        needed = [
            sum(x.programs for x in self._tilings_of([leaves[i] for i in part]))
            for part in parts
        ]
        full = [n for n, part in zip(needed, parts, strict=True) if len(part) > 1]
        rooms = [(n, max(full, default=n)) for n in needed]
        return list(zip(parts, rooms, strict=True))

    def _tilings_of(self, leaves: Sequence[Leaf]) -> list[Tiling]:
        return self.common_tilings([Shard(leaf, leaf.shape) for leaf in leaves])

    def _max_leaves(self, leaves: Sequence[Leaf]) -> int:
        """Return the maximum number of these leaves that one kernel should update."""
        rows = max(x.chunk_rows for x in self._tilings_of(leaves))
        accesses = 0
        for x in (*leaves[0].operands, *leaves[0].results):
            if x.block_size is not None:
                accesses += 1
            else:
                accesses += rows if x.bits is None else max(1, rows * x.bits // 32)
        has_two_sizes = len(leaves[0].block_sizes) > 1
        cost = self.cost_of_two if has_two_sizes else 1
        mean = sum(math.prod(leaf.shape) for leaf in leaves) // len(leaves)
        most = _MAX_ACCESSES if mean < _LARGE else _MAX_ACCESSES_OF_LARGE
        return max(1, max(_LEAST_LEAVES, most // accesses) // cost)

    def groups(self, shards: Sequence[Shard]) -> list[list[int]]:
        """Return a list per kernel with the indices of the shards that share it.

        All leaves must have the same kinds of operands and results.
        """
        groups: dict[typing.Hashable, list[int]] = {}
        for number, shard in enumerate(shards):
            tiling = self.tiling(shard)
            kind = number if tiling.chunks > 1 else kind_of(tiling)
            # A kernel finds repeated elements by the shape of its first leaf.
            is_repeated = any(x.repeated for x in shard.leaf.operands)
            key = kind, shard.shape if is_repeated else None
            groups.setdefault(key, []).append(number)
        return list(groups.values())


def _dealt(leaves: int, max_leaves: int) -> list[list[int]]:
    """Divide the indices of the leaves into as few lists as ``max_leaves`` allows.

    All lists have the same length, because kernels with the same number of leaves are
    compiled once; only the last list may be shorter. The leaves are sorted by size and
    are dealt out back and forth, so that all lists have about the same number of
    elements. Lists of equal leaves are traced once.
    """
    size = math.ceil(leaves / math.ceil(leaves / max_leaves))
    full = leaves // size
    rounds = [range(full * n, full * (n + 1)) for n in range(size)]
    dealt = [each[:: 1 - n % 2 * 2] for n, each in enumerate(rounds)]
    rest = list(range(full * size, leaves))
    return [*(list(part) for part in zip(*dealt, strict=True)), *([rest] * bool(rest))]


def kind_of(tiling: Tiling) -> typing.Hashable:
    """Return a key that is equal for tilings of leaves that can share a kernel."""
    if isinstance(tiling, FlatTiling):
        if tiling.is_small:
            return "small"
        return "flat", tiling.width, tiling.is_below_2_30
    if not tiling.has_linear_index or tiling.chunks > 1:
        return "alone", tiling
    flags = [tiling.layout.is_folded, tiling.is_whole, tiling.is_below_2_30]
    flags += map(tiling.cuts_words, tiling.packed)
    flags += map(tiling.cuts_block_rows, tiling.block_sizes)
    flags += map(tiling.cuts_blocks, tiling.block_sizes)
    table = Table.of([tiling.numbers(are_equal=False)])
    return "by blocks", tiling.width, tiling.word_width, *flags, table


def kind_of_leaf(leaf: Leaf) -> typing.Hashable:
    """Return the key of an unsharded leaf; it does not depend on program sizes."""
    return kind_of(ProgramSize(1, 1, 1, 1).tiling(Shard(leaf, leaf.shape)))


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
      numbers: the table of the leaves' sizes and strides; see :class:`.tiling.Table`.
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
      body, interpret: see :class:`.spec.KernelCall`.
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
    size: Sharing, call: KernelCall
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
