"""Bit manipulation of packed low-precision state, as pure functions and GPU kernels."""

from pallas_kernels.bitfields import GROUP, get_field, period, put_fields
from pallas_kernels.fields import pack, unpack
from pallas_kernels.fused import (
    Leaf,
    Operand,
    Result,
    fused_update,
    fused_update_many,
)
from pallas_kernels.packing import pack_axis, packed_shape

__all__ = [
    "GROUP",
    "Leaf",
    "Operand",
    "Result",
    "fused_update",
    "fused_update_many",
    "get_field",
    "pack",
    "pack_axis",
    "packed_shape",
    "period",
    "put_fields",
    "unpack",
]
