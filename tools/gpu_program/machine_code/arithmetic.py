"""Compute the results of instructions whose operands are known."""

import operator
import re
from collections.abc import Sequence
from typing import TypeGuard

import numpy as np

from tools.gpu_program.machine_code.listing import Instruction

State = dict[str, int]
"""The known values of registers and predicates by name. Predicates are bools."""

Words = Sequence[int | None]
"""The words of an instruction's source operands; None if a word is unknown."""

Results = Sequence[int | None]
"""The results of an instruction; None if a result is unknown.

Unknown results at the end may be missing.
"""


def predicate(token: str, state: State) -> bool | None:
    """Return the value of a predicate such as ``P0`` or ``!P0``, or None if unknown."""
    name = token.lstrip("!")
    value = True if name in ("PT", "UPT") else state.get(name)
    return None if value is None else bool(value) != token.startswith("!")


def _word(token: str, state: State) -> int | None:
    """Return the 32 bits of an operand, or None if they are unknown."""
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
    """Return the values that an instruction writes, keyed by register or predicate."""
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
    """Execute ``HFMA2 R0, -RZ, RZ, high, low``, which ptxas uses to load constants."""
    if i.sources[:2] != ["-RZ", "RZ"] or "BF16_V2" in i.modifiers:
        return []
    try:
        high, low = (int(np.float16(float(x)).view(np.uint16)) for x in i.sources[2:])
    except ValueError:
        return []
    return [high << 16 | low]


def _add(i: Instruction, words: Words, state: State) -> Results:
    """Execute IADD3, whose predicates are carries (carry-out in the results)."""
    carries = [predicate(s, state) for s in i.sources if _is_predicate(s)]
    terms = [w for s, w in zip(i.sources, words, strict=True) if not _is_predicate(s)]
    if not _all_known(terms) or not _all_known(carries):
        return []
    negated = any(s[0] in "-~" and s[1:2] in "RU" for s in i.sources)
    total = sum(terms) + sum(carries)
    carry = total >> 32 if total >> 32 < 2 and not negated else None
    return [total % 2**32, None if carry is None else bool(carry)]


def _multiply_add(i: Instruction, words: Words, state: State) -> Results:
    carry = predicate(i.sources[3], state) if "X" in i.modifiers else False
    a, b, c = words[:3]
    product = 0 if 0 in (a, b) else None if a is None or b is None else a * b
    if product is None or c is None or carry is None:
        return []
    if {"HI", "WIDE"} & set(i.modifiers):
        return []
    return [(product + c + carry) % 2**32]


def _shift_add(i: Instruction, words: Words, state: State) -> Results:
    if i.modifiers or len(words) != 3 or not _all_known(words) or len(i.results) > 1:
        return []
    return [((words[0] << words[2]) + words[1]) % 2**32]


def _shift(i: Instruction, words: Words, state: State) -> Results:
    low, by, high = words
    kind = i.opcode.partition("SHF.")[2]
    if by is None or by > 31:
        return []
    if kind == "L.U32" and low is not None:
        return [(low << by) % 2**32]
    if kind == "R.U32.HI" and high is not None:
        return [high >> by]
    if kind == "R.S32.HI" and high is not None:
        return [(_signed(high) >> by) % 2**32]
    return []


def _logic(i: Instruction, words: Words, state: State) -> Results:
    """Execute LOP3, which also returns whether any bit of the result is set."""
    *words, table = words[:4]
    if table is None:
        return []
    # An unknown word does not matter if the table ignores it.
    result = 0
    for k in range(8):
        if table >> k & 1:
            term = 2**32 - 1
            for word, bit in zip(words, (4, 2, 1), strict=True):
                if word is None:
                    if (table >> (k ^ bit)) & 1 == 0:
                        return []
                else:
                    term &= word if k & bit else ~word
            result |= term
    result %= 2**32
    if _is_predicate(i.results[0]):
        plain = i.sources[4:] in (["!PT"], ["!UPT"])
        return [bool(result) if plain else None, result]
    return [result]


def _logic_predicates(i: Instruction, words: Words, state: State) -> Results:
    inputs = [predicate(s, state) for s in i.sources[:3]]
    tables = words[3:5]
    if not _all_known(inputs) or not _all_known(tables):
        return []
    index = sum(bit * value for bit, value in zip((4, 2, 1), inputs, strict=True))
    return [bool(table >> index & 1) for table in tables]


def _select(i: Instruction, words: Words, state: State) -> Results:
    holds = predicate(i.sources[2], state)
    return [] if holds is None else [words[0] if holds else words[1]]


def _compare(i: Instruction, words: Words, state: State) -> Results:
    """Execute ISETP. ``.EX`` compares high words, given a comparison of low words."""
    compare = next((m for m in i.modifiers if m in _COMPARISONS), None)
    join = next((m for m in i.modifiers if m in _JOINS), None)
    a, b, *_ = words
    if compare is None or join is None or a is None or b is None:
        return []
    others = [predicate(s, state) for s in i.sources[2:]]
    if set(i.modifiers) - {compare, join, "U32", "EX"} or not _all_known(others):
        return []
    if "U32" not in i.modifiers:
        a, b = _signed(a), _signed(b)
    holds = _COMPARISONS[compare](a, b)
    if "EX" in i.modifiers:
        if compare in ("EQ", "NE"):
            holds = holds and others[1] if compare == "EQ" else holds or others[1]
        else:
            holds = others[1] if a == b else holds
    return [_JOINS[join](holds, others[0]), _JOINS[join](not holds, others[0])]


def _extreme(i: Instruction, words: Words, state: State) -> Results:
    least = predicate(i.sources[2], state)
    a, b = words[:2]
    if least is None or a is None or b is None or set(i.modifiers) - {"U32", "S32"}:
        return []
    value = _signed if "U32" not in i.modifiers else lambda word: word
    return [a if (value(a) <= value(b)) == least else b]


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
    "LEA": _shift_add,
    "SHF": _shift,
    "LOP3": _logic,
    "PLOP3": _logic_predicates,
    "SEL": _select,
    "ISETP": _compare,
    "IMNMX": _extreme,
    "VIMNMX": _extreme,
}
