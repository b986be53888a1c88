"""The PTX instruction ``cvt``, which converts numbers to another type."""

import numpy as np

from tools.gpu_program.ptx import floats
from tools.gpu_program.ptx.bits import BFLOAT16, integers, to_patterns, width
from tools.gpu_program.ptx.faults import UnknownInstruction
from tools.gpu_program.ptx.parser import Instruction


def converted(instruction: Instruction, x, lower=None):
    """Return the result of a ``cvt`` instruction.

    Args:
      instruction: the instruction, which names the types of its result and operands.
      x: the numbers to convert. They become the upper half if ``lower`` is not None.
      lower: the numbers that become the lower half of the result, or None.

    Raises:
      UnknownInstruction: if the interpreter does not support the conversion.
    """
    target, source = instruction.types
    to_integer = target[0] in "us"
    match source, target, instruction.modifiers:
        case "f32", "bf16x2", ("rn",) if lower is not None:
            x, lower = (to_patterns(_rounded(half), "bf16") for half in (x, lower))
            return x.astype(np.uint32) << np.uint32(16) | lower
        case "f32", "bf16", ("rn",):
            return _rounded(x)
        case "f32", "f32", ("sat",):
            # Clamp to [0, 1]; a NaN becomes 0.
            return np.clip(np.nan_to_num(x, nan=0.0), 0, 1).astype(np.float32)
        case "f32", "f32", (rounding,):
            return floats.rounded_to_integers(x, rounding)
        case "f32", _, (rounding,) if to_integer and width(target) <= 32:
            return floats.to_integers(x, rounding, target)
        case _, "f32", _ if source != "f32":
            return x.astype(np.float32)
        case _ if to_integer and source[0] in "us":
            return x.astype(integers(target))
    raise UnknownInstruction("the interpreter does not support this conversion")


def _rounded(x):
    """Round to the nearest bfloat16 number, with ties to even."""
    with np.errstate(all="ignore"):
        return x.astype(BFLOAT16).astype(np.float32)
