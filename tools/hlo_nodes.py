"""Parse the HLO text of a compiled program into instructions."""

import dataclasses
import re

_HEAD = re.compile(r"(?:ENTRY )?%(\S+) \(.*\{$")
_LINE = re.compile(r"\s*(ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(?:, (.*)|$)")


@dataclasses.dataclass(frozen=True)
class Node:
    """One HLO instruction.

    Args:
      name: the name of the instruction.
      shape: the type of its result, which may be a tuple.
      op: its operation, such as ``fusion``.
      arguments: the text between the parentheses: the operands, or the value of a
        constant.
      attributes: the text after the parentheses.
      is_root: whether it returns the result of its computation.
    """

    name: str
    shape: str
    op: str
    arguments: str
    attributes: str
    is_root: bool

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands. In JAX 0.12, ``name#1`` is part 1 of a tuple."""
        return tuple(re.findall(r"%([\w.\-]+(?:#\d+)?)", self.arguments))

    @property
    def index(self) -> int:
        """The part of a tuple that a ``get-tuple-element`` returns."""
        return int(re.findall(r"\bindex=(\d+)", self.attributes)[0])

    @property
    def named(self) -> list[str]:
        """All names in its attributes, such as those of the computations it runs."""
        return re.findall(r"%([\w.\-]+)", self.attributes)


def read_entry(text: str) -> list[Node]:
    """Return the instructions of the entry computation, in the order in which they run.

    >>> read_entry('''
    ... ENTRY %main (x: f32[2]) -> (f32[2]) {
    ...   %x = f32[2]{0} parameter(0)
    ...   %y = (f32[2]{0}, u8[9]{0}) fusion(%x), kind=kLoop
    ...   ROOT %z = (f32[2]{0}) tuple(%y#1)
    ... }''')[2].operands
    ('y#1',)
    """
    return read_computations(text)[entry_of(text)]


def entry_of(text: str) -> str:
    """Return the name of the entry computation."""
    return re.findall(r"^ENTRY %(\S+) ", text, re.MULTILINE)[0]


def read_nodes(text: str) -> list[Node]:
    """Return the instructions of all computations."""
    return [node for nodes in read_computations(text).values() for node in nodes]


def read_computations(text: str) -> dict[str, list[Node]]:
    """Return the instructions of each computation by name."""
    found, nodes = {}, []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            nodes = found[head[1]] = []
        elif x := _LINE.match(line):
            nodes.append(Node(x[2], x[3], x[4], x[5], x[6] or "", bool(x[1])))
    return found
