"""The fewest bits with which each moment follows float32's, chosen by its field."""

import dataclasses

from lowbit_optax.formats.base import MomentFormat
from lowbit_optax.formats.block_quantized import BlockQuantized


@dataclasses.dataclass(frozen=True)
class LowMoments(MomentFormat):
    """What ``moments="low"`` stands for.

    Second moments take 6 bits. First moments take 4 where a second moment of the same
    state bounds them, to whose root they are relative, and 8 elsewhere.
    """

    def for_field(self, name, is_second, bound=None, is_orthogonalized=False):
        first = BlockQuantized(4 if bound else 8, relative_to=bound)
        chosen = first.for_field(name, is_second, bound, is_orthogonalized)
        if chosen.signed:
            return chosen
        return BlockQuantized(6).for_field(name, is_second, bound)
