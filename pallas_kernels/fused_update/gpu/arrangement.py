"""How the lanes of a program are arranged in arrays, in which launchers differ.

Where a block has several tiles, they are neighbours, in the order of their numbers.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fused_update.gpu.tiling import Tiling
from pallas_kernels.layout import TILE_COLUMNS


class Arrangement(typing.Protocol):
    """The arrays of one program.

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
class ByBlocks:
    """Arrays ``[lanes, 4]``, or ``[blocks, tiles, 4]`` where blocks have several tiles.

    Arrays of blocks are ``[blocks]``, of parts ``[blocks, parts]`` where they are not
    whole blocks, and of tiles ``[1, tiles, 1]``.
    """

    tiling: Tiling

    @property
    def shape(self) -> tuple[int, ...]:
        """See :class:`Arrangement`, as of the other methods."""
        tiling = self.tiling
        if tiling.is_flat:
            return (tiling.flat_width,)
        if tiling.tiles == 1:
            return (tiling.lanes, TILE_COLUMNS)
        return (tiling.blocks_at_once, tiling.tiles, TILE_COLUMNS)

    def flat(self) -> jax.Array:
        return lax.iota(jnp.int32, self.tiling.flat_width)

    def blocks(self) -> jax.Array:
        return lax.iota(jnp.int32, self.tiling.blocks_at_once)

    def parts(self, count: int) -> jax.Array:
        return lax.broadcasted_iota(jnp.int32, (1, count), 1)

    def tiles(self) -> jax.Array:
        return lax.broadcasted_iota(jnp.int32, (1, self.tiling.tiles, 1), 1)

    def columns(self) -> jax.Array:
        return lax.broadcasted_iota(jnp.int32, self.shape, len(self.shape) - 1)

    def zeros(self, dtype) -> jax.Array:
        return jnp.zeros(self.shape, dtype)

    def carried(self, x: jax.Array) -> jax.Array:
        return x

    def spread(self, x: jax.Array) -> jax.Array:
        if not x.ndim:
            return x
        return x.reshape(*x.shape, *[1] * (len(self.shape) - x.ndim))

    def over_parts(self, x: jax.Array) -> jax.Array:
        return x[:, None] if x.ndim else x

    def expand(self, x: jax.Array) -> jax.Array:
        shape = self.shape
        has_parts = x.ndim == 2 < len(shape)
        if has_parts and x.shape[1] not in (1, self.tiling.tiles):
            runs = (*x.shape, self.tiling.tiles // x.shape[1], shape[-1])
            return jnp.broadcast_to(x[:, :, None, None], runs).reshape(shape)
        return jnp.broadcast_to(self.spread(x), shape)

    def maxima(self, x: jax.Array, parts: int) -> jax.Array:
        x = jnp.max(x, axis=-1)
        if x.ndim == 1 or parts == self.tiling.tiles:
            return x
        if parts > 1:
            x = x.reshape(x.shape[0], parts, -1)
        return jnp.max(x, axis=-1)
