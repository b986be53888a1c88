"""The instructions of a compiled program, from its HLO text."""

import dataclasses
import re

_LINE = re.compile(r"\s*(ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(?:, (.*)|$)")


@dataclasses.dataclass(frozen=True)
class Node:
    """One HLO instruction.

    Args:
      name: of it.
      shape: of its result, or of each part of a tuple.
      op: such as ``fusion``.
      arguments: the text between the parentheses: operands, or a constant's value.
      attributes: the text after them.
      is_root: whether its result is the program's.
    """

    name: str
    shape: str
    op: str
    arguments: str
    attributes: str
    is_root: bool

    @property
    def operands(self) -> tuple[str, ...]:
        """Names; from JAX 0.12 ``name#1`` is part 1 of a tuple."""
        return tuple(re.findall(r"%([\w.\-]+(?:#\d+)?)", self.arguments))

    @property
    def index(self) -> int:
        """Which part of a tuple a ``get-tuple-element`` gives."""
        return int(re.findall(r"\bindex=(\d+)", self.attributes)[0])


def read_entry(text: str) -> list[Node]:
    """The entry computation's instructions, in the order in which they run.

    >>> read_entry('''
    ... ENTRY %main (x: f32[2]) -> (f32[2]) {
    ...   %x = f32[2]{0} parameter(0)
    ...   %y = (f32[2]{0}, u8[9]{0}) fusion(%x), kind=kLoop
    ...   ROOT %z = (f32[2]{0}) tuple(%y#1)
    ... }''')[2].operands
    ('y#1',)
    """
    return read_nodes(text.partition("\nENTRY")[2])


def read_nodes(text: str) -> list[Node]:
    """The instructions of all computations."""
    found = filter(None, map(_LINE.match, text.splitlines()))
    return [Node(x[2], x[3], x[4], x[5], x[6] or "", bool(x[1])) for x in found]
