"""One pass over a leaf: read everything, compute elementwise, write in place."""

from pallas_kernels.fused_update.api import (
    fused_update,
    fused_update_many,
    sharing_kind,
)
from pallas_kernels.fused_update.spec import (
    MAX_ELEMENTS_OF_SMALL_LEAF,
    BlockBody,
    Body,
    Leaf,
    Operand,
    Result,
    Scalars,
    has_tiling,
)
from pallas_kernels.layout import MAX_ELEMENTS

__all__ = [
    "MAX_ELEMENTS",
    "MAX_ELEMENTS_OF_SMALL_LEAF",
    "BlockBody",
    "Body",
    "Leaf",
    "Operand",
    "Result",
    "Scalars",
    "fused_update",
    "fused_update_many",
    "has_tiling",
    "sharing_kind",
]
