"""Packed k-bit fields and fused elementwise updates, as XLA operations and kernels."""

from pallas_kernels.bitfields import get_field, pack, put_fields, unpack
from pallas_kernels.fused_update import (
    Leaf,
    Operand,
    Result,
    Scalars,
    fused_update,
    fused_update_many,
)
from pallas_kernels.layout import Layout, layout_of, packed_shape, period

__all__ = [
    "Layout",
    "Leaf",
    "Operand",
    "Result",
    "Scalars",
    "fused_update",
    "fused_update_many",
    "get_field",
    "layout_of",
    "pack",
    "packed_shape",
    "period",
    "put_fields",
    "unpack",
]
