"""Bit manipulation of packed low-precision state, as pure functions and GPU kernels."""

from pallas_kernels.bitfields import GROUP, get_field, period, put_fields
from pallas_kernels.packing import pack, pack_axis, packed_shape, unpack

__all__ = [
    "GROUP",
    "get_field",
    "pack",
    "pack_axis",
    "packed_shape",
    "period",
    "put_fields",
    "unpack",
]
