"""The table of instructions that compute a register from registers, by each thread."""

import dataclasses
import functools
import operator
import re
from collections.abc import Callable

import numpy as np

from tools.gpu_program.ptx import floats, integers
from tools.gpu_program.ptx.bits import NARROW, width
from tools.gpu_program.ptx.conversions import converted
from tools.gpu_program.ptx.faults import UnknownInstruction
from tools.gpu_program.ptx.parser import Instruction


@dataclasses.dataclass(frozen=True)
class Operation:
    """What one kind of instruction does.

    Args:
      compute: of the instruction and its operands as numbers; gives numbers.
      reads: the operands' types: a type, or ``own``, the last one that the instruction
        names, ``first``, or ``wide``, which has twice the bits of its own.
      writes: the result's type, in the same words.
      accepts: modifiers that may be there.
    """

    compute: Callable[..., np.ndarray]
    reads: tuple[str, ...]
    writes: str = "own"
    accepts: frozenset[str] = frozenset()

    def reads_of(self, instruction: Instruction) -> list[str]:
        """The types of an instruction's operands."""
        given = self.reads[: len(instruction.operands) - 1]
        return [_resolved(word, instruction) for word in given]

    def writes_of(self, instruction: Instruction) -> str:
        """The type of an instruction's result."""
        return _resolved(self.writes, instruction)


def operation_of(instruction: Instruction) -> Operation:
    """The table's entry for an instruction.

    Raises:
      UnknownInstruction: if there is none, or none with its modifiers and operands.
    """
    kinds = instruction.types
    family = _family(kinds[-1]) if kinds else ""
    found = OPERATIONS.get((instruction.name, family))
    if (
        found is None
        or not found.accepts.issuperset(instruction.modifiers)
        or len(instruction.operands) > 1 + len(found.reads)
    ):
        raise UnknownInstruction("the interpreter does not know this instruction")
    return found


def _family(kind: str) -> str:
    if kind in ("pred", "f32"):
        return kind
    if kind in NARROW:
        return "narrow"
    return "integer" if re.fullmatch(r"[bus]\d+", kind) else kind


def _resolved(word: str, instruction: Instruction) -> str:
    kind = instruction.types[-1]
    if word == "wide" and "wide" in instruction.modifiers:
        return f"{kind[0]}{2 * width(kind)}"
    if word == "first":
        return instruction.types[0]
    return kind if word in ("own", "wide") else word


def _plain(function, *reads: str, writes="own", accepts=()) -> Operation:
    """An operation that depends on its operands only."""
    compute = lambda _, *inputs: function(*inputs)
    return Operation(compute, reads, writes, frozenset(accepts))


def _float(function, count: int, *accepts: str) -> Operation:
    """Arithmetic on float32."""

    def compute(instruction, *inputs):
        flush = "ftz" in instruction.modifiers
        with np.errstate(all="ignore"):
            inputs = map(floats.flushed, inputs) if flush else inputs
            result = floats.with_one_nan(function(*inputs))
        return floats.flushed(result) if flush else result

    return Operation(compute, ("own",) * count, accepts=frozenset({"ftz", *accepts}))


def _directed(function, count: int) -> Operation:
    """Arithmetic on float32 that is told in which direction to round."""

    def compute(instruction, *inputs):
        named = set(instruction.modifiers).intersection(floats.DIRECTIONS)
        directed = functools.partial(function, direction=named.pop() if named else "rn")
        return _float(directed, count).compute(instruction, *inputs)

    accepts = frozenset({"ftz", *floats.DIRECTIONS})
    return Operation(compute, ("own",) * count, accepts=accepts)


def _approximate(function) -> Operation:
    return _float(lambda x: floats.by_float64(function, x), 1, "approx")


def _extreme(of_floats) -> Operation:
    def compute(instruction, x, y):
        return of_floats(x, y, "NaN" in instruction.modifiers)

    return Operation(compute, ("own", "own"), accepts=frozenset({"NaN"}))


def _largest(instruction: Instruction, x, y):
    larger = np.maximum(x, y)
    return np.maximum(larger, 0) if "relu" in instruction.modifiers else larger


_ORDERS = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le}
_ORDERS |= {"gt": operator.gt, "ge": operator.ge, "lo": operator.lt, "ls": operator.le}
_ORDERS |= {"hi": operator.gt, "hs": operator.ge}
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
        # A third letter says that it also holds of NaNs.
        result |= unordered & (len(order) == 3)
    return result if other is None else _JOINS[join[0]](result, other)


