"""How the lanes of a Triton program lie in arrays, and how it loads and stores them.

Loads and stores have offsets and masks of their own: a BlockSpec's have no masks on
Triton's backend, and a ragged tail would be written out of bounds.
"""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton

from pallas_kernels.fused_update.gpu.arrays import Access
from pallas_kernels.fused_update.gpu.tiling import Tiling
from pallas_kernels.layout import TILE_COLUMNS


@dataclasses.dataclass(frozen=True)
class ByBlocks:
    """Arrays ``[lanes, 4]``, or ``[blocks, tiles, 4]`` where blocks have several tiles.

    Arrays of blocks are ``[blocks]``, of parts ``[blocks, parts]`` where they are not
    whole blocks, and of tiles ``[1, tiles, 1]``.
    """

    tiling: Tiling

    @property
    def shape(self) -> tuple[int, ...]:
        """See :class:`.arrays.Arrangement`, as of the other methods."""
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


@dataclasses.dataclass(frozen=True)
class OneLeaf:
    """The arrays of the only leaf.

    Args:
      interpret: whether XLA runs the operations.
      operands, results: the kernel's references to its arrays, which are flat; those
        of stacks are of shape ``[layers, size]``.
      number: of the leaf.
    """

    interpret: bool
    operands: Sequence
    results: Sequence
    number: int

    has_branches: typing.ClassVar[bool] = False

    def load(self, accesses: Sequence[Access]) -> list[jax.Array]:
        """See :class:`.arrays.Memory`."""
        return [triton.load(a.of(self.operands), mask=a.mask) for a in accesses]

    def store(self, new: Sequence[tuple[Access, jax.Array]]) -> None:
        """See :class:`.arrays.Memory`."""
        for a, value in new:
            if self.interpret:
                a, value = _existing(a, value)
            triton.store(a.of(self.results), value, mask=a.mask)


def _existing(access: Access, value: jax.Array) -> tuple[Access, jax.Array]:
    """The same store, where elements that do not exist are the first that does.

    Interpreted, a store writes what it has read where the mask is off. There it would
    undo what others write to the same place: elements beyond the end of a row have the
    offsets of the next.
    """
    if access.mask is None:
        return access, value
    mask = jnp.broadcast_to(access.mask, value.shape)
    offset = jnp.broadcast_to(access.offset, value.shape)
    place = jnp.argmax(mask.reshape(-1))
    first = lambda x: jnp.broadcast_to(x.reshape(-1)[place], x.shape)
    value, offset = (jnp.where(mask, x, first(x)) for x in (value, offset))
    return dataclasses.replace(access, offset=offset, mask=first(mask)), value
