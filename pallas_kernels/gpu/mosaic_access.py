"""Loads and stores of Mosaic GPU: a thread's elements of an array in global memory.

A thread's four elements are one access of 8 to 16 bytes where they are neighbours in
memory, else four accesses. Pallas has neither masks nor offsets per thread for these.
"""

import dataclasses
import typing

import jax.numpy as jnp

from pallas_kernels.gpu import mosaic_registers as registers


@dataclasses.dataclass(frozen=True)
class Form:
    """What an access compiles to.

    Args:
      dtype: of the elements.
      width, tiles: see :class:`pallas_kernels.fused_update.gpu.operands.Access`.
      has_mask: whether it has one.
      layer_size: elements of the layers of a stack; None if it is none.
      mark: a comment beside the instructions.
    """

    dtype: jnp.dtype
    width: int
    tiles: int | None
    has_mask: bool
    layer_size: int | None
    mark: str

    @property
    def bits(self) -> int:
        """Of an element."""
        return 8 * self.dtype.itemsize

    def places(self, pointer, offset, *rest) -> list[tuple[typing.Any, typing.Any]]:
        """For each element of a register its address, and its mask or None.

        Args:
          pointer: to the array.
          offset: register.
          *rest: registers of the mask and the layer, if there are such.
        """
        rest = list(rest)
        masks = [None] * registers.COLUMNS
        if self.has_mask:
            masks = registers.elements(rest.pop(0))
        if self.layer_size is not None:
            layer = registers.elements(rest.pop(0))[0]
            start = registers.product(layer, self.layer_size)
            pointer = registers.address(pointer, start, self.bits)
        # A thread's elements are neighbours, if not always aligned.
        place = registers.widened(registers.elements(offset)[0])
        first = registers.address(pointer, place, self.bits)
        return [
            (registers.address(first, number, self.bits), mask)
            for number, mask in enumerate(masks)
        ]


def load(form: Form, pointer, *place):
    """The register of the elements at a place, as of :meth:`Form.places`."""
    bits, places = form.bits, form.places(pointer, *place)
    if form.tiles:
        (address, mask), *_ = places
        # Of a block only one thread reads what it writes.
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
    """Write a register to a place; see :func:`load`."""
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
