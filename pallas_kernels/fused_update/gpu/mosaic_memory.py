"""How a program of a Mosaic GPU kernel reads and writes the arrays of its leaf.

A thread's four elements are one access of 8 to 16 bytes where they are neighbours in
memory, else four accesses. Pallas has neither masks nor offsets per thread for these.
"""

import dataclasses
import functools
import typing
from collections.abc import Sequence

import jax

from pallas_kernels.fused_update.gpu.memory import Access
from pallas_kernels.gpu import mosaic_registers as registers
from pallas_kernels.gpu.mosaic_access import Form, load, store


@dataclasses.dataclass(frozen=True)
class OneLeaf:
    """The arrays of the only leaf.

    Args:
      operands, results: the kernel's references to its arrays, which are flat.
      shape: of arrays of lanes.
      number: of the leaf. LLVM would take loads of different leaves for one with
        another address; their instructions are different texts.
    """

    operands: Sequence
    results: Sequence
    shape: tuple[int, ...]
    number: int

    has_branches: typing.ClassVar[bool] = False

    def load(self, accesses: Sequence[Access]) -> list[jax.Array]:
        """See :class:`.memory.Memory`."""
        return [self._load(access) for access in accesses]

    def store(self, new: Sequence[tuple[Access, jax.Array]]) -> None:
        """See :class:`.memory.Memory`."""
        for access, value in new:
            ref = self.results[access.number]
            make = functools.partial(store, self._form(access, ref))
            arrays = [value, *_place(access)]
            registers.do_per_thread(make, arrays, self.shape, [ref])

    def _load(self, access: Access) -> jax.Array:
        ref = self.operands[access.number]
        make = functools.partial(load, self._form(access, ref))
        return registers.per_thread(make, _place(access), self.shape, ref.dtype, [ref])

    def _form(self, access: Access, ref) -> Form:
        layer_size = None if access.layer is None else ref.shape[-1]
        has_mask = access.mask is not None
        itself = access.width, access.tiles, has_mask
        return Form(ref.dtype, *itself, layer_size, f"// leaf {self.number}")


def _place(access: Access) -> list[jax.Array]:
    place = (access.offset, access.mask, access.layer)
    return [x for x in place if x is not None]
