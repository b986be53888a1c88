"""``cvt``: numbers of one type as numbers of another."""

import numpy as np

from tools.gpu_program.ptx import floats
from tools.gpu_program.ptx.bits import NARROW, integers, to_patterns, unsigned, width
from tools.gpu_program.ptx.faults import UnknownInstruction
from tools.gpu_program.ptx.parser import Instruction


def converted(instruction: Instruction, x, lower=None):
    """``cvt``, also of two numbers into one register, the first on top.

    Args:
      instruction: names the result's type and the operands'.
      x: numbers.
      lower: numbers for the lower half of a result of two.

    Raises:
      UnknownInstruction: for conversions that are not needed so far.
    """
    target, source = instruction.types
    modifiers = set(instruction.modifiers)
    if "ftz" in modifiers and source == "f32":
        x = floats.flushed(x)
    if target.endswith("x2") and lower is not None and source == "f32":
        upper, lower = (_to_float(half, target[:-2], modifiers) for half in (x, lower))
        return _side_by_side(upper, lower, target[:-2])
    if source in NARROW or source == "f32":
        if target in NARROW:
            return _to_float(x, target, modifiers)
        if target == "f32":
            if "sat" in modifiers:
                # To what is between 0 and 1; a NaN becomes 0.
                return np.clip(np.nan_to_num(x, nan=0.0), 0, 1).astype(np.float32)
            rounding = modifiers & set(floats.INTEGER_ROUNDINGS)
            return floats.rounded_to_integers(x, rounding.pop()) if rounding else x
        if target[0] in "us" and width(target) <= 32:
            (rounding,) = modifiers & set(floats.INTEGER_ROUNDINGS)
            return floats.to_integers(x, rounding, target)
    elif source[0] in "us":
        if target == "f32" and "rn" in modifiers:
            return x.astype(np.float32)
        if target[0] in "us" and "sat" not in modifiers:
            return x.astype(integers(target))
    raise UnknownInstruction("the interpreter does not know this conversion")


def _to_float(x, kind: str, modifiers: set[str]):
    (rounding,) = modifiers & {"rn", "rz"}
    return floats.narrowed(x, kind, rounding, "satfinite" in modifiers)


def _side_by_side(upper, lower, kind: str):
    bits = width(kind)
    pair = unsigned(2 * bits)
    upper, lower = (to_patterns(half, kind).astype(pair) for half in (upper, lower))
    return upper << pair(bits) | lower
