"""The entry computation of a compiled program, in the order in which it runs."""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Node:
    """One HLO instruction.

    Args:
      name: of it.
      shape: of its result.
      op: such as ``fusion``.
      operands: names; ``name#1`` is part 1 of a tuple.
      value: of a constant, its text.
      index: of a ``get-tuple-element``.
      is_root: whether its result is the program's.
    """

    name: str
    shape: str
    op: str
    operands: tuple[str, ...]
    value: str
    index: int
    is_root: bool


def read_entry(text: str) -> list[Node]:
    """The entry computation's instructions, from scheduled HLO.

    >>> read_entry('''
    ... ENTRY %main (x: f32[2]) -> f32[2] {
    ...   %x = f32[2]{0} parameter(0)
    ...   ROOT %y = f32[2]{0} fusion(%x), kind=kLoop
    ... }''')[1].operands
    ('x',)

    From JAX 0.12 parts of tuples need no instruction of their own:

    >>> read_entry('''
    ... ENTRY %main (x: f32[2]) -> (f32[2]) {
    ...   ROOT %z = (f32[2]{0}) tuple(%y#1)
    ... }''')[0].operands
    ('y#1',)
    """
    if "is_scheduled=true" not in text and "HloModule" in text:
        raise ValueError("the program is not scheduled")
    _, _, entry = text.partition("\nENTRY")
    nodes = []
    for line in entry.splitlines()[1:]:
        match = re.match(
            r"\s*(ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*?)\)(?:,|$)", line
        )
        if match:
            index = re.search(r"\bindex=(\d+)", line[match.end() :])
            nodes.append(
                Node(
                    name=match[2],
                    shape=match[3],
                    op=match[4],
                    operands=tuple(re.findall(r"%([\w.\-]+(?:#\d+)?)", match[5])),
                    value=match[5] if match[4] == "constant" else "",
                    index=int(index[1]) if index else 0,
                    is_root=bool(match[1]),
                )
            )
    return nodes
