"""Convert the bit patterns of registers to numbers of a PTX type, and back."""

import ml_dtypes
import numpy as np

from tools.gpu_program.ptx.faults import UnknownInstruction

NAN = np.uint32(0x7FFFFFFF)
"""The NaN that arithmetic returns."""

_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
BFLOAT16 = ml_dtypes.bfloat16
"""numpy's bfloat16. The interpreter stores bfloat16 numbers as float32, exactly."""

_WIDTHS = {"bf16": 16, "bf16x2": 32, "pred": 8}


def width(kind: str) -> int:
    """Return the number of bits of a type.

    >>> width("bf16"), width("u64")
    (16, 64)
    """
    return _WIDTHS.get(kind) or int(kind[1:])


def unsigned(bits: int) -> type:
    """Return numpy's unsigned integer type with the given number of bits."""
    return integers(f"u{bits}")


def integers(kind: str) -> type:
    """Return numpy's integer type for an integer type of PTX.

    >>> integers("s16")
    <class 'numpy.int16'>

    Raises:
      UnknownInstruction: if numpy has no integers of this width.
    """
    found = (_SIGNED if kind[0] == "s" else _UNSIGNED).get(width(kind))
    if found is None:
        raise UnknownInstruction(f"the interpreter does not support the type {kind}")
    return found


def to_numbers(patterns: np.ndarray, kind: str) -> np.ndarray:
    """Convert bit patterns to numbers of a type.

    Args:
      patterns: unsigned integers as wide as the type, or booleans for predicates.
      kind: the type.

    >>> to_numbers(np.array([0xBF80], np.uint16), "bf16")
    array([-1.], dtype=float32)
    """
    if kind == "bf16":
        return patterns.view(BFLOAT16).astype(np.float32)
    if kind == "f32":
        return patterns.view(np.float32)
    return patterns.view(integers(kind)) if kind[0] == "s" else patterns


def to_patterns(numbers: np.ndarray, kind: str) -> np.ndarray:
    """Convert numbers of a type to bit patterns. The inverse of :func:`to_numbers`.

    Floats are not rounded, so they must be representable in the type. Integers wrap.
    """
    if kind == "pred":
        return numbers
    if kind == "f32":
        return numbers.view(np.uint32)
    if kind == "bf16":
        patterns = numbers.astype(BFLOAT16).view(np.uint16)
        return np.where(np.isnan(numbers), np.uint16(0x7FFF), patterns)
    return numbers.astype(unsigned(width(kind)))
