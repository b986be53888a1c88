"""The smallest set of values from which others can be computed again.

Each value is an edge whose capacity is its size. Flow comes from the values that are
not computed again, runs along cheap calls, and goes to those that are wanted. A minimal
cut is a smallest set of values that stop it: with these kept, the cheap calls give all
that are wanted.

References:
  Chen, Xu, Zhang, Guestrin 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

import collections
import itertools
import math
import typing
from collections.abc import Callable, Sequence

from lowbit_optax._jaxprs.graph import Call, Node

_SOURCE, _SINK = "source", "sink"


def smallest_kept(
    wanted: Sequence[Node],
    is_cheap: Callable[[Call], bool],
    size: Callable[[Node], int],
) -> list[Node]:
    """Values to keep, of least total size.

    Args:
      wanted: the values that must be kept or computed again.
      is_cheap: whether a call may be computed again.
      size: of a value in bytes; 0 for those that are there anyway.

    >>> import jax, jax.numpy as jnp
    >>> from lowbit_optax._jaxprs.program import trace_program
    >>> wide = lambda x: (x.astype(jnp.float32) ** 2, x.astype(jnp.float32) + 1)
    >>> program, _ = trace_program(wide, jnp.ones(3, jnp.bfloat16))
    >>> kept = smallest_kept(program.outputs, lambda _: True, lambda x: 3)
    >>> [x.aval.dtype.name for x in kept]
    ['bfloat16']
    """
    flow = _Flow()
    order: dict[Node, None] = {}
    waiting = [node for node in wanted if node.constant is None]
    for node in waiting:
        flow.add((node, "kept"), _SINK, math.inf)
    while waiting:
        node = waiting.pop()
        if node in order:
            continue
        order[node] = None
        flow.add((node, "made"), (node, "kept"), size(node))
        if node.call is None or not is_cheap(node.call):
            flow.add(_SOURCE, (node, "made"), math.inf)
            continue
        for value in node.call.inputs:
            if value.constant is None:
                flow.add((value, "kept"), (node, "made"), math.inf)
                waiting.append(value)
    flow.fill()
    # Of several cuts the one next to the sink, with which least is computed again.
    behind = flow.reaching_sink()
    return [
        node
        for node in order
        if (node, "kept") in behind and (node, "made") not in behind
    ]


def calls_between(wanted: Sequence[Node], kept: Sequence[Node]) -> list[Call]:
    """The calls that compute wanted values from those that are kept, in order."""
    there, found = set(kept), set()
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node in there or node.call is None:
            continue
        there.add(node)
        found.add(node.call)
        waiting += node.call.inputs
    return sorted(found, key=lambda call: call.number)


class _Flow:
    """A network, in which edges are filled along shortest paths."""

    def __init__(self):
        self._left = collections.defaultdict(dict)

    def add(self, start, end, capacity) -> None:
        """Add an edge."""
        self._left[start][end] = self._left[start].get(end, 0) + capacity
        self._left[end].setdefault(start, 0)

    def fill(self) -> None:
        """Let flow through until nothing more gets from the source to the sink."""
        while (path := self._path()) is not None:
            edges = list(itertools.pairwise(path))
            most = min(self._left[a][b] for a, b in edges)
            for a, b in edges:
                self._left[a][b] -= most
                self._left[b][a] += most

    def reaching_sink(self) -> set:
        """The vertices from which more could flow to the sink."""
        into = collections.defaultdict(list)
        for start, ends in self._left.items():
            for end, left in ends.items():
                if left > 0:
                    into[end].append(start)
        found, waiting = {_SINK}, [_SINK]
        while waiting:
            for start in into[waiting.pop()]:
                if start not in found:
                    found.add(start)
                    waiting.append(start)
        return found

    def _path(self) -> list | None:
        before: dict[typing.Any, typing.Any] = {_SOURCE: None}
        waiting = collections.deque([_SOURCE])
        while waiting:
            vertex = waiting.popleft()
            for end, left in self._left[vertex].items():
                if left > 0 and end not in before:
                    before[end] = vertex
                    waiting.append(end)
                    if end == _SINK:
                        path = [end]
                        while (end := before[end]) is not None:
                            path.append(end)
                        return path[::-1]
        return None
