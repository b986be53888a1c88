"""The grid of a kernel launch."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a kernel, with its grid, its block size and its shared memory.

    A launch inside a loop of the program counts once.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int

    @property
    def threads(self) -> int:
        """The number of threads in all blocks."""
        return math.prod(self.grid) * math.prod(self.block)
