"""Read where a compiled program stores its values from XLA's buffer assignment."""

import collections
import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Place:
    """A range of bytes in one of the program's allocations."""

    allocation: int
    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class Buffers:
    """The assignment of values to memory.

    Args:
      sizes: the size of each allocation.
      parameters: the allocation of each parameter of the program.
      places: the places of the results, keyed by the name of the instruction and then
        by the index in its result.
    """

    sizes: dict[int, int]
    parameters: dict[int, int]
    places: dict[str, dict[str, Place]]

    def leaves(self, name: str) -> list[Place]:
        """Return the place of an instruction's result, or of each part of a tuple."""
        found = self.places.get(name, {})
        # The place of a whole tuple only stores pointers.
        indices = sorted((index for index in found if index), key=_numbers)
        return [found[index] for index in indices or found]


def read_buffers(text: str) -> Buffers:
    """Parse XLA's dump of the buffer assignment.

    >>> buffers = read_buffers('''
    ... allocation 0: size 8, parameter 2, shape |f32[2]| at ShapeIndex {}:
    ...  value: <3 add.1{1} @0> (size=4,offset=4): f32[1]{0}
    ... ''')
    >>> buffers.parameters, buffers.places["add.1"]["1"]
    ({2: 0}, Place(allocation=0, offset=4, size=4))

    Since JAX 0.12, an allocation also has a page:

    >>> read_buffers("allocation 3: size 8, page 0, parameter 1, shape").parameters
    {1: 3}
    """
    sizes, parameters = {}, {}
    places = collections.defaultdict(dict)
    allocation = -1
    for line in text.splitlines():
        head = re.match(
            r"allocation (\d+): size (\d+)(?:, page \d+)?(?:, parameter (\d+))?", line
        )
        value = re.match(
            r" value: <\d+ ([^\s{]+)(?:\{([\d,]*)\})? @\d+>"
            r" \(size=(\d+),offset=(\d+)\)",
            line,
        )
        if head:
            allocation = int(head[1])
            sizes[allocation] = int(head[2])
            if head[3]:
                parameters[int(head[3])] = allocation
        elif value:
            place = Place(allocation, int(value[4]), int(value[3]))
            places[value[1]][value[2] or ""] = place
        elif line and not line.startswith((" ", "BufferAssignment")):
            # The rest of the dump repeats the values and has statistics.
            break
    return Buffers(sizes, parameters, dict(places))


def _numbers(index: str) -> list[int]:
    return [int(number) for number in index.split(",")]
