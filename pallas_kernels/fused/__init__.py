"""One pass over a leaf: read everything, compute elementwise, write in place."""

from pallas_kernels.fused.api import fused_update, fused_update_many
from pallas_kernels.fused.batch import LARGEST as LARGEST_OF_MANY
from pallas_kernels.fused.specs import Body, GroupedBody, Leaf, Operand, Result
from pallas_kernels.fused.views import MAX_ELEMENTS

__all__ = [
    "LARGEST_OF_MANY",
    "MAX_ELEMENTS",
    "Body",
    "GroupedBody",
    "Leaf",
    "Operand",
    "Result",
    "fused_update",
    "fused_update_many",
]
