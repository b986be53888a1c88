"""Loads and stores of a thread's four elements in global memory, for Mosaic GPU.

If the elements are aligned neighbors in memory, one instruction accesses all of them
(4 to 16 bytes). Otherwise, each element needs its own instruction. Pallas does not
support masks or offsets per thread with Mosaic GPU.
"""

import dataclasses
import typing

import jax.numpy as jnp

from pallas_kernels.gpu import mosaic_registers as registers


@dataclasses.dataclass(frozen=True)
class Form:
    """The static properties of an access, which determine its instructions.

    Args:
      dtype: dtype of the elements.
      width, tiles: see :class:`pallas_kernels.fused_update.gpu.operands.Access`.
      layer_size: number of elements in a layer, if the array is a stack of layers.
      mark: comment to add to the instructions' assembly.
    """

    dtype: jnp.dtype
    width: int
    tiles: int | None
    layer_size: int
    mark: str

    @property
    def bits(self) -> int:
        return 8 * self.dtype.itemsize

    def places(
        self, pointer, offset, mask, layer
    ) -> list[tuple[typing.Any, typing.Any]]:
        """Return ``(address, mask)`` for each element of a register.

        The masks are None if the access has no mask.

        Args:
          pointer: pointer to the array.
          offset: register with the elements' offsets.
          mask, layer: registers with the mask and the layer, or None.
        """
        masks = [None] * registers.COLUMNS if mask is None else registers.elements(mask)
        if layer is not None:
            start = registers.product(registers.elements(layer)[0], self.layer_size)
            pointer = registers.address(pointer, start, self.bits)
        offsets = registers.elements(offset)
        if self.width == 1 and not self.tiles:
            # If an array is repeated along the last axis, elements have equal offsets.
            places = map(registers.widened, offsets)
            addresses = [registers.address(pointer, x, self.bits) for x in places]
            return list(zip(addresses, masks, strict=True))
        # A thread's elements are neighbors, but they are not always aligned.
        first = registers.address(pointer, registers.widened(offsets[0]), self.bits)
        return [
            (registers.address(first, number, self.bits), mask)
            for number, mask in enumerate(masks)
        ]


def load(form: Form, pointer, *place):
    """Load elements into a register. See :meth:`Form.places` for ``place``."""
    bits, places = form.bits, form.places(pointer, *place)
    if form.tiles:
        (address, mask), *_ = places
        # The block's first thread may overwrite the value, so it also loads it, and
        # then sends it to the other threads of its warp.
        together = min(form.tiles, registers.WARP)
        if together > 1:
            mask = registers.both(mask, registers.is_first_of(together))
        (value,) = registers.load(address, mask, bits, 1, form.mark)
        if together > 1:
            value = registers.first_thread(value, together)
        values = [value] * registers.COLUMNS
    elif form.width == registers.COLUMNS:
        width = min(32, bits * registers.COLUMNS)
        count = bits * registers.COLUMNS // width
        values = registers.load(*places[0], width, count, form.mark)
    else:
        values = [
            value
            for place in places
            for value in registers.load(*place, bits, 1, form.mark)
        ]
    return registers.joined(values, registers.element_type(form.dtype))


def store(form: Form, pointer, value, *place):
    """Store the elements of a register; see :func:`load`."""
    bits, places = form.bits, form.places(pointer, *place)
    if form.tiles:
        ((address, mask), *_), (word, *_) = places, registers.words(value, bits)
        if form.tiles > 1:
            mask = registers.both(mask, registers.is_first_of(form.tiles))
        registers.store(address, [word], mask, form.mark)
    elif form.width == registers.COLUMNS:
        words = registers.words(value, min(32, bits * registers.COLUMNS))
        registers.store(places[0][0], words, places[0][1], form.mark)
    else:
        words = registers.words(value, bits)
        for (address, mask), word in zip(places, words, strict=True):
            registers.store(address, [word], mask, form.mark)
