"""Read the bytes of arrays, with and without padding, from HLO types.

A TPU stores most arrays in tiles of 8 rows and 128 columns. If a dimension is not a
multiple of the tile, it is padded: ``f32[4096,8]{1,0:T(8,128)}`` needs as much memory
as an array of 128 columns.
"""

import dataclasses
import functools
import math
import re

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of a compiled program.

    Args:
      dtype: HLO's name of the dtype.
      size: the number of bytes of the elements.
      stored: the number of bytes that the array needs in memory, including padding.
      space: the index of the memory. 0 is the memory of the device; other memories are
        on the chip or belong to the host.
    """

    dtype: str
    size: int
    stored: int
    space: int = 0


def arrays(type_text: str) -> tuple[Array, ...]:
    """Return the array that a type describes, or the arrays of a tuple.

    >>> arrays("(f32[4096,8]{1,0:T(8,128)}, bf16[9]{0:T(1024)(128)(2,1)S(1)})")[1]
    Array(dtype='bf16', size=18, stored=2048, space=1)
    """
    return tuple(_array(*found) for found in _ARRAY.findall(type_text))


@functools.cache
def _array(kind: str, dims: str, layout: str) -> Array:
    shape = _integers(dims)
    number = re.search(r"\d+", kind)
    bits = int(number.group()) if number else 8
    size = math.ceil(bits * math.prod(shape) / 8)
    order, _, rest = layout.partition(":")
    tile = re.match(r"T\(([\d,]+)\)", rest)
    space = re.search(r"S\((\d+)\)", rest)
    stored = size
    if tile:
        # The layout lists the dimension that changes fastest first.
        padded = [shape[axis] for axis in reversed(_integers(order))]
        lengths = _integers(tile[1])
        padded = [1] * (len(lengths) - len(padded)) + padded
        for axis, length in zip(range(-len(lengths), 0), lengths, strict=True):
            padded[axis] = math.ceil(padded[axis] / length) * length
        stored = math.ceil(bits * math.prod(padded) / 8)
    return Array(kind, size, stored, int(space[1]) if space else 0)


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
