"""What a compiled program runs, moves, copies and communicates, by its HLO text."""

import dataclasses
import functools
import math
import re
import typing

import jax

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
)
"""Names of the instructions by which devices exchange data."""

KERNELS = ("fusion", "custom-call", "copy")
"""Names of the instructions that run as kernels over arrays."""

_WITHOUT_WORK = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
_ENDS = ("-done", "-update")


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
        # ``name#1`` is part 1 of a tuple.
        sizes |= {f"{name}#{number}": size for number, size in enumerate(parts)}
        sizes[name] = sum(parts)
        if op in _WITHOUT_WORK or op.endswith(_ENDS):
            continue
        names = re.findall(r"%([\w.\-]+(?:#\d+)?)", operands)
        read = sum(sizes.get(operand, 0) for operand in names)
        found.append(Instruction(name, op, sizes[name], read))
    return found


def kernels(compiled: jax.stages.Compiled) -> list[tuple[str, int]]:
    """``(name, bytes read and written)`` of the entry computation's kernels.

    An operand that a kernel reads in part counts in full; loops are not looked into.
    """
    return [(x.name, x.moved) for x in entry(compiled) if x.op in KERNELS]


class MatrixProduct(typing.NamedTuple):
    """A matrix product of a compiled program.

    Args:
      target: the library's function, or ``dot`` in a fusion.
      dtypes: of both operands, as HLO names them.
      precision: of each operand, as ``jax.lax.Precision`` names them; empty in a dot.
    """

    target: str
    dtypes: tuple[str, str]
    precision: tuple[str, ...]


def products(compiled: jax.stages.Compiled) -> list[MatrixProduct]:
    """The matrix products by cuBLAS or as a dot, anywhere; those of a loop once."""
    lines = text(compiled).splitlines()
    types = {}
    found = []
    for line in lines:
        match = re.match(r"\s*(?:ROOT )?%([\w.\-]+) = (\(?)(\w+)\[", line)
        if match and not match[2]:
            types[match[1]] = match[3]
    for line in lines:
        match = re.search(r" (dot|custom-call)\(%([\w.\-]+), %([\w.\-]+)", line)
        target = re.search(r'custom_call_target="(__cublas[^"]*)"', line)
        if not match or (match[1] == "custom-call" and not target):
            continue
        precision = re.search(r'"operand_precision":\[([^\]]*)\]', line)
        found.append(
            MatrixProduct(
                target[1] if target else "dot",
                (types[match[2]], types[match[3]]),
                tuple(re.findall(r"\w+", precision[1])) if precision else (),
            )
        )
    return found


def collectives(compiled: jax.stages.Compiled) -> list[str]:
    """The operations by which devices exchange data, anywhere in the program."""
    names = "|".join(COLLECTIVES)
    return re.findall(rf" ({names})(?:-start)?\(", text(compiled))


def exchanged(compiled: jax.stages.Compiled) -> dict[str, int]:
    """By kind of collective, the bytes of all their results; those of a loop once."""
    names = "|".join(COLLECTIVES)
    # Several arrays can be exchanged at once. Of an asynchronous pair the end counts.
    found: dict[str, int] = {}
    for type_text, name in re.findall(
        rf"= (.*?) ({names})(?:-done)?\(", text(compiled)
    ):
        found[name] = found.get(name, 0) + sum(_array_bytes(type_text))
    return found


def copies(compiled: jax.stages.Compiled) -> list[int]:
    """Bytes of each copy's result, anywhere in the program, loops included."""
    found = re.findall(r"= (.*?) copy(?:-start)?\(", text(compiled))
    return [sum(_array_bytes(type_text)) for type_text in found]


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
