"""The interface for arranging the lanes of a program in arrays."""

import typing

import jax


class Arrangement(typing.Protocol):
    """The arrangement of a program's lanes in arrays, which depends on the launcher.

    The tiles of a block are neighbours, in the order of their numbers.

    *Arrays of lanes* have the shape :attr:`shape`. *Arrays of blocks* have an element
    for each of the program's largest blocks, and *arrays of parts* for each smaller
    block in them. They may have fewer elements than there are lanes, and :meth:`spread`
    makes them broadcast. Flat tilings have neither blocks nor parts.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an array with one element per lane."""
        ...

    def flat(self) -> jax.Array:
        """int32 array of lanes: the lanes' numbers in a flat tiling."""
        ...

    def blocks(self) -> jax.Array:
        """int32 array of blocks: the numbers of the program's largest blocks."""
        ...

    def parts(self, count: int) -> jax.Array:
        """int32 array of parts: their numbers in a block, which has ``count`` parts."""
        ...

    def columns(self) -> jax.Array:
        """int32 array of lanes: the column of each lane in its tile."""
        ...

    def carried(self, x: jax.Array) -> jax.Array:
        """The array of lanes, with the layout and the sign of its dtype.

        Loops need this for arrays that they carry, and comparisons depend on the sign.
        """
        ...

    def spread(self, x: jax.Array) -> jax.Array:
        """A scalar or an array, in a shape that broadcasts to arrays of lanes."""
        ...

    def over_parts(self, x: jax.Array) -> jax.Array:
        """A scalar or an array of blocks, in a shape that broadcasts to parts."""
        ...

    def expand(self, x: jax.Array) -> jax.Array:
        """A scalar or an array, broadcast to an array of lanes."""
        ...

    def maxima(self, x: jax.Array, parts: int) -> jax.Array:
        """An array of parts: the maxima of ``x`` over the ``parts`` of each block."""
        ...
