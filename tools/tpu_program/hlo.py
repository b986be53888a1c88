"""What a compiled TPU program moves, copies and communicates, by its HLO text."""

import dataclasses
import functools
import math
import re

import jax

from tools.gpu_program.hlo import COLLECTIVES, copies, memory, text

__all__ = ["Instruction", "collectives", "copies", "entry", "memory"]

KERNELS = ("fusion", "custom-call", "copy")
"""Instructions that run as kernels over arrays."""

_WITHOUT_WORK = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
_ENDS = ("-done", "-update")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of the entry computation.

    Args:
      name, op: of the instruction.
      written, read: bytes of its results and operands.
    """

    name: str
    op: str
    written: int
    read: int

    @property
    def moved(self) -> int:
        """Bytes read and written, if each operand is read once and whole."""
        return self.written + self.read


def entry(compiled: jax.stages.Compiled) -> list[Instruction]:
    """The entry computation's instructions that do something, in their order.

    Of an asynchronous pair only the start counts. Loops are not looked into.
    """
    _, _, lines = text(compiled).partition("\nENTRY")
    sizes: dict[str, int] = {}
    found = []
    for line in lines.splitlines():
        match = re.match(
            r"\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)", line
        )
        if not match:
            continue
        name, type_text, op, operands = match.groups()
        parts = _array_bytes(type_text)
        sizes |= {f"{name}#{number}": size for number, size in enumerate(parts)}
        sizes[name] = sum(parts)
        if op in _WITHOUT_WORK or op.endswith(_ENDS):
            continue
        names = re.findall(r"%([\w.\-]+(?:#\d+)?)", operands)
        read = sum(sizes.get(operand, 0) for operand in names)
        found.append(Instruction(name, op, sizes[name], read))
    return found


def collectives(compiled: jax.stages.Compiled) -> list[str]:
    """The operations by which devices exchange data, anywhere in the program."""
    names = "|".join(COLLECTIVES)
    return re.findall(rf" ({names})(?:-start)?\(", text(compiled))


def _array_bytes(type_text: str) -> list[int]:
    """Bytes of an array, or of each array of a tuple, without a layout's padding."""
    return [
        math.ceil(_bits(kind) * math.prod(int(d) for d in dims.split(",") if d) / 8)
        for kind, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", type_text)
    ]


@functools.cache
def _bits(kind: str) -> int:
    number = re.search(r"\d+", kind)
    return int(number.group()) if number else 8
