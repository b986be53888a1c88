"""The arrangement of lanes in arrays for Triton, with loads and stores.

Loads and stores use offsets and masks. With a BlockSpec, Pallas's Triton backend would
not mask them, and would write beyond the end of an array.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton

from pallas_kernels.fused_update.gpu.instructions import Instructions

INSTRUCTIONS = Instructions(triton.elementwise_inline_asm)


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arrangement of a program's lanes; see :class:`.lanes.Arrangement`.

    Arrays of blocks have the shape ``[blocks]``. Arrays of parts have the shape
    ``[blocks, parts]`` if a block has several parts.

    Args:
      shape: ``[lanes]`` in a flat tiling, ``[blocks, tiles, 4]`` if blocks have several
        tiles, and ``[groups, 4]`` otherwise.
      instructions: the launcher's instructions; None if XLA runs the operations.
    """

    shape: tuple[int, ...]
    instructions: Instructions | None

    @property
    def marks_branches(self) -> bool:
        return self.instructions is not None

    def flat(self) -> jax.Array:
        return lax.iota(jnp.int32, self.shape[0])

    def blocks(self) -> jax.Array:
        return lax.iota(jnp.int32, self.shape[0])

    def parts(self, count: int) -> jax.Array:
        return lax.broadcasted_iota(jnp.int32, (1, count), 1)

    def columns(self) -> jax.Array:
        return lax.broadcasted_iota(jnp.int32, self.shape, len(self.shape) - 1)

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
        if has_parts and x.shape[1] not in (1, shape[1]):
            runs = (*x.shape, shape[1] // x.shape[1], shape[-1])
            return jnp.broadcast_to(x[:, :, None, None], runs).reshape(shape)
        return jnp.broadcast_to(self.spread(x), shape)

    def maxima(self, x: jax.Array, parts: int) -> jax.Array:
        x = jnp.max(x, axis=-1)
        if x.ndim == 1 or parts == x.shape[1]:
            return x
        if parts > 1:
            x = x.reshape(x.shape[0], parts, -1)
        return jnp.max(x, axis=-1)

    def load(self, ref, access, leaf: int) -> jax.Array:
        del leaf
        return triton.load(_place(ref, access), mask=access.mask)

    def store(self, ref, access, value: jax.Array, leaf: int) -> None:
        del leaf
        if self.instructions is None:
            access, value = _existing(access, value)
        triton.store(_place(ref, access), value, mask=access.mask)


def _place(ref, access):
    return ref.at[
        access.offset if access.layer is None else (access.layer, access.offset)
    ]


def _existing(access, value: jax.Array):
    """Return an equivalent store that repeats an existing element for all missing ones.

    Where the mask is False, an interpreted store writes back the value that it has
    read. Elements beyond the end of a row have offsets in the next row, so this would
    undo other writes to that row.
    """
    if access.mask is None:
        return access, value
    mask = jnp.broadcast_to(access.mask, value.shape)
    offset = jnp.broadcast_to(access.offset, value.shape)
    place = jnp.argmax(mask.reshape(-1))
    first = lambda x: jnp.broadcast_to(x.reshape(-1)[place], x.shape)
    value, offset = (jnp.where(mask, x, first(x)) for x in (value, offset))
    return dataclasses.replace(access, offset=offset, mask=first(mask)), value
