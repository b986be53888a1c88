"""Where a compiled program keeps its values, by the texts that XLA writes of it."""

import collections
import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Place:
    """Some bytes of one of the program's allocations."""

    allocation: int
    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class Buffers:
    """The assignment of values to memory.

    Args:
      sizes: of the allocations.
      parameters: of the program, to the allocations that hold them.
      places: an instruction's name and the index in its result, to where that is.
    """

    sizes: dict[int, int]
    parameters: dict[int, int]
    places: dict[str, dict[str, Place]]

    def leaves(self, name: str) -> list[Place]:
        """Where an instruction's result is; if it is a tuple, where its parts are."""
        found = self.places.get(name, {})
        # The place of a whole tuple holds nothing but pointers.
        indices = sorted((index for index in found if index), key=_numbers)
        return [found[index] for index in indices or found]


def read_buffers(text: str) -> Buffers:
    """The assignment, from XLA's dump of it.

    >>> buffers = read_buffers('''
    ... allocation 0: size 8, parameter 2, shape |f32[2]| at ShapeIndex {}:
    ...  value: <3 add.1{1} @0> (size=4,offset=4): f32[1]{0}
    ... ''')
    >>> buffers.parameters, buffers.places["add.1"]["1"]
    ({2: 0}, Place(allocation=0, offset=4, size=4))

    From JAX 0.12 an allocation has a page too:

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
            # Statistics follow, and the values once more.
            break
    return Buffers(sizes, parameters, dict(places))


def _numbers(index: str) -> list[int]:
    return [int(number) for number in index.split(",")]
