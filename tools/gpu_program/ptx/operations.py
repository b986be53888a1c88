"""Instructions that compute a register of a thread from its other registers."""

import dataclasses
import functools
import operator
import re
from collections.abc import Callable

import numpy as np

from tools.gpu_program.ptx import floats, integers
from tools.gpu_program.ptx.bits import width
from tools.gpu_program.ptx.conversions import converted
from tools.gpu_program.ptx.faults import UnknownInstruction
from tools.gpu_program.ptx.parser import Instruction


@dataclasses.dataclass(frozen=True)
class Operation:
    """The meaning of one kind of instruction.

    Args:
      compute: function that returns the result as numbers, given the instruction and
        its operands as numbers.
      reads: the types of the operands. ``own`` is the last type that the instruction
        names.
      writes: the type of the result: ``own``, the first type that the instruction names
        (``first``), or a type with twice the bits of ``own`` if the instruction has the
        modifier ``wide`` (``wide``).
      accepts: the modifiers that are allowed.
    """

    compute: Callable[..., np.ndarray]
    reads: tuple[str, ...]
    writes: str = "own"
    accepts: frozenset[str] = frozenset()

    def reads_of(self, instruction: Instruction) -> list[str]:
        """Return the types of an instruction's operands."""
        own, given = instruction.types[-1], self.reads[: len(instruction.operands) - 1]
        return [own if word == "own" else word for word in given]

    def writes_of(self, instruction: Instruction) -> str:
        """Return the type of an instruction's result."""
        own = instruction.types[-1]
        if self.writes == "first":
            return instruction.types[0]
        if self.writes == "wide" and "wide" in instruction.modifiers:
            return f"{own[0]}{2 * width(own)}"
        return own if self.writes in ("own", "wide") else self.writes


def operation_of(instruction: Instruction) -> Operation:
    """Return the operation of an instruction.

    Raises:
      UnknownInstruction: if the interpreter does not support the instruction, its
        modifiers or its operands.
    """
    kinds = instruction.types
    family = _family(kinds[-1]) if kinds else ""
    found = OPERATIONS.get(family, {}).get(instruction.name)
    if (
        found is None
        or not found.accepts.issuperset(instruction.modifiers)
        or len(instruction.operands) > 1 + len(found.reads)
    ):
        raise UnknownInstruction("the interpreter does not support this instruction")
    return found


def _family(kind: str) -> str:
    return "integer" if re.fullmatch(r"[bus]\d+", kind) else kind


def _operation(compute, *reads: str, writes="own", accepts="") -> Operation:
    return Operation(compute, reads, writes, frozenset(accepts.split()))


def _plain(function, *reads: str, **forms) -> Operation:
    """Return an operation that depends only on its operands."""
    return _operation(lambda _, *inputs: function(*inputs), *reads, **forms)


def _float(function, count: int, accepts="") -> Operation:
    """Return a float32 operation."""

    def compute(instruction, *inputs):
        flush = "ftz" in instruction.modifiers
        with np.errstate(all="ignore"):
            inputs = map(floats.flushed, inputs) if flush else inputs
            result = floats.with_one_nan(function(*inputs))
        return floats.flushed(result) if flush else result

    return _operation(compute, *["own"] * count, accepts=f"ftz {accepts}")


def _directed(function, count: int) -> Operation:
    """Return a float32 operation whose modifiers name a rounding mode."""

    def compute(instruction, *inputs):
        named = set(instruction.modifiers).intersection(floats.DIRECTIONS)
        directed = functools.partial(function, direction=named.pop() if named else "rn")
        return _float(directed, count).compute(instruction, *inputs)

    accepts = " ".join(("ftz", *floats.DIRECTIONS))
    return _operation(compute, *["own"] * count, accepts=accepts)


def _approximate(function) -> Operation:
    return _float(lambda x: floats.by_float64(function, x), 1, "approx")


def _extreme(of_floats) -> Operation:
    def compute(instruction, x, y):
        return of_floats(x, y, "NaN" in instruction.modifiers)

    return _operation(compute, "own", "own", accepts="NaN")


def _largest(instruction: Instruction, x, y):
    larger = np.maximum(x, y)
    return np.maximum(larger, 0) if "relu" in instruction.modifiers else larger


