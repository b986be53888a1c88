"""The facts of one kernel: launches, loops, memory accesses and instruction counts."""

import collections
import dataclasses
from collections.abc import Mapping

from tools.gpu_program.launch import Launch


class UnknownTrips(ValueError):
    """The trip count of a loop is unknown."""


@dataclasses.dataclass(frozen=True)
class Access:
    """An instruction that reads or writes global memory.

    Args:
      bits: the width of the access.
      store: whether the instruction writes.
      masked: whether the instruction has a predicate, or some threads may not reach it.
      executed: how often one thread executes the instruction. A loop with an unknown
        trip count counts once.
    """

    bits: int
    store: bool
    masked: bool
    executed: float


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The machine code of one kernel. Sizes are in bytes, and counts are per thread.

    Args:
      name: the name of the kernel.
      registers: the number of registers.
      stack: the size of the stack frame.
      spill_stores: the size of all stores that spill registers.
      spill_loads: the size of all loads of spilled registers.
      static_shared: the shared memory that the code declares. A launch may add more in
        ``Launch.shared``, as launches of Triton's kernels do.
      launches: the launches of the kernel.
      instructions: the number of reachable instructions in the code.
      lost_loops: the addresses of loops with unknown trip counts.
      accesses: the accesses to global memory.
      blocks: the basic blocks.
    """

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int
    launches: tuple[Launch, ...]
    instructions: int
    lost_loops: tuple[int, ...]
    accesses: tuple[Access, ...]
    blocks: tuple["Block", ...] = dataclasses.field(repr=False)

    def executed(self, conditional: bool = True) -> float:
        """Return the number of instructions that a thread executes.

        Args:
          conditional: whether to count both sides of every branch on data, which gives
            an upper bound. If False, neither side counts, except after branches that
            leave the kernel.

        Raises:
          UnknownTrips: if the trip count of a loop is unknown.
        """
        return sum(self.opcodes(conditional).values())

    def opcodes(self, conditional: bool = True) -> Mapping[str, float]:
        """Return :meth:`executed` per opcode, such as ``LDG.E.64`` or ``MUFU.RCP``."""
        if self.lost_loops:
            lost = ", ".join(map(hex, self.lost_loops))
            raise UnknownTrips(
                f"{self.name}: no trip counts were found for the loops at {lost}"
            )
        counts: dict[str, float] = collections.defaultdict(float)
        for block in self.blocks:
            if conditional or not block.conditional:
                for opcode in block.opcodes:
                    counts[opcode] += block.visits
        return counts

    @property
    def global_stores(self) -> collections.Counter:
        """The number of store instructions, keyed by width in bits."""
        return collections.Counter(x.bits for x in self.accesses if x.store)

    @property
    def masked_stores(self) -> int:
        """The number of store instructions that not every thread executes."""
        return sum(x.store and x.masked for x in self.accesses)


@dataclasses.dataclass(frozen=True)
class Block:
    """A basic block.

    Args:
      opcodes: the opcodes of the block's instructions.
      visits: how often a thread reaches the block. A loop with an unknown trip count
        counts once.
      conditional: whether the block is on one side of a branch on data.
      masked: whether the block is conditional, or some threads may leave the kernel
        before they reach it.
    """

    opcodes: tuple[str, ...]
    visits: float
    conditional: bool
    masked: bool


def instructions_per_parameter(
    kernel: Kernel, parameters: int, conditional: bool = True
) -> float:
    """Return how many instructions all threads of all launches execute per parameter.

    Args:
      kernel: the kernel, from :func:`tools.gpu_program.machine_code.program`.
      parameters: the number of parameters that the program updates.
      conditional: see :meth:`Kernel.executed`.
    """
    if not kernel.launches:
        raise ValueError(f"no launch of {kernel.name} was found")
    threads = sum(launch.threads for launch in kernel.launches)
    return kernel.executed(conditional) * threads / parameters
