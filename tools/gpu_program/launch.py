"""How often a kernel runs."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its blocks, the threads of each, and shared memory.

    A launch in a loop of the program is one, however often the loop runs.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int

    @property
    def threads(self) -> int:
        """The threads of all blocks."""
        return math.prod(self.grid) * math.prod(self.block)
