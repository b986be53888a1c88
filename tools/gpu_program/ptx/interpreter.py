"""Execute one launch of a kernel, with all threads of many blocks at once."""

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
"""The number of threads that run at once. Their arrays fit into the CPU's caches."""

_MOST_STEPS = 1_000_000
"""The maximum number of steps for a group of blocks. Fused kernels need thousands."""

_UNSPECIFIED = np.uint32(0xA5A5A5A5)
"""The value read from a thread that does not exist. PTX does not specify it."""

_NOTHING = (("griddepcontrol", "wait"), ("fence", "mbarrier_init"))
"""Instructions that have no effect here.

They wait for the previous launch, which has always ended here, or for the
initialization of barriers in shared memory.
"""


def execute(
    kernel: Kernel, launch: Launch, memory: Memory, arguments: list[int]
) -> None:
    """Run a kernel.

    Args:
      kernel: the kernel, from :func:`tools.gpu_program.ptx.parser.parse`.
      launch: the grid of the launch.
      memory: global memory, after a call of ``begin``.
      arguments: the address in ``memory`` of each parameter.

    Raises:
      Fault: if the kernel does something that is not allowed. The message names the
        instruction.
    """
    blocks, size = math.prod(launch.grid), math.prod(launch.block)
    many = max(1, _MOST_THREADS // size)
    for first in range(0, blocks, many):
        numbers = range(first, min(first + many, blocks))
        _Blocks(kernel, launch, memory, arguments, numbers).run()


class _Blocks:
    """Some blocks of a launch, whose threads run together.

    Threads at the same instruction execute it together. If threads are at different
    instructions, the threads at the earliest instruction run first. They reach the
    other threads again where their paths join.
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
        """Run all threads until they end."""
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
                elif instruction.name == "ret":
                    self.running &= ~chosen
                    active = active & ~chosen
                elif chosen.any():
                    self._step(instruction, chosen)
            except Fault as fault:
                where = f"{self.kernel.name}, instruction {at}, `{instruction.text}`"
                raise type(fault)(f"{where}: {fault}") from fault
            _join(waiting, at + 1, active)
        raise Endless(f"{self.kernel.name} did not end after {_MOST_STEPS} steps")

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
        elif (instruction.name, *instruction.parts[:1]) not in _NOTHING:
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
        """Execute ``mov`` between a register and a vector of narrower registers."""
        (kind,) = instruction.types
        result, source = instruction.operands
        parts = split_list(result if result[0] == "{" else source)
        bits = width(kind) // len(parts)
        if result[0] == "{":
            given = self.registers.read(source, kind, active)
            pieces = given.view(unsigned(bits)).reshape(self.count, -1)
            for name, piece in zip(parts, pieces.T, strict=True):
                self.registers.write(name, piece, f"b{bits}", active)
            return
        read = [self.registers.read_part(name, f"b{bits}", active) for name in parts]
        joined = np.stack(read, axis=1).view(unsigned(width(kind))).reshape(-1)
        self.registers.write(result, joined, kind, active)

    def _parameter(self, instruction: Instruction, active: np.ndarray) -> None:
        """Execute ``ld.param``, which loads the address of an array."""
        result, name = instruction.operands
        pointer = self.arguments.get(name.strip("[] "))
        if instruction.modifiers != ("param",) or pointer is None:
            raise UnknownInstruction("the interpreter does not support this parameter")
        value = np.full(self.count, pointer, np.uint64)
        self.registers.write(result, value, "b64", active)

    def _access(self, instruction: Instruction, active: np.ndarray) -> None:
        """Execute ``ld`` or ``st`` with one register or a vector of registers."""
        space, *rest = instruction.modifiers or ("generic",)
        if space == "param":
            return self._parameter(instruction, active)
        if space not in ("global", "shared") or not {"nc", "v2", "v4"}.issuperset(rest):
            raise UnknownInstruction("the interpreter does not support this access")
        is_load = instruction.name == "ld"
        # The address is the first operand of a store.
        registers, address = instruction.operands[:: 1 if is_load else -1]
        names, kind = split_list(registers), instruction.types[-1]
        size = width(kind) // 8
        starts = self._starts(address, size * len(names), space, active)
        access = self._read_memory if is_load else self._write_memory
        for number, name in enumerate(names):
            access(space, starts + number * size, name, kind, active)
        return None

    def _starts(self, operand: str, size: int, space: str, active) -> np.ndarray:
        """Return the position in memory where each thread accesses ``size`` bytes."""
        match = re.fullmatch(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
        if match is None:
            raise UnknownInstruction("the interpreter does not support this address")
        base = self.registers.read(match[1], "b64", active)[active].astype(np.int64)
        addresses = base + int(match[2] or "0", 0)
        if (addresses % size).any():
            raise Misaligned(f"{size} does not divide the address")
        if space == "global":
            return addresses
        inside = (addresses >= 0) & (addresses + size <= self.shared_size)
        block = (np.arange(self.count) // self.size)[active]
        return np.where(inside, addresses + block * self.shared_size, -1)

    def _read_memory(self, space: str, starts, name: str, kind: str, active) -> None:
        """Load a register. ``starts`` has one position for each active thread."""
        size = width(kind) // 8
        loaded = np.zeros((self.count, size), np.uint8)
        by = self._accessors(active)
        loaded[active] = self._memory(space).load(starts, size, by)
        patterns = loaded.view(unsigned(8 * size)).reshape(-1)
        self.registers.write(name, patterns, kind, active)

    def _write_memory(self, space: str, starts, name: str, kind: str, active) -> None:
        """Store a register. ``starts`` has one position for each active thread."""
        patterns = self.registers.read(name, kind, active)[active]
        raw = np.ascontiguousarray(patterns).view(np.uint8)
        values = raw.reshape(-1, width(kind) // 8)
        self._memory(space).store(starts, values, self._accessors(active))

    def _memory(self, space: str) -> Memory:
        return self.memory if space == "global" else self.shared

    def _accessors(self, active: np.ndarray) -> Accessors:
        threads, barriers = self.threads[active], self.barriers[active]
        return Accessors(threads, barriers, self.size, self.team_size)

    def _barrier(self, instruction: Instruction, active: np.ndarray) -> None:
        name, *threads = instruction.operands
        if instruction.parts[0] != "sync" or (not threads and name != "0"):
            raise UnknownInstruction("the interpreter does not support this barrier")
        size = int(threads[0]) if threads else self.size
        by_team = lambda x: x.reshape(-1, size)
        arrived = by_team(active).any(axis=1)
        absent = by_team(self.running & ~active).any(axis=1)
        if (arrived & absent).any():
            raise Divergence("some threads of a block are elsewhere in the program")
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
        warp = min(self.size, lanes.WARP)  # a block may be smaller than a warp
        if self.size % warp or (clamp, members) != ("31", "-1"):
            raise UnknownInstruction("only exchanges of whole warps are supported")
        read = lambda name: self.registers.read(name, "b32", active)
        sources, exists = lanes.sources(mode, read(lane), warp)
        lanes.require(active[sources] | ~active | ~exists)
        values = np.where(exists, read(operand)[sources], _UNSPECIFIED)
        self.registers.write(result, values, "b32", active)

    def _require_whole_warps(self, members: str, active: np.ndarray) -> None:
        """Raise an error if an exchange does not include all threads of its warps."""
        named = self.registers.read(members, "b32", active)[active]
        if self.size % lanes.WARP or (named != 2**32 - 1).any():
            raise UnknownInstruction("only exchanges of whole warps are supported")
        counts = active.reshape(-1, lanes.WARP).sum(axis=1)
        lanes.require((counts == 0) | (counts == lanes.WARP))

    def _reduction(self, instruction: Instruction, active: np.ndarray) -> None:
        """Execute ``redux``, which computes the maximum over all threads of a warp."""
        result, operand, members = instruction.operands
        (kind,) = instruction.types
        if instruction.modifiers != ("sync", "max"):
            raise UnknownInstruction("the interpreter does not support this reduction")
        self._require_whole_warps(members, active)
        numbers = to_numbers(self.registers.read(operand, kind, active), kind)
        largest = numbers.reshape(-1, lanes.WARP).max(axis=1)
        written = to_patterns(np.repeat(largest, lanes.WARP), kind)
        self.registers.write(result, written, kind, active)

    def _election(self, instruction: Instruction, active: np.ndarray) -> None:
        """Execute ``elect``, which chooses one thread of each warp, here the first."""
        result, members = instruction.operands
        self._require_whole_warps(members, active)
        number, _, predicate = result.partition("|")
        chosen = np.arange(self.count) % lanes.WARP == 0
        self.registers.write(number, np.zeros(self.count, np.uint32), "b32", active)
        self.registers.write(predicate, chosen, "pred", active)

    def _matrices(self, instruction: Instruction, active: np.ndarray) -> None:
        """Execute ``ldmatrix`` or ``stmatrix``, for matrices of 8 rows of 16 bytes."""
        *shape, count, space = instruction.modifiers
        is_known = shape == ["sync", "aligned", "m8n8"] and space == "shared"
        if not is_known or count not in ("x1", "x2", "x4"):
            raise UnknownInstruction("the interpreter does not support this exchange")
        self._require_whole_warps("-1", active)
        is_load = instruction.name == "ldmatrix"
        # The address is the first operand of a store.
        names, address = instruction.operands[:: 1 if is_load else -1]
        access = self._read_memory if is_load else self._write_memory
        rows = np.full(self.count, -1)
        rows[active] = self._starts(address, 16, "shared", active)
        for number, name in enumerate(split_list(names)):
            starts = lanes.matrix_starts(rows, number)[active]
            access("shared", starts, name, "b32", active)


_SPECIAL = {
    "ld": _Blocks._access,
    "st": _Blocks._access,
    "bar": _Blocks._barrier,
    "shfl": _Blocks._exchange,
    "redux": _Blocks._reduction,
    "elect": _Blocks._election,
    "ldmatrix": _Blocks._matrices,
    "stmatrix": _Blocks._matrices,
}
"""Instructions that use more than the registers of their own thread."""


def _team_size(kernel: Kernel, block_size: int) -> int:
    """Return the number of neighboring threads that wait at the kernel's barriers."""
    sizes = {
        int(instruction.operands[1])
        for instruction in kernel.instructions
        if instruction.name == "bar" and len(instruction.operands) == 2
    }
    if len(sizes) > 1 or any(block_size % size for size in sizes):
        raise UnknownInstruction(
            f"barriers of {sorted(sizes)} threads in one kernel are not supported"
        )
    return min(sizes, default=block_size)


def _join(waiting: dict[int, np.ndarray], at: int, threads: np.ndarray) -> None:
    if threads.any():
        waiting[at] = waiting[at] | threads if at in waiting else threads
