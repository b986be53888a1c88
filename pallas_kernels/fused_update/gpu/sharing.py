"""The choice of the leaves that share a kernel.

Leaves with different shapes can share a kernel that reads their sizes and strides from
a table (:mod:`.numbers`). The text of the kernel then does not depend on the shapes.
"""

import dataclasses
import math
import typing
from collections.abc import Sequence

from pallas_kernels.fused_update.gpu.numbers import Table
from pallas_kernels.fused_update.gpu.tiling import FlatTiling, ProgramSize, Tiling
from pallas_kernels.fused_update.spec import Leaf, Shard

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
            groups.setdefault(kind, []).append(number)
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