def _comparison(kind: str) -> Operation:
    floating = {f"{order}u" for order in ("eq", "ne", "lt", "le", "gt", "ge")}
    accepts = {*_ORDERS, *_JOINS, *(floating | {"nan", "num"} if kind == "f32" else ())}
    return Operation(_compared, ("own", "own", "pred"), "pred", frozenset(accepts))


_CONVERSIONS = frozenset(
    {"rn", "rz", "ftz", "sat", "satfinite", *floats.INTEGER_ROUNDINGS}
)
_CONVERSION = Operation(converted, ("own", "own"), "first", _CONVERSIONS)
_PRODUCT = frozenset({"lo", "hi", "wide"})
_TWO = ("own", "own")
_BITS = "own", "u32", "u32"

_OF_INTEGERS = {
    "add": _plain(operator.add, *_TWO),
    "sub": _plain(operator.sub, *_TWO),
    "mul": Operation(integers.product, _TWO, "wide", _PRODUCT),
    "mad": Operation(integers.product, (*_TWO, "wide"), "wide", _PRODUCT),
    "neg": _plain(operator.neg, "own"),
    "abs": _plain(np.abs, "own"),
    "min": _plain(np.minimum, *_TWO),
    "max": Operation(_largest, _TWO, accepts=frozenset({"relu"})),
    "shl": _plain(integers.shifted_left, "own", "u32"),
    "shr": _plain(integers.shifted_right, "own", "u32"),
    "shf": Operation(
        integers.funnel,
        ("own", "own", "u32"),
        accepts=frozenset({"l", "r", "wrap", "clamp"}),
    ),
    "bfe": Operation(integers.extracted, _BITS),
    "bfi": _plain(integers.inserted, "own", *_BITS),
    "prmt": _plain(integers.permuted, "b32", "b32", "b32"),
    "lop3": _plain(integers.looked_up, "b32", "b32", "b32", "u32"),
    "popc": _plain(integers.counted, "own", writes="u32"),
    "clz": _plain(integers.leading_zeros, "own", writes="u32"),
}

_OF_BITS = {
    "and": _plain(operator.and_, *_TWO),
    "or": _plain(operator.or_, *_TWO),
    "xor": _plain(operator.xor, *_TWO),
    "not": _plain(operator.invert, "own"),
    "mov": _plain(lambda x: x, "own"),
}

_OF_FLOATS = {
    "add": _directed(floats.total, 2),
    "sub": _float(operator.sub, 2, "rn"),
    "mul": _float(operator.mul, 2, "rn"),
    "fma": _directed(floats.fma, 3),
    # Rounded to nearest where PTX asks for that, and where it allows less.
    "rcp": _float(lambda x: np.float32(1) / x, 1, "rn", "approx"),
    "div": _float(operator.truediv, 2, "rn", "approx", "full"),
    "sqrt": _float(np.sqrt, 1, "rn", "approx"),
    "copysign": _plain(lambda sign, x: np.copysign(x, sign), *_TWO),
    "rsqrt": _approximate(lambda x: 1 / np.sqrt(x)),
    "ex2": _approximate(np.exp2),
    "lg2": _approximate(np.log2),
}

_OF_ALL_FLOATS = {
    "neg": _plain(operator.neg, "own"),
    "abs": _plain(np.abs, "own"),
    "min": _extreme(floats.smaller),
    "max": _extreme(floats.larger),
}

# Of two numbers in a register, the first bits of which are their signs.
_MAGNITUDES = _plain(lambda pair: pair & np.uint32(0x7FFF7FFF), "own")

OPERATIONS = (
    {(name, "integer"): operation for name, operation in _OF_INTEGERS.items()}
    | {(name, "f32"): operation for name, operation in _OF_FLOATS.items()}
    | {
        (name, family): operation
        for family in ("f32", "narrow")
        for name, operation in _OF_ALL_FLOATS.items()
    }
    | {
        (name, family): operation
        for family in ("integer", "pred")
        for name, operation in _OF_BITS.items()
    }
    | {("mov", "f32"): _plain(lambda x: x, "own")}
    | {("abs", f"{half}x2"): _MAGNITUDES for half in ("bf16", "f16")}
    | {
        (name, family): operation
        for family in ("integer", "f32", "narrow")
        for name, operation in {
            "setp": _comparison("f32" if family != "integer" else family),
            "selp": _plain(lambda x, y, p: np.where(p, x, y), *_TWO, "pred"),
            "cvt": _CONVERSION,
        }.items()
    }
)
"""By an instruction's name and the family of its last type."""
