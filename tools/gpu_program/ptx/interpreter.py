"""The execution of one launch of a kernel, all threads of many blocks at once."""

import math
import re

import numpy as np

from tools.gpu_program.launch import Launch
from tools.gpu_program.ptx import lanes
from tools.gpu_program.ptx.bits import to_numbers, to_patterns, unsigned, width
from tools.gpu_program.ptx.faults import (
    Divergence,
    Endless,
    Fault,
    Misaligned,
    UnknownInstruction,
)
from tools.gpu_program.ptx.memory import Accessors, Memory
from tools.gpu_program.ptx.operations import operation_of
from tools.gpu_program.ptx.parser import Instruction, Kernel, split_list
from tools.gpu_program.ptx.registers import Registers

_MOST_THREADS = 8192
"""How many run at once: as many as keep numpy busy and fit in its caches."""

_MOST_STEPS = 1_000_000
"""Of blocks that run at once. Those of a fused kernel take some thousands."""

_UNSPECIFIED = np.uint32(0xA5A5A5A5)
"""What a thread reads from one that was never started. PTX does not specify it."""

_NOTHING = ("griddepcontrol", "membar", "fence")
"""Instructions that order one launch after another, which launches here always are."""


def execute(
    kernel: Kernel, launch: Launch, memory: Memory, arguments: list[int]
) -> None:
    """Run a kernel.

    Args:
      kernel: from :func:`tools.gpu_program.ptx.parser.parse`.
      launch: its grid.
      memory: global memory, in which the launch has begun.
      arguments: addresses in it, one for each parameter.

    Raises:
      Fault: for what no kernel may do, naming the instruction.
    """
    blocks, size = math.prod(launch.grid), math.prod(launch.block)
    many = max(1, _MOST_THREADS // size)
    for first in range(0, blocks, many):
        numbers = range(first, min(first + many, blocks))
        _Blocks(kernel, launch, memory, arguments, numbers).run()


class _Blocks:
    """Some blocks of a launch.

    Threads go on together while they are at one instruction. Where they part, those
    that are furthest behind go first, and wait for no one, so that all meet again
    where their ways do.
    """

    def __init__(self, kernel, launch, memory, arguments, blocks: range):
        self.kernel = kernel
        self.size = math.prod(launch.block)
        self.count = len(blocks) * self.size
        self.registers = Registers(kernel, launch, blocks)
        self.memory = memory
        self.shared_size = launch.shared + kernel.static_shared
        self.shared = Memory(len(blocks) * self.shared_size)
        self.arguments = dict(zip(kernel.parameters, arguments, strict=True))
        self.threads = np.arange(self.count) + blocks.start * self.size
        self.barriers = np.zeros(self.count, np.int64)
        self.team_size = _team_size(kernel, self.size)
        self.running = np.ones(self.count, bool)

    def run(self) -> None:
        """Run all threads to their ends."""
        waiting = {0: np.ones(self.count, bool)}
        for _ in range(_MOST_STEPS):
            if not waiting:
                return
            at = min(waiting)
            active = waiting.pop(at)
            instruction = self.kernel.instructions[at]
            try:
                chosen = self._guarded(instruction, active)
                if instruction.name == "bra":
                    target = self.kernel.labels[instruction.operands[0]]
                    _join(waiting, target, chosen)
                    active = active & ~chosen
                elif instruction.name in ("ret", "exit"):
                    self.running &= ~chosen
                    active = active & ~chosen
                elif chosen.any():
                    self._step(instruction, chosen)
            except Fault as fault:
                where = f"{self.kernel.name}, instruction {at}, `{instruction.text}`"
                raise type(fault)(f"{where}: {fault}") from fault
            _join(waiting, at + 1, active)
        raise Endless(f"{self.kernel.name}: {_MOST_STEPS} steps, and no end")

    def _guarded(self, instruction: Instruction, active: np.ndarray) -> np.ndarray:
        if instruction.guard is None:
            return active
        holds = self.registers.read(instruction.guard, "pred", active)
        return active & (holds ^ instruction.negated)

    def _step(self, instruction: Instruction, active: np.ndarray) -> None:
        special = _SPECIAL.get(instruction.name)
        if special is not None:
            special(self, instruction, active)
        elif instruction.name == "mov" and "{" in instruction.text:
            self._repack(instruction, active)
        elif instruction.name not in _NOTHING:
            self._compute(instruction, active)

    def _compute(self, instruction: Instruction, active: np.ndarray) -> None:
        operation = operation_of(instruction)
        result, *operands = instruction.operands
        kinds = operation.reads_of(instruction)
        numbers = [
            to_numbers(self.registers.read(operand, kind, active), kind)
            for operand, kind in zip(operands, kinds, strict=True)
        ]
        kind = operation.writes_of(instruction)
        written = to_patterns(operation.compute(instruction, *numbers), kind)
        self.registers.write(result, written, kind, active)

    def _repack(self, instruction: Instruction, active: np.ndarray) -> None:
        """``mov`` between one register and a vector of narrower ones."""
        (kind,) = instruction.types
        result, source = instruction.operands
        parts = split_list(result if result[0] == "{" else source)
        bits = width(kind) // len(parts)
        part, whole = f"b{bits}", unsigned(width(kind))
        if result[0] == "{":
            given = self.registers.read(source, kind, active)
            for number, name in enumerate(parts):
                piece = (given >> whole(bits * number)).astype(unsigned(bits))
                self.registers.write(name, piece, part, active)
            return
        joined = np.zeros(self.count, whole)
        for number, name in enumerate(parts):
            piece = self.registers.read_part(name, part, active).astype(whole)
            joined |= piece << whole(bits * number)
        self.registers.write(result, joined, kind, active)

    def _load(self, instruction: Instruction, active: np.ndarray) -> None:
        result, address = instruction.operands
        pointer = self.arguments.get(address.strip("[] "))
        # An ``entry`` says that it is a kernel's parameter: PTX 9 writes it out.
        of_kernel = instruction.modifiers in {("param",), ("param", "entry")}
        if of_kernel and pointer is not None:
            value = np.full(self.count, pointer, np.uint64)
            return self.registers.write(result, value, "b64", active)
        space, names, kind = self._access(instruction, result)
        size = width(kind) // 8
        rows = self._start(address, size * len(names), space, active)
        memory, by = self._memory(space), self._accessors(active)
        for number, name in enumerate(names):
            loaded = np.zeros((self.count, size), np.uint8)
            loaded[active] = memory.load(rows + number * size, size, by)
            patterns = loaded.view(unsigned(8 * size)).reshape(-1)
            self.registers.write(name, patterns, kind, active)
        return None

    def _store(self, instruction: Instruction, active: np.ndarray) -> None:
        address, source = instruction.operands
        space, names, kind = self._access(instruction, source)
        size = width(kind) // 8
        rows = self._start(address, size * len(names), space, active)
        memory, by = self._memory(space), self._accessors(active)
        for number, name in enumerate(names):
            patterns = self.registers.read(name, kind, active)[active]
            values = np.ascontiguousarray(patterns).view(np.uint8).reshape(-1, size)
            memory.store(rows + number * size, values, by)

    def _access(self, instruction: Instruction, registers: str):
        """``(space, names of the registers, type of each)`` of a load or store."""
        space, *rest = instruction.modifiers or ("generic",)
        known = {"nc", "v2", "v4", "relaxed", "weak"}
        hints = {"L1", "L2", "evict_first", "evict_last", "no_allocate", "cta", "gpu"}
        if space not in ("global", "shared") or not (known | hints).issuperset(rest):
            raise UnknownInstruction("the interpreter does not know this access")
        return space, split_list(registers), instruction.types[-1]

    def _start(self, operand: str, size: int, space: str, active) -> np.ndarray:
        """Where in their memory threads access ``size`` bytes at once."""
        match = re.fullmatch(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
        if match is None:
            raise UnknownInstruction("the interpreter does not know this address")
        base = self.registers.read(match[1], "b64", active)[active].astype(np.int64)
        addresses = base + int(match[2] or "0", 0)
        if (addresses % size).any():
            raise Misaligned(f"an address that {size} does not divide")
        if space == "global":
            return addresses
        inside = (addresses >= 0) & (addresses + size <= self.shared_size)
        block = (np.arange(self.count) // self.size)[active]
        return np.where(inside, addresses + block * self.shared_size, -1)

    def _memory(self, space: str) -> Memory:
        return self.memory if space == "global" else self.shared

    def _accessors(self, active: np.ndarray) -> Accessors:
        threads, barriers = self.threads[active], self.barriers[active]
        return Accessors(threads, barriers, self.size, self.team_size)

    def _barrier(self, instruction: Instruction, active: np.ndarray) -> None:
        name, *threads = instruction.operands
        if instruction.parts[0] != "sync" or (not threads and name != "0"):
            raise UnknownInstruction("the interpreter does not know this barrier")
        size = int(threads[0]) if threads else self.size
        by_team = lambda x: x.reshape(-1, size)
        arrived = by_team(active).any(axis=1)
        absent = by_team(self.running & ~active).any(axis=1)
        if (arrived & absent).any():
            raise Divergence("some threads of a block are elsewhere")
        names = by_team(self.registers.read(name, "b32", active))[arrived]
        blocks = np.flatnonzero(arrived) * size // self.size
        teams = np.stack([blocks, names[:, 0]])
        if (names != names[:, :1]).any() or np.unique(
            teams, axis=1
        ).shape < teams.shape:
            raise Divergence("threads of different teams wait at one barrier")
        self.barriers += active

    def _exchange(self, instruction: Instruction, active: np.ndarray) -> None:
        result, operand, lane, clamp, members = instruction.operands
        _, mode = instruction.modifiers
        warp = min(self.size, lanes.WARP)  # a block may have fewer threads than a warp
        if self.size % warp or members != "-1":
            raise UnknownInstruction("it is not between the threads of whole warps")
        read = lambda name: self.registers.read(name, "b32", active)
        sources, inside, exists = lanes.sources(mode, read(lane), read(clamp), warp)
        lanes.require(active[sources] | ~active | ~exists)
        values = np.where(exists, read(operand)[sources], _UNSPECIFIED)
        result, _, predicate = result.partition("|")
        self.registers.write(result, values, "b32", active)
        if predicate:
            self.registers.write(predicate, inside, "pred", active)

    def _reduction(self, instruction: Instruction, active: np.ndarray) -> None:
        """``redux``: one number of all threads of a warp."""
        result, operand, members = instruction.operands
        sync, mode = instruction.modifiers
        (kind,) = instruction.types
        named = self.registers.read(members, "b32", active)[active]
        if self.size % lanes.WARP or sync != "sync" or (named != 2**32 - 1).any():
            raise UnknownInstruction("it is not between the threads of whole warps")
        lanes.require_whole_warps(active)
        numbers = to_numbers(self.registers.read(operand, kind, active), kind)
        written = to_patterns(lanes.reduced(mode, numbers), kind)
        self.registers.write(result, written, kind, active)

    def _election(self, instruction: Instruction, active: np.ndarray) -> None:
        """``elect``: one thread of each warp, here the first."""
        result, members = instruction.operands
        if self.size % lanes.WARP or members != "-1":
            raise UnknownInstruction("it is not between the threads of whole warps")
        lanes.require_whole_warps(active)
        number, _, predicate = result.partition("|")
        chosen = np.arange(self.count) % lanes.WARP == 0
        self.registers.write(number, np.zeros(self.count, np.uint32), "b32", active)
        self.registers.write(predicate, chosen, "pred", active)

    def _fence(self, instruction: Instruction, active: np.ndarray) -> None:
        """``fence`` for what was set up of barriers in shared memory: nothing here."""
        if "mbarrier_init" not in instruction.modifiers:
            raise UnknownInstruction("the interpreter does not know this fence")

    def _matrix(self, instruction: Instruction, active: np.ndarray) -> None:
        """``ldmatrix`` and ``stmatrix``: matrices of 8 rows of 16 bytes in a warp."""
        if not {"sync", "aligned", "m8n8", "x1", "x2", "x4", "shared"}.issuperset(
            instruction.modifiers
        ):
            raise UnknownInstruction("the interpreter does not know this exchange")
        lanes.require_whole_warps(active)
        is_load = instruction.name == "ldmatrix"
        registers, address = instruction.operands[:: 1 if is_load else -1]
        rows = np.full(self.count, -1)
        rows[active] = self._start(address, 16, "shared", active)
        by = self._accessors(active)
        for number, name in enumerate(split_list(registers)):
            starts = lanes.matrix_starts(rows, number)[active]
            if is_load:
                loaded = np.zeros((self.count, 4), np.uint8)
                loaded[active] = self.shared.load(starts, 4, by)
                patterns = loaded.view(np.uint32).reshape(-1)
                self.registers.write(name, patterns, "b32", active)
            else:
                patterns = self.registers.read(name, "b32", active)[active]
                values = np.ascontiguousarray(patterns).view(np.uint8).reshape(-1, 4)
                self.shared.store(starts, values, by)

    def _to_global(self, instruction: Instruction, active: np.ndarray) -> None:
        """``cvta``: global and generic addresses are the same."""
        result, operand = instruction.operands
        if "global" not in instruction.modifiers:
            raise UnknownInstruction("the interpreter does not know this space")
        pointer = self.registers.read(operand, "b64", active)
        self.registers.write(result, pointer, "b64", active)


_SPECIAL = {
    "ld": _Blocks._load,
    "st": _Blocks._store,
    "bar": _Blocks._barrier,
    "barrier": _Blocks._barrier,
    "shfl": _Blocks._exchange,
    "redux": _Blocks._reduction,
    "elect": _Blocks._election,
    "fence": _Blocks._fence,
    "ldmatrix": _Blocks._matrix,
    "stmatrix": _Blocks._matrix,
    "cvta": _Blocks._to_global,
}
"""Instructions that need more than their own thread's registers."""


def _team_size(kernel: Kernel, block_size: int) -> int:
    """How many neighbouring threads the kernel's barriers are for, at the least."""
    sizes = {
        int(instruction.operands[1])
        for instruction in kernel.instructions
        if instruction.name in ("bar", "barrier") and len(instruction.operands) == 2
    }
    if len(sizes) > 1 or any(block_size % size for size in sizes):
        raise UnknownInstruction(f"barriers of {sorted(sizes)} threads")
    return min(sizes, default=block_size)


def _join(waiting: dict[int, np.ndarray], at: int, threads: np.ndarray) -> None:
    if threads.any():
        waiting[at] = waiting[at] | threads if at in waiting else threads