_ORDERS = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le}
_ORDERS |= {"gt": operator.gt, "ge": operator.ge}
_JOINS = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def _compared(instruction: Instruction, x, y, other=None):
    order, *join = instruction.modifiers
    unordered = np.zeros(x.shape, bool)
    if x.dtype.kind == "f":
        unordered = np.isnan(x) | np.isnan(y)
    if order in ("nan", "num"):
        result = unordered if order == "nan" else ~unordered
    else:
        result = _ORDERS[order[:2]](x, y) & ~unordered
        # With a third letter, the result is also true for NaNs.
        result |= unordered & (len(order) == 3)
    return result if other is None else _JOINS[join[0]](result, other)


def _comparison(orders: str) -> Operation:
    accepts = f"{orders} and or xor"
    return _operation(_compared, *_TWO, "pred", writes="pred", accepts=accepts)


_ONE, _TWO = ("own",), ("own", "own")

_MOVES = {
    "mov": _plain(lambda x: x, *_ONE),
    "selp": _plain(lambda x, y, chosen: np.where(chosen, x, y), *_TWO, "pred"),
}

_OF_BITS = {
    "and": _plain(operator.and_, *_TWO),
    "or": _plain(operator.or_, *_TWO),
    "xor": _plain(operator.xor, *_TWO),
    "not": _plain(operator.invert, *_ONE),
}

_OF_INTEGERS = {
    "add": _plain(operator.add, *_TWO),
    "sub": _plain(operator.sub, *_TWO),
    "mul": _operation(integers.product, *_TWO, writes="wide", accepts="lo hi wide"),
    "mad": _plain(lambda x, y, z: x * y + z, *_TWO, "own", accepts="lo"),
    "neg": _plain(operator.neg, *_ONE),
    "abs": _plain(np.abs, *_ONE),
    "min": _plain(np.minimum, *_TWO),
    "max": _operation(_largest, *_TWO, accepts="relu"),
    "shl": _plain(integers.shifted_left, "own", "u32"),
    "shr": _plain(integers.shifted_right, "own", "u32"),
    "shf": _operation(integers.funnel, *_TWO, "u32", accepts="l r wrap"),
    "bfe": _operation(integers.extracted, "own", "u32", "u32"),
    "prmt": _plain(integers.permuted, "b32", "b32", "b32"),
    "lop3": _plain(integers.looked_up, "b32", "b32", "b32", "u32"),
    "clz": _plain(integers.leading_zeros, "own", writes="u32"),
    "setp": _comparison("eq ne lt le gt ge"),
    "cvt": _operation(converted, *_ONE, writes="first", accepts="rn"),
    # Global and generic addresses are the same.
    "cvta": _plain(lambda x: x, *_ONE, accepts="to global"),
}

_OF_FLOATS = {
    "add": _directed(floats.total, 2),
    "sub": _float(operator.sub, 2, "rn"),
    "mul": _float(operator.mul, 2, "rn"),
    "fma": _directed(floats.fma, 3),
    # These are rounded to nearest, although PTX allows larger errors.
    "rcp": _float(lambda x: np.float32(1) / x, 1, "approx"),
    "div": _float(operator.truediv, 2, "full"),
    "sqrt": _float(np.sqrt, 1, "approx"),
    "copysign": _plain(lambda sign, x: np.copysign(x, sign), *_TWO),
    "rsqrt": _approximate(lambda x: 1 / np.sqrt(x)),
    "ex2": _approximate(np.exp2),
    "lg2": _approximate(np.log2),
    "neg": _plain(operator.neg, *_ONE),
    "abs": _plain(np.abs, *_ONE),
    "min": _extreme(floats.smaller),
    "max": _extreme(floats.larger),
    "setp": _comparison("eq ne lt le gt ge equ neu ltu leu gtu geu nan num"),
    "cvt": _operation(
        converted, *_TWO, writes="first", accepts="rn rni rzi rmi rpi sat"
    ),
}

OPERATIONS = {
    "pred": _OF_BITS | _MOVES,
    "integer": _OF_BITS | _MOVES | _OF_INTEGERS,
    "f32": _MOVES | _OF_FLOATS,
    "bf16": {"cvt": _operation(converted, *_ONE, writes="first")},
}
"""Operations, keyed by the family of the instruction's last type and by its name."""
