"""How a program finds the elements, blocks and words of each operand and result."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.fused_update.gpu.lanes import BlockPlaces, TiledLanes
from pallas_kernels.fused_update.gpu.memory import Access, Memory
from pallas_kernels.layout import TILE_SIZE


@dataclasses.dataclass(frozen=True)
class Plain:
    """An array that is not packed, or a layer of a stack of them.

    Args:
      number: of the operand or result.
      layer: of the stack; None if it is none.
      width: of its accesses.
    """

    number: int
    layer: jax.Array | None
    width: int

    def access(self, offset: jax.Array, exists: jax.Array | None) -> Access:
        return Access(self.number, self.layer, offset, exists, self.width)


@dataclasses.dataclass(frozen=True)
class PerBlock:
    """An array with one element per block, or a layer of a stack of them.

    Args:
      number, layer: as of :class:`Plain`.
      places: of the blocks.
    """

    number: int
    layer: jax.Array | None
    places: BlockPlaces

    def access(self, chunk: jax.Array) -> Access:
        places = self.places
        return Access(
            self.number,
            self.layer,
            places.offset(chunk),
            places.exists(chunk),
            tiles=places.block_size // TILE_SIZE,
        )


@dataclasses.dataclass(frozen=True)
class WordsInMemory:
    """The words of the lanes; see :class:`.words.Words`."""

    memory: Memory
    number: int
    layer: jax.Array | None
    lanes: TiledLanes
    bits: int

    def access_if(self, start: jax.Array, when: jax.Array, like: jax.Array) -> Access:
        (access,) = self.accesses(start, 1)
        when = jnp.broadcast_to(when, like.shape)
        mask = when if access.mask is None else access.mask & when
        return dataclasses.replace(access, mask=mask)

    def accesses(self, start: jax.Array, count: int) -> list[Access]:
        return [
            Access(
                self.number,
                self.layer,
                offset,
                self.lanes.has_word(self.bits, start + np.int32(word)),
                self.lanes.tiling.word_width,
            )
            for word, offset in enumerate(
                self.lanes.word_offsets(self.bits, start, count)
            )
        ]
