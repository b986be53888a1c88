"""The registers of many threads, as arrays."""

import re

import numpy as np

from tools.gpu_program.launch import Launch
from tools.gpu_program.ptx.bits import to_numbers, unsigned, width
from tools.gpu_program.ptx.faults import Uninitialised, UnknownInstruction
from tools.gpu_program.ptx.parser import Kernel

_GARBAGE = np.uint64(0x7A5B3C6D9E4F2B17)


class Registers:
    """The registers of a kernel. Each is an array of one bit pattern per thread.

    Args:
      kernel: the kernel that declares the registers.
      launch: the grid of the launch.
      blocks: the indices of the blocks to which the threads belong.
    """

    def __init__(self, kernel: Kernel, launch: Launch, blocks: range):
        self._kinds = kernel.registers
        self._values: dict[str, np.ndarray] = {}
        # The threads that have written a register, unless all threads have.
        self._written: dict[str, np.ndarray] = {}
        size = int(np.prod(launch.block))
        self._count = len(blocks) * size
        self._constants = dict(kernel.shared)
        threads = np.tile(np.arange(size), len(blocks))
        numbers = np.repeat(np.asarray(blocks), size)
        for name, index, extent in (
            ("tid", threads, launch.block),
            ("ctaid", numbers, launch.grid),
        ):
            for axis, length in zip("xyz", extent, strict=True):
                self._values[f"%{name}.{axis}"] = (index % length).astype(np.uint32)
                self._constants[f"%n{name}.{axis}"] = length
                index = index // length

    def read(self, operand: str, kind: str, active: np.ndarray) -> np.ndarray:
        """Read the patterns of an operand, which may be a constant.

        Args:
          operand: the name of a register, or a constant; ``!`` negates a predicate.
          kind: the type of the operand.
          active: the threads that read it.

        Raises:
          Uninitialised: if one of these threads has not written the register.
        """
        if operand[0] == "!":
            return ~self.read(operand[1:], kind, active)
        values = self._values.get(operand)
        if values is None:
            if operand in self._kinds:
                raise Uninitialised(f"{operand} is read before it is written")
            return self._constant(operand, kind)
        written = self._written.get(operand)
        if written is not None and (active & ~written).any():
            raise Uninitialised(f"{operand} is read where it was not written")
        return values if kind == "pred" else values.astype(unsigned(width(kind)))

    def read_part(self, name: str, kind: str, active: np.ndarray) -> np.ndarray:
        """Read a part of a vector, which may be uninitialized.

        LLVM puts uninitialized registers into vectors if no instruction reads these
        parts of the vector. They get a pattern that would be visible in results.
        """
        if name in self._kinds and name not in self._values:
            return np.full(self._count, _GARBAGE).astype(unsigned(width(kind)))
        return self.read(name, kind, active)

    def write(
        self, name: str, patterns: np.ndarray, kind: str, active: np.ndarray
    ) -> None:
        """Write a register.

        Args:
          name: the name of the register, or ``_`` to write nothing.
          patterns: one pattern for each thread.
          kind: the type of the patterns. Signed types are extended by their sign.
          active: the threads that write.
        """
        if name == "_":
            return
        own = self._kinds.get(name)
        if own is None:
            raise UnknownInstruction(f"{name} is not a register")
        if own != "pred":
            numbers = to_numbers(patterns, kind) if kind[0] == "s" else patterns
            patterns = numbers.astype(unsigned(width(own)))
        if not active.all():
            old = self._values.get(name)
            written = self._written.get(name, np.full(self._count, old is not None))
            patterns = np.where(active, patterns, 0 if old is None else old)
            patterns = patterns.astype(bool if own == "pred" else unsigned(width(own)))
            self._written[name] = written | active
        else:
            self._written.pop(name, None)
        self._values[name] = patterns

    def _constant(self, operand: str, kind: str) -> np.ndarray:
        if operand in self._constants:
            number = self._constants[operand]
        elif match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", operand):
            number = int(match[1], 16)
        elif re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", operand):
            number = int(operand.rstrip("U"), 0)
        else:
            raise UnknownInstruction(f"{operand} is neither a register nor a number")
        if kind == "pred":
            return np.full(self._count, number != 0)
        bits = width(kind)
        return np.full(self._count, number % 2**bits, unsigned(bits))
