"""Bit manipulation of packed low-precision state, as pure functions and GPU kernels."""

from pallas_kernels.bitfields.api import pack, unpack
from pallas_kernels.bitfields.fields import GROUP, get_field, period, put_fields
from pallas_kernels.bitfields.xla import pack_axis, packed_shape
from pallas_kernels.fused_update import (
    Leaf,
    Operand,
    Result,
    fused_update,
    fused_update_many,
)

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
