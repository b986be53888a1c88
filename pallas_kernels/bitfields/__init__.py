"""Fields of k bits packed into uint32 words."""

from pallas_kernels.bitfields.api import pack, unpack
from pallas_kernels.bitfields.fields import GROUP, get_field, period, put_fields
from pallas_kernels.bitfields.xla import pack_axis, packed_shape

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
