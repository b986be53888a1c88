"""Run a whole compiled program from the PTX of its kernels."""

import dataclasses
import re
import typing

import jax
import ml_dtypes
import numpy as np

from tools.gpu_program.dump import compile_with_dump
from tools.gpu_program.launch import Launch
from tools.gpu_program.machine_code.compilation import launches_of
from tools.gpu_program.ptx.bits import integers
from tools.gpu_program.ptx.buffers import Buffers, Place, read_buffers
from tools.gpu_program.ptx.faults import Fault
from tools.gpu_program.ptx.interpreter import execute
from tools.gpu_program.ptx.memory import Memory
from tools.gpu_program.ptx.parser import Kernel, parse
from tools.hlo_nodes import Node, read_entry

_GAP = 4096
"""The number of bytes between allocations, so that bad accesses hit no other one."""

_DTYPES = {"pred": np.bool_, "bf16": ml_dtypes.bfloat16}
_DTYPES |= {f"f{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)}
_DTYPES |= {kind: integers(kind) for kind in ("s8", "s16", "s32", "s64")}
_DTYPES |= {kind: integers(kind) for kind in ("u8", "u16", "u32", "u64")}


class Unsupported(Exception):
    """The program has operations other than a sequence of kernels and copies."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Args:
      sources: the PTX of the kernels, keyed by kernel name.
      launches: the kernels and grids that instructions launch, keyed by instruction.
      arguments: the indices of the operands and results that an instruction passes to
        its kernel, keyed by instruction. Other instructions pass all of them.
      nodes: the instructions in order.
      buffers: the places of the instructions' results.
      outputs: a tree of the shapes and dtypes of the results.
    """

    sources: dict[str, str]
    launches: dict[str, tuple[str, Launch]]
    arguments: dict[str, tuple[int, ...]]
    nodes: tuple[Node, ...]
    buffers: Buffers
    outputs: typing.Any

    def run(self, *args) -> typing.Any:
        """Run the program.

        Args:
          *args: trees of arrays, in the order of the program's arguments.

        Returns:
          The tree of results, as numpy arrays.

        Raises:
          ValueError: if the sizes of the arguments do not match the program.
          Fault: if a kernel does something that is not allowed, or does not write all
            of a result.
          Unsupported: if the program has operations other than kernels and copies.
        """
        arguments = [np.asarray(x) for x in jax.tree.leaves(args)]
        sizes = {
            number: self.buffers.sizes[allocation]
            for number, allocation in self.buffers.parameters.items()
        }
        if sizes != {number: x.nbytes for number, x in enumerate(arguments)}:
            raise ValueError(
                "the sizes of the arguments differ from those that were lowered"
            )
        run = _Run(self, arguments)
        for node in self.nodes:
            run.step(node)
        shapes, tree = jax.tree.flatten(self.outputs)
        return tree.unflatten(
            run.output(number, x.shape, x.dtype) for number, x in enumerate(shapes)
        )

    def with_source(self, name: str, source: str) -> "Program":
        """Return the program with the PTX of a kernel replaced."""
        return dataclasses.replace(self, sources=self.sources | {name: source})


def compile_program(lowered: jax.stages.Lowered) -> Program:
    """Compile a program so that :meth:`Program.run` can run it.

    Args:
      lowered: the program, from ``targets.lower_for``, for one device.
    """
    dump = compile_with_dump(lowered)
    entry = re.compile(r"\.entry\s+([\w$]+)")
    sources = {name: source for source in dump.ptx for name in entry.findall(source)}
    thunks = launches_of(dump.thunks)
    annotated = re.findall(
        r'profile_annotation: "(.*)"\s+thunk_id: (\d+)', dump.annotations
    )
    launches = {node: thunks[int(n)] for node, n in annotated if int(n) in thunks}
    for node, kernel in dump.mosaic.items():
        launches[node] = kernel.name, kernel.launch
        sources[kernel.name] = kernel.ptx
    return Program(
        sources,
        launches,
        {node: kernel.arguments for node, kernel in dump.mosaic.items()},
        tuple(read_entry(dump.hlo)),
        read_buffers(dump.buffers),
        lowered.out_info,
    )


class _Run:
    """A run of a program, with its memory and the places of all values."""

    def __init__(self, program: Program, arguments: list[np.ndarray]):
        self.program = program
        self.kernels: dict[str, Kernel] = {}
        self.values: dict[str, list[Place]] = {}
        self.starts, size = {}, _GAP
        for allocation, count in program.buffers.sizes.items():
            self.starts[allocation] = size
            # XLA aligns allocations to 256 bytes.
            size += -(-count // 256) * 256 + _GAP
        self.memory = Memory(size)
        for number, allocation in program.buffers.parameters.items():
            self.memory.fill(self.starts[allocation], arguments[number])

    def step(self, node: Node) -> None:
        """Run one instruction."""
        given = [self._value(operand) for operand in node.operands]
        if node.op == "bitcast":
            (self.values[node.name],) = given
        elif node.op == "tuple":
            self.values[node.name] = [place for places in given for place in places]
        elif node.op == "get-tuple-element":
            self.values[node.name] = [given[0][node.index]]
        else:
            self.values[node.name] = self.program.buffers.leaves(node.name)
            if node.op != "parameter":
                self._execute(node, [place for places in given for place in places])

    def _value(self, operand: str) -> list[Place]:
        name, _, part = operand.partition("#")
        places = self.values[name]
        return [places[int(part)]] if part else places

    def output(self, number: int, shape: tuple[int, ...], dtype) -> np.ndarray:
        """Return the result of the program that has the index ``number``."""
        (root,) = (node for node in self.program.nodes if node.is_root)
        place = self.values[root.name][number]
        try:
            return self.memory.array(self._start(place), shape, dtype)
        except Fault as fault:
            raise type(fault)(f"result {number}: {fault}") from fault

    def _execute(self, node: Node, given: list[Place]) -> None:
        results = self.values[node.name]
        if node.op == "constant":
            self.memory.fill(self._start(results[0]), _constant(node))
        elif node.op == "copy":
            source, target = self._start(given[0]), self._start(results[0])
            self.memory.copy(source, target, results[0].size)
        elif node.name in self.program.launches:
            self._launch(node, given, results)
        else:
            raise Unsupported(f"{node.name}: no kernel runs {node.op}")

    def _launch(self, node: Node, given: list[Place], results: list[Place]) -> None:
        name, launch = self.program.launches[node.name]
        if name not in self.kernels:
            self.kernels |= parse(self.program.sources[name])
        kernel = self.kernels[name]
        arguments = [*given, *results]
        chosen = self.program.arguments.get(node.name)
        if chosen is not None:
            arguments = [arguments[number] for number in chosen]
        if len(kernel.parameters) != len(arguments):
            # XLA passes an array to its own kernels only once.
            arguments = list(dict.fromkeys(arguments))
        if len(kernel.parameters) != len(arguments):
            raise Unsupported(
                f"{node.name}: the kernel has {len(kernel.parameters)} parameters, got "
                f"{len(arguments)} arrays"
            )
        ranges = lambda places: [(self._start(p), p.size) for p in places]
        self.memory.begin(ranges([*given, *results]), ranges(results))
        starts = [self._start(place) for place in arguments]
        execute(kernel, launch, self.memory, starts)

    def _start(self, place: Place) -> int:
        return self.starts[place.allocation] + place.offset


def _constant(node: Node) -> np.ndarray:
    kind = node.shape.partition("[")[0]
    if "..." in node.arguments or kind not in _DTYPES:
        raise Unsupported(f"{node.name}: the HLO lacks the value of the constant")
    words = re.findall(r"[^\s{},]+", node.arguments)
    if kind == "pred":
        return np.array([word == "true" for word in words])
    number = int if kind[0] in "su" else float
    return np.array([number(word) for word in words]).astype(_DTYPES[kind])
