"""What a compiled program runs, moves, copies and communicates, by its HLO text."""

import collections
import dataclasses
import re
import typing

import jax

from tools.hlo_arrays import Array, arrays
from tools.hlo_nodes import Node, read_entry, read_nodes

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
_IN_PLACE = 'custom_call_target="ConcatBitcast"'
_SLICES = ("slice", "dynamic-slice")
_UPDATE = "dynamic-update-slice"
_OF_SCALARS = (2, 4, 6)
"""Numbers of a TPU's memories for semaphores and scalars."""


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
      written, read: its results and operands, each read once and whole; of a slice
        what is read or written of it. Memories for scalars are not counted.
    """

    name: str
    op: str
    written: tuple[Array, ...]
    read: tuple[Array, ...]

    @property
    def moved(self) -> int:
        """Bytes read and written, as the arrays are laid out."""
        return sum(x.stored for x in self._arrays)

    @property
    def without_padding(self) -> int:
        """The same for the arrays' elements alone."""
        return sum(x.size for x in self._arrays)

    @property
    def of_memory(self) -> int:
        """Bytes that the device's memory moves; others stay on the chip."""
        return sum(x.stored for x in self._arrays if x.space == 0)

    @property
    def _arrays(self) -> tuple[Array, ...]:
        arrays = self.written + self.read
        return tuple(x for x in arrays if x.space not in _OF_SCALARS)


def entry(compiled: jax.stages.Compiled) -> list[Instruction]:
    """The entry computation's instructions that do something, in their order.

    An asynchronous pair is one. Loops are not looked into.
    """
    nodes = read_entry(text(compiled))
    types, ends = _types(nodes), {}
    for node in nodes:
        if node.op.endswith("-done"):
            ends |= dict.fromkeys(node.operands, types[node.name])
    return [
        _moving(
            node.name,
            node.op,
            # The tuple of an asynchronous pair's start has its operands too.
            ends.get(node.name, types[node.name]),
            [types.get(x, ()) for x in node.operands],
        )
        for node in nodes
        if node.op not in _WITHOUT_WORK
        and not node.op.endswith(_ENDS)
        and _IN_PLACE not in node.attributes
    ]


def _moving(name: str, op: str, written, operands) -> Instruction:
    """An instruction; slices move what they cut out or write, not the whole array."""
    kind, read = op.removesuffix("-start"), sum(operands, ())
    if kind in _SLICES:
        read = _within(read[0], written)
    elif kind == _UPDATE:
        whole, read = read[:2]
        written, read = _within(whole, (read,)), (read,)
    return Instruction(name, op, written, read)


def _within(whole: Array, parts: tuple[Array, ...]) -> tuple[Array, ...]:
    """Parts of an array, in its memory."""
    return tuple(dataclasses.replace(part, space=whole.space) for part in parts)


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
    nodes = read_nodes(text(compiled))
    types, found = _types(nodes), []
    for node in nodes:
        target = re.search(r'custom_call_target="(__cublas[^"]*)"', node.attributes)
        if target or node.op == "dot":
            (first,), (second,) = (types[name] for name in node.operands[:2])
            precision = re.findall(r'"operand_precision":\[([^\]]*)\]', node.attributes)
            found.append(
                MatrixProduct(
                    target[1] if target else "dot",
                    (first.dtype, second.dtype),
                    tuple(re.findall(r"\w+", "".join(precision))),
                )
            )
    return found


def collectives(compiled: jax.stages.Compiled) -> list[str]:
    """The operations by which devices exchange data, anywhere in the program."""
    ops = (node.op.removesuffix("-start") for node in read_nodes(text(compiled)))
    return [op for op in ops if op in COLLECTIVES]


def exchanged(compiled: jax.stages.Compiled) -> dict[str, int]:
    """By kind of collective, the bytes of all their results; those of a loop once."""
    found = collections.Counter()
    for node in read_nodes(text(compiled)):
        # Of an asynchronous pair the end counts.
        kind = node.op.removesuffix("-done")
        if kind in COLLECTIVES:
            found[kind] += _bytes_of(node)
    return found


def copies(compiled: jax.stages.Compiled) -> list[int]:
    """Bytes of each copy's result, anywhere in the program, loops included."""
    nodes = read_nodes(text(compiled))
    return [_bytes_of(node) for node in nodes if node.op in ("copy", "copy-start")]


def _types(nodes: list[Node]) -> dict[str, tuple[Array, ...]]:
    """Instructions' results by name, and the parts of tuples by ``name#1``."""
    types = {node.name: arrays(node.shape) for node in nodes}
    for name, parts in list(types.items()):
        types |= {f"{name}#{number}": (part,) for number, part in enumerate(parts)}
    return types


def _bytes_of(node: Node) -> int:
    """Bytes of an instruction's results, without their layouts' padding."""
    return sum(x.size for x in arrays(node.shape))
