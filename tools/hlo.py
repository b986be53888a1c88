"""Read kernels, bytes moved, copies and collectives from the HLO of a program."""

import collections
import dataclasses
import re
import typing

import jax

from tools.hlo_arrays import Array, arrays
from tools.hlo_nodes import (
    Node,
    entry_of,
    read_computations,
    read_entry,
    read_nodes,
)

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "reduce-scatter",
)
"""Names of the instructions that exchange data between devices."""

KERNELS = ("fusion", "custom-call", "copy")
"""Names of the instructions that run as kernels."""

_WITHOUT_WORK = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
_ENDS = ("-done", "-update")
_IN_PLACE = 'custom_call_target="ConcatBitcast"'
_SLICES = ("slice", "dynamic-slice")
_UPDATE = "dynamic-update-slice"
_OF_SCALARS = (2, 4, 6)
"""Indices of the memories of a TPU that store semaphores and scalars."""


def text(compiled: jax.stages.Compiled) -> str:
    """Return the HLO text of the program."""
    found = compiled.as_text()
    if found is None:
        raise ValueError("the compiler returned no text for this program")
    return found


def memory(compiled: jax.stages.Compiled):
    """Return the bytes of the program's arguments, results and temporary memory."""
    found = compiled.memory_analysis()
    if found is None:
        raise ValueError("the compiler returned no memory analysis for this program")
    return found


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of the entry computation.

    Args:
      name: the name of the instruction.
      op: its operation, such as ``fusion``.
      written: the arrays that it writes, or the written part of an array for a slice.
      read: the arrays that it reads, each once and completely, or the part of an array
        that a slice reads.
    """

    name: str
    op: str
    written: tuple[Array, ...]
    read: tuple[Array, ...]

    @property
    def moved(self) -> int:
        """The number of bytes read and written, including the padding of layouts.

        Accesses to memories for scalars are not counted.
        """
        return sum(x.stored for x in self._arrays)

    @property
    def without_padding(self) -> int:
        """The number of bytes read and written, without padding."""
        return sum(x.size for x in self._arrays)

    @property
    def of_memory(self) -> int:
        """The number of bytes read and written in device memory, off the chip."""
        return sum(x.stored for x in self._arrays if x.space == 0)

    @property
    def _arrays(self) -> tuple[Array, ...]:
        arrays = self.written + self.read
        return tuple(x for x in arrays if x.space not in _OF_SCALARS)


def entry(compiled: jax.stages.Compiled) -> list[Instruction]:
    """Return the instructions of the entry computation that do some work, in order.

    The start and the end of an asynchronous operation count as one instruction.
    Instructions inside loops are not included.
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
            # The result of an asynchronous start is a tuple that includes operands.
            ends.get(node.name, types[node.name]),
            [types.get(x, ()) for x in node.operands],
        )
        for node in nodes
        if node.op not in _WITHOUT_WORK
        and not node.op.endswith(_ENDS)
        and _IN_PLACE not in node.attributes
    ]


def _moving(name: str, op: str, written, operands) -> Instruction:
    """Return an instruction. Slices only move the part that they read or write."""
    kind, read = op.removesuffix("-start"), sum(operands, ())
    if kind in _SLICES:
        read = _within(read[0], written)
    elif kind == _UPDATE:
        whole, read = read[:2]
        written, read = _within(whole, (read,)), (read,)
    return Instruction(name, op, written, read)


def _within(whole: Array, parts: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return the parts with the memory of the whole array."""
    return tuple(dataclasses.replace(part, space=whole.space) for part in parts)


def kernels(compiled: jax.stages.Compiled) -> list[tuple[str, int]]:
    """Return ``(name, bytes moved)`` for each kernel of the entry computation.

    Operands count in full, even if a kernel reads only a part of them. Kernels inside
    loops are not included.
    """
    return [(x.name, x.moved) for x in entry(compiled) if x.op in KERNELS]


class MatrixProduct(typing.NamedTuple):
    """A matrix product of a compiled program.

    Args:
      target: the function of the library, or ``dot`` in a fusion.
      dtypes: HLO's names of the dtypes of both operands.
      precision: the ``jax.lax.Precision`` of each operand; empty for a ``dot``.
    """

    target: str
    dtypes: tuple[str, str]
    precision: tuple[str, ...]


def products(compiled: jax.stages.Compiled) -> list[MatrixProduct]:
    """Return all cuBLAS and dot matrix products. Products in a loop count once."""
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
    """Return the collectives of the program, including the collectives in loops."""
    ops = (node.op.removesuffix("-start") for node in read_nodes(text(compiled)))
    return [op for op in ops if op in COLLECTIVES]


def exchanged(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Return the bytes of the results of each kind of collective in one run.

    A collective in a loop counts once per iteration, and all branches of a conditional
    count. Loops must count from zero to a constant, as those of ``lax.scan`` do.
    """
    computations = read_computations(text(compiled))
    found = collections.Counter()

    def add(name: str, times: int) -> None:
        for node in computations.get(name, ()):
            # The end of an asynchronous operation has the type of the result.
            kind = node.op.removesuffix("-done")
            if kind in COLLECTIVES:
                found[kind] += times * _bytes_of(node)
            inner = times
            if node.op == "while":
                inner *= _iterations(node, computations)
            for called in node.named:
                add(called, inner)

    add(entry_of(text(compiled)), 1)
    return found


def _iterations(loop: Node, computations: dict[str, list[Node]]) -> int:
    """Return the number of a loop's iterations.

    XLA:GPU writes this number into the loop. On TPUs, the condition of the loop
    compares a counter with it.
    """
    if written := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
        return int(written[1])
    (condition,) = re.findall(r"\bcondition=%([\w.\-]+)", loop.attributes)
    limits = [x.arguments for x in computations[condition] if x.op == "constant"]
    if len(limits) != 1:
        raise ValueError(f"the number of iterations of {loop.name} is not constant")
    return int(limits[0])


def copies(compiled: jax.stages.Compiled) -> list[int]:
    """Return the bytes that each copy writes. A copy in a loop counts once."""
    nodes = read_nodes(text(compiled))
    return [_bytes_of(node) for node in nodes if node.op in ("copy", "copy-start")]


def _types(nodes: list[Node]) -> dict[str, tuple[Array, ...]]:
    """Return the results of instructions by name. ``name#1`` is part 1 of a tuple."""
    types = {node.name: arrays(node.shape) for node in nodes}
    for name, parts in list(types.items()):
        types |= {f"{name}#{number}": (part,) for number, part in enumerate(parts)}
    return types


def _bytes_of(node: Node) -> int:
    """Return the bytes of the results of an instruction, without padding."""
    return sum(x.size for x in arrays(node.shape))
