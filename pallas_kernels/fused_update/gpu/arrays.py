"""The arrays of a program, in registers and in memory, in which launchers differ.

A kernel may update many leaves, as a launch takes some microseconds, many times as long
as the update of a small leaf. Each leaf gets the same number of the kernel's programs.
A program loads and stores by a tree of branches, one for each leaf. What lies between,
which is nearly all of it, is the same code for all leaves.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence

import jax
import numpy as np

from pallas_kernels.fused_update.gpu.tiling import Tiling
from pallas_kernels.gpu.instructions import by_branches


class Arrangement(typing.Protocol):
    """How the lanes of a program are arranged in arrays, in which launchers differ.

    Where a block has several tiles, they are neighbours, in the order of their numbers.

    *Arrays of lanes* have :attr:`shape`. *Arrays of blocks*, such as :meth:`blocks`,
    *of parts* and *of tiles* may be smaller: :meth:`spread` makes them broadcast.
    """

    @property
    def tiling(self) -> Tiling:
        """What the lanes walk over."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an array with one element per lane."""
        ...

    def flat(self) -> jax.Array:
        """int32, the numbers of the lanes of a flat tiling."""
        ...

    def blocks(self) -> jax.Array:
        """int32 of blocks: the numbers of the program's largest blocks."""
        ...

    def parts(self, count: int) -> jax.Array:
        """int32 of parts: the numbers of the parts into which these are divided."""
        ...

    def tiles(self) -> jax.Array:
        """int32 of tiles: their numbers in the largest blocks."""
        ...

    def columns(self) -> jax.Array:
        """int32 of lanes: the numbers of the columns in their tiles."""
        ...

    def zeros(self, dtype) -> jax.Array:
        """An array of lanes."""
        ...

    def carried(self, x: jax.Array) -> jax.Array:
        """An array of lanes, as a loop carries it."""
        ...

    def spread(self, x: jax.Array) -> jax.Array:
        """A scalar, or an array of blocks, of parts or of lanes, to broadcast."""
        ...

    def over_parts(self, x: jax.Array) -> jax.Array:
        """A scalar, or an array of blocks, to broadcast to one of parts."""
        ...

    def expand(self, x: jax.Array) -> jax.Array:
        """The same as an array of lanes."""
        ...

    def maxima(self, x: jax.Array, parts: int) -> jax.Array:
        """An array of parts: the maxima of an array of lanes."""
        ...


@dataclasses.dataclass(frozen=True)
class Access:
    """Elements of one array of a leaf.

    Args:
      number: of the operand or the result.
      layer: int32 scalar, the layer of a stack; None if it is none.
      offset: int32, where the elements are in the array, or in its layer.
      mask: which of them exist; None if all do.
      width: how many neighbouring lanes surely have neighbouring elements, the first
        of them aligned to as many, of which all exist or none.
      tiles: of the block that each element is of; None if lanes have their own.
    """

    number: int
    layer: jax.Array | None
    offset: jax.Array
    mask: jax.Array | None
    width: int = 1
    tiles: int | None = None

    def of(self, arrays: Sequence):
        """The elements, of the one among the references to a leaf's arrays."""
        ref = arrays[self.number].at
        return ref[self.offset] if self.layer is None else ref[self.layer, self.offset]


class Memory(typing.Protocol):
    """The arrays of the leaf that a program updates, as it loads and stores them.

    A launcher's ``OneLeaf`` has the arrays themselves, :class:`OneOfMany` a choice
    among those of many leaves. What runs between loads and stores is the same.
    """

    has_branches: typing.ClassVar[bool]
    """Whether each load and each store takes branches, so that it should do much."""

    def load(self, accesses: Sequence[Access]) -> list[jax.Array]:
        """Elements of operands."""
        ...

    def store(self, new: Sequence[tuple[Access, jax.Array]]) -> None:
        """Write elements of results."""
        ...


@dataclasses.dataclass(frozen=True)
class OneOfMany:
    """The arrays of one of a kernel's leaves.

    Args:
      leaf: int32 scalar, which.
      leaves: the arrays of each.
      mark: of an array and a number, the same array by instructions that differ for
        different numbers; None if LLVM does not compile the kernel.
    """

    leaf: jax.Array | np.int32
    leaves: Sequence[Memory]
    mark: Callable[[jax.Array, int], jax.Array] | None

    has_branches: typing.ClassVar[bool] = True

    def load(self, accesses: Sequence[Access]) -> list[jax.Array]:
        """See :class:`Memory`.

        For LLVM, what is per block is loaded apart from the rest where blocks are of
        two sizes. Triton cannot compile one conditional that gives both ("requires the
        same encoding for all operands and results").
        """
        kinds = [access.tiles for access in accesses]
        if self.mark is None or len(set(kinds) - {None}) < 2:
            return self._load(accesses)
        loaded: list = [None] * len(accesses)
        for kind in dict.fromkeys(kinds):
            places = [i for i, each in enumerate(kinds) if each == kind]
            for i, x in zip(
                places, self._load([accesses[i] for i in places]), strict=True
            ):
                loaded[i] = x
        return loaded

    def _load(self, accesses: Sequence[Access]) -> list[jax.Array]:
        def load(number: int):
            return self._marked(self.leaves[number].load(accesses), number)

        return list(by_branches(self.leaf, range(len(self.leaves)), load))

    def store(self, new: Sequence[tuple[Access, jax.Array]]) -> None:
        """See :class:`Memory`."""
        accesses = [access for access, _ in new]

        def store(number: int, *values):
            values = self._marked(values, number)
            self.leaves[number].store(list(zip(accesses, values, strict=True)))

        values = (value for _, value in new)
        by_branches(self.leaf, range(len(self.leaves)), store, *values)

    def _marked(self, values: Sequence[jax.Array], number: int) -> tuple:
        """The values of a branch, one of them marked with its number.

        Else LLVM would take the loads of all branches for one with another address,
        and select each array's address from all leaves': 12 instructions per parameter
        for 12 leaves of AdamW.
        """
        mark = self.mark
        if mark is None:
            return tuple(values)
        least = min(range(len(values)), key=lambda i: values[i].size)
        return tuple(mark(x, number) if i == least else x for i, x in enumerate(values))
