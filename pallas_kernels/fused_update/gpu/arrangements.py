"""How launchers arrange the lanes of a program in arrays."""

import typing

import jax

from pallas_kernels.fused_update.gpu.tiling import BlockTiling, FlatTiling


class FlatArrangement(typing.Protocol):
    """How the lanes of a flat tiling are arranged in arrays."""

    @property
    def tiling(self) -> FlatTiling:
        """What the lanes walk over."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an array with one element per lane."""
        ...

    def lanes(self) -> jax.Array:
        """int32, the numbers of the lanes."""
        ...


class BlockArrangement(typing.Protocol):
    """How the lanes of a tiling by blocks are arranged in arrays.

    Where a block has several tiles, they are neighbours, in the order of their numbers.

    *Arrays of lanes* have :attr:`shape`. *Arrays of blocks*, such as :meth:`blocks`,
    and *of parts* may be smaller: :meth:`spread` makes them broadcast.
    """

    @property
    def tiling(self) -> BlockTiling:
        """What the lanes walk over."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an array with one element per lane."""
        ...

    def blocks(self) -> jax.Array:
        """int32 of blocks: the numbers of the program's largest blocks."""
        ...

    def parts(self, count: int) -> jax.Array:
        """int32 of parts: the numbers of the parts into which these are divided."""
        ...

    def columns(self) -> jax.Array:
        """int32 of lanes: the numbers of the columns in their tiles."""
        ...

    def carried(self, x: jax.Array) -> jax.Array:
        """An array of lanes with the layout and the sign that its dtype says.

        Loops carry such arrays, and comparisons depend on the sign.
        """
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


Arrangement = FlatArrangement | BlockArrangement
