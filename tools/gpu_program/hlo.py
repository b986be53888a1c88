"""What a compiled program launches, moves, copies and communicates, by its HLO text."""

import math
import re

import jax

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
)
"""Names of the instructions by which devices exchange data."""

_ELEMENT_BYTES = {"pred": 1, "u8": 1, "s8": 1, "bf16": 2, "f16": 2, "u16": 2, "s16": 2}
_ELEMENT_BYTES |= {"f32": 4, "u32": 4, "s32": 4, "f64": 8, "s64": 8, "u64": 8}


def text(compiled: jax.stages.Compiled) -> str:
    """The program as HLO."""
    found = compiled.as_text()
    if found is None:
        raise ValueError("the compiler gives no text of this program")
    return found


def memory(compiled: jax.stages.Compiled):
    """The bytes of the program's arguments, results and temporary memory."""
    found = compiled.memory_analysis()
    if found is None:
        raise ValueError("the compiler does not analyse this program's memory")
    return found


def kernels(compiled: jax.stages.Compiled) -> list[tuple[str, int]]:
    """``(name, bytes read and written)`` of the entry computation's kernels.

    An operand that a kernel reads in part counts in full; loops are not looked into.
    """
    sizes, found = {}, []
    _, _, entry = text(compiled).partition("\nENTRY")
    for line in entry.splitlines():
        match = re.match(
            r"\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)", line
        )
        if not match:
            continue
        name, type_text, op, operands = match.groups()
        parts = _parts(type_text)
        # ``name#1`` is part 1 of a tuple.
        sizes |= {f"{name}#{number}": size for number, size in enumerate(parts)}
        sizes[name] = sum(parts)
        if op in ("fusion", "custom-call", "copy"):
            names = re.findall(r"%([\w.\-]+(?:#\d+)?)", operands)
            read = sum(sizes.get(operand, 0) for operand in names)
            found.append((name, sizes[name] + read))
    return found


def copies(compiled: jax.stages.Compiled) -> list[int]:
    """Bytes of each copy's result, anywhere in the program, loops included."""
    found = re.findall(r"= (.*?) copy(?:-start)?\(", text(compiled))
    return [sum(_parts(type_text)) for type_text in found]


def _parts(type_text: str) -> list[int]:
    """Bytes of an array, or of each array of a tuple."""
    return [
        _ELEMENT_BYTES.get(kind, 1) * math.prod(int(d) for d in dims.split(",") if d)
        for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", type_text)
    ]
