"""The interface for arranging, loading and storing the lanes of a program."""

import jax

from pallas_kernels.gpu.instructions import Instructions


class Arrangement:
    """The arrangement of a program's lanes in arrays, which depends on the launcher.

    The tiles of a block are neighbors, sorted by index.

    *Arrays of lanes* have the shape :attr:`shape`. *Arrays of blocks* have an element
    for each of the program's largest blocks, and *arrays of parts* have an element for
    each smaller block in them. Both may have fewer elements than there are lanes;
    :meth:`spread` makes them broadcast. Flat tilings have neither blocks nor parts.
    """

    shape: tuple[int, ...]
    """The shape of an array with one element per lane."""

    instructions: Instructions | None
    """The launcher's instructions; None if XLA runs the operations."""

    @property
    def marks_branches(self) -> bool:
        """Whether :meth:`.operands.Memory._marked` must tell branches apart."""
        return False

    def flat(self) -> jax.Array:
        """Return the indices of a flat tiling's lanes, as an int32 array of lanes."""
        raise NotImplementedError

    def blocks(self) -> jax.Array:
        """Return the indices of the largest blocks, as an int32 array of blocks."""
        raise NotImplementedError

    def parts(self, count: int) -> jax.Array:
        """Return the indices of the ``count`` parts in a block, as an int32 array."""
        raise NotImplementedError

    def columns(self) -> jax.Array:
        """Return the column of each lane in its tile, as an int32 array of lanes."""
        raise NotImplementedError

    def carried(self, x: jax.Array) -> jax.Array:
        """Return an array of lanes with the canonical layout and sign of its dtype.

        Loops need this for arrays that they carry, and comparisons depend on the sign.
        """
        return x

    def spread(self, x: jax.Array) -> jax.Array:
        """Reshape a scalar or an array so that it broadcasts to arrays of lanes."""
        return x

    def over_parts(self, x: jax.Array) -> jax.Array:
        """Reshape a scalar or array of blocks so that it broadcasts to parts."""
        return x

    def expand(self, x: jax.Array) -> jax.Array:
        """Broadcast a scalar or an array to an array of lanes."""
        raise NotImplementedError

    def maxima(self, x: jax.Array, parts: int) -> jax.Array:
        """Return the maxima of ``x`` over each of the ``parts`` parts of each block."""
        raise NotImplementedError

    def load(self, ref, access, leaf: int) -> jax.Array:
        """Load elements of one of a leaf's arrays, as an array of lanes or of parts.

        Args:
          ref: reference to the flat array, or to a stack of flat layers.
          access: the elements, an :class:`.operands.Access`.
          leaf: the index of the leaf in the kernel.
        """
        raise NotImplementedError

    def store(self, ref, access, value: jax.Array, leaf: int) -> None:
        """Store elements of one of a leaf's arrays; see :meth:`load`."""
        raise NotImplementedError
