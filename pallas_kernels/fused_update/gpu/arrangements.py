"""The interface for arranging the lanes of a program in arrays."""

import typing

import jax


class Arrangement(typing.Protocol):
    """The arrangement of a program's lanes in arrays, which depends on the launcher.

    The tiles of a block are neighbours, sorted by index.

    *Arrays of lanes* have the shape :attr:`shape`. *Arrays of blocks* have an element
    for each of the program's largest blocks, and *arrays of parts* have an element for
    each smaller block in them. Both may have fewer elements than there are lanes;
    :meth:`spread` makes them broadcast. Flat tilings have neither blocks nor parts.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an array with one element per lane."""
        ...

    def flat(self) -> jax.Array:
        """Return the indices of a flat tiling's lanes, as an int32 array of lanes."""
        ...

    def blocks(self) -> jax.Array:
        """Return the indices of the largest blocks, as an int32 array of blocks."""
        ...

    def parts(self, count: int) -> jax.Array:
        """Return the indices of the ``count`` parts in a block, as an int32 array."""
        ...

    def columns(self) -> jax.Array:
        """Return the column of each lane in its tile, as an int32 array of lanes."""
        ...

    def carried(self, x: jax.Array) -> jax.Array:
        """Return an array of lanes with the canonical layout and sign of its dtype.

        Loops need this for arrays that they carry, and comparisons depend on the sign.
        """
        ...

    def spread(self, x: jax.Array) -> jax.Array:
        """Reshape a scalar or an array so that it broadcasts to arrays of lanes."""
        ...

    def over_parts(self, x: jax.Array) -> jax.Array:
        """Reshape a scalar or array of blocks so that it broadcasts to parts."""
        ...

    def expand(self, x: jax.Array) -> jax.Array:
        """Broadcast a scalar or an array to an array of lanes."""
        ...

    def maxima(self, x: jax.Array, parts: int) -> jax.Array:
        """Return the maxima of ``x`` over each of the ``parts`` parts of each block."""
        ...
