"""What is known of one kernel: its launches, loops, memory accesses and counts."""

import collections
import dataclasses
from collections.abc import Mapping

from tools.gpu_program.launch import Launch


class UnknownTrips(ValueError):
    """A loop's trip count is not a constant that could be found."""


@dataclasses.dataclass(frozen=True)
class Access:
    """An instruction that reads or writes global memory.

    ``masked`` if it has a predicate or some threads may not come to it. ``executed`` is
    how often one thread does, a loop of unknown trips counted once.
    """

    bits: int
    store: bool
    masked: bool
    executed: float


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel's machine code; sizes are in bytes, counts are of one thread.

    ``static_shared`` is what the code itself declares; a launch's ``shared`` is what it
    asks for besides, as Triton's kernels do. ``instructions`` are those of the code
    that can be reached, each once. ``lost_loops`` are the addresses of the loops whose
    trip counts were not found.
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
        """Instructions that a thread executes.

        Args:
          conditional: count both sides of every branch on data, an upper bound; if
            False, neither side, but for threads that leave the kernel.

        Raises:
          UnknownTrips: if the trip count of a loop was not found.
        """
        return sum(self.opcodes(conditional).values())

    def opcodes(self, conditional: bool = True) -> Mapping[str, float]:
        """:meth:`executed` by opcode, such as ``LDG.E.64`` or ``MUFU.RCP``."""
        if self.lost_loops:
            lost = ", ".join(map(hex, self.lost_loops))
            raise UnknownTrips(
                f"{self.name}: trip counts not found for the loops at {lost}"
            )
        counts: dict[str, float] = collections.defaultdict(float)
        for block in self.blocks:
            if conditional or not block.conditional:
                for opcode in block.opcodes:
                    counts[opcode] += block.visits
        return counts

    @property
    def global_stores(self) -> collections.Counter:
        """Store instructions in the code by their width in bits."""
        return collections.Counter(x.bits for x in self.accesses if x.store)

    @property
    def masked_stores(self) -> int:
        """Store instructions in the code that not every thread executes."""
        return sum(x.store and x.masked for x in self.accesses)


@dataclasses.dataclass(frozen=True)
class Block:
    """A basic block that a thread comes to ``visits`` times.

    A loop around it whose trips were not found is counted once. ``conditional`` if it
    is on one side of a branch on data; ``masked`` if so or if some threads may have
    left the kernel before it.
    """

    opcodes: tuple[str, ...]
    visits: float
    conditional: bool
    masked: bool


def instructions_per_parameter(
    kernel: Kernel, parameters: int, conditional: bool = True
) -> float:
    """Instructions that all threads of all launches execute, per parameter.

    Args:
      kernel: from :func:`tools.gpu_program.machine_code.program`.
      parameters: how many parameters the program updates.
      conditional: as in :meth:`Kernel.executed`.
    """
    if not kernel.launches:
        raise ValueError(f"no launch of {kernel.name} was found")
    threads = sum(launch.threads for launch in kernel.launches)
    return kernel.executed(conditional) * threads / parameters
