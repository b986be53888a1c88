"""How launchers arrange the lanes of a program in arrays."""

import typing

import jax


class Arrangement(typing.Protocol):
    """How the lanes of a program are arranged in arrays, in which launchers differ.

    Where a block has several tiles, they are neighbours, in the order of their numbers.

    *Arrays of lanes* have :attr:`shape`. *Arrays of blocks*, such as :meth:`blocks`,
    and *of parts* may be smaller: :meth:`spread` makes them broadcast. A flat tiling
    has neither.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an array with one element per lane."""
        ...

    def flat(self) -> jax.Array:
        """int32 of lanes, of a flat tiling: their numbers."""
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
