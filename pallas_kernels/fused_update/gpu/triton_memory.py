"""How a program of a Triton kernel reads and writes the arrays of its leaf.

Loads and stores have offsets and masks of their own: a BlockSpec's have no masks on
Triton's backend, and a ragged tail would be written out of bounds.
"""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton

from pallas_kernels.fused_update.gpu.memory import Access


@dataclasses.dataclass(frozen=True)
class OneLeaf:
    """The arrays of the only leaf.

    Args:
      operands, results: the kernel's references to its arrays, which are flat; those
        of stacks are of shape ``[layers, size]``.
      interpret: whether XLA runs the operations.
    """

    operands: Sequence
    results: Sequence
    interpret: bool

    has_branches: typing.ClassVar[bool] = False

    def load(self, accesses: Sequence[Access]) -> list[jax.Array]:
        """See :class:`Memory`."""
        return [triton.load(a.of(self.operands), mask=a.mask) for a in accesses]

    def store(self, new: Sequence[tuple[Access, jax.Array]]) -> None:
        """See :class:`Memory`."""
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
