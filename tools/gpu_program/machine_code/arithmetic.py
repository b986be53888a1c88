"""What instructions write, where the words that they read are known.

These are the instructions by which loops of known length are counted today. What others
write is not known, and a loop that needs them is one of unknown trips.
"""

import operator
import re
from collections.abc import Sequence
from typing import TypeGuard

import numpy as np

from tools.gpu_program.machine_code.listing import Instruction

State = dict[str, int]
"""What is known of registers and predicates by name; a predicate is a bool."""

Words = Sequence[int | None]
"""The words of an instruction's other operands than its results, where known."""

Results = Sequence[int | None]
"""What an instruction's results are, as far as known; the rest may be left out."""


def predicate(token: str, state: State) -> bool | None:
    """A predicate or its negation, such as ``!P0``, if it is known."""
    name = token.lstrip("!")
    value = True if name in ("PT", "UPT") else state.get(name)
    return None if value is None else bool(value) != token.startswith("!")


def _word(token: str, state: State) -> int | None:
    """An operand's 32 bits, if they are known."""
    if re.fullmatch(r"[UC]?S?RZ", token):
        return 0
    if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", token):
        return int(token, 0) % 2**32
    if token[:1] in "-~" and (value := _word(token[1:], state)) is not None:
        return (-value if token[0] == "-" else ~value) % 2**32
    return state.get(token)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def execute(i: Instruction, state: State) -> dict[str, int | None]:
    """What an instruction writes, as far as that is known."""
    base = i.base[1:] if i.base.startswith("U") else i.base
    model = _MODELS.get(base)
    if model is None:
        return {}
    values = model(i, [_word(s, state) for s in i.sources], state)
    return dict(zip(i.results, values, strict=False))


def _move(i: Instruction, words: Words, state: State) -> Results:
    return words[:1]


def _zero_pair(i: Instruction, words: Words, state: State) -> Results:
    return [0, 0] if i.sources == ["SRZ"] else []


def _half_constants(i: Instruction, words: Words, state: State) -> Results:
    """``HFMA2 R0, -RZ, RZ, high, low``: how ptxas likes to write a constant."""
    if i.sources[:2] != ["-RZ", "RZ"] or "BF16_V2" in i.modifiers:
        return []
    try:
        high, low = (int(np.float16(float(x)).view(np.uint16)) for x in i.sources[2:])
    except ValueError:
        return []
    return [high << 16 | low]


def _add(i: Instruction, words: Words, state: State) -> Results:
    """The sum; with carries in or out nothing."""
    terms = [w for s, w in zip(i.sources, words, strict=True) if not _is_predicate(s)]
    carries = {x.lstrip("!U") for x in (*i.sources, *i.results) if _is_predicate(x)}
    return [sum(terms) % 2**32] if _all_known(terms) and carries <= {"PT"} else []


def _multiply_add(i: Instruction, words: Words, state: State) -> Results:
    if not _all_known(words) or {"X", "HI", "WIDE"} & set(i.modifiers):
        return []
    a, b, c = words[:3]
    return [(a * b + c) % 2**32]


def _logic_predicates(i: Instruction, words: Words, state: State) -> Results:
    inputs = [predicate(s, state) for s in i.sources[:3]]
    tables = words[3:5]
    if not _all_known(inputs) or not _all_known(tables):
        return []
    index = sum(bit * value for bit, value in zip((4, 2, 1), inputs, strict=True))
    return [bool(table >> index & 1) for table in tables]


def _compare(i: Instruction, words: Words, state: State) -> Results:
    compare = next((m for m in i.modifiers if m in _COMPARISONS), None)
    join = next((m for m in i.modifiers if m in _JOINS), None)
    a, b, *_ = words
    other = predicate(i.sources[2], state)
    if compare is None or join is None or a is None or b is None or other is None:
        return []
    if set(i.modifiers) - {compare, join, "U32"}:
        return []
    if "U32" not in i.modifiers:
        a, b = _signed(a), _signed(b)
    holds = _COMPARISONS[compare](a, b)
    return [_JOINS[join](holds, other), _JOINS[join](not holds, other)]


def _all_known(values: Sequence[int | None]) -> TypeGuard[Sequence[int]]:
    return None not in values


def _is_predicate(token: str) -> bool:
    return bool(re.fullmatch(r"!?U?P[\dT]", token))


_COMPARISONS = {
    name: getattr(operator, name.lower())
    for name in ("EQ", "NE", "LT", "LE", "GT", "GE")
}
_JOINS = {"AND": operator.and_, "OR": operator.or_, "XOR": operator.xor}
_MODELS = {
    "MOV": _move,
    "R2UR": _move,
    "CS2R": _zero_pair,
    "HFMA2": _half_constants,
    "IADD3": _add,
    "IADD": _add,
    "VIADD": _add,
    "IMAD": _multiply_add,
    "PLOP3": _logic_predicates,
    "ISETP": _compare,
}
