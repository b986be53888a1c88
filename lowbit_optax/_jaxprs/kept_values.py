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
from collections.abc import Callable, Container, Sequence

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
    # Of several cuts the one next to the sink, with which least is computed again.
    behind = flow.fill()
    return [
        node
        for node in order
        if (node, "kept") in behind and (node, "made") not in behind
    ]


class _Flow:
    """A network, in which edges are filled along shortest paths."""

    def __init__(self):
        self._left = collections.defaultdict(dict)

    def add(self, start, end, capacity) -> None:
        """Add an edge."""
        self._left[start][end] = self._left[start].get(end, 0) + capacity
        self._left[end].setdefault(start, 0)

    def fill(self) -> Container:
        """Fill the network. The vertices from which more could flow to the sink."""
        while True:
            following = self._towards_sink()
            if _SOURCE not in following:
                return following
            path = [_SOURCE]
            while path[-1] != _SINK:
                path.append(following[path[-1]])
            edges = list(itertools.pairwise(path))
            amount = min(self._left[a][b] for a, b in edges)
            for a, b in edges:
                self._left[a][b] -= amount
                self._left[b][a] += amount

    def _towards_sink(self) -> dict:
        """By vertex, the next one on a shortest path with room to the sink."""
        following: dict = {_SINK: None}
        waiting = collections.deque([_SINK])
        while waiting and _SOURCE not in following:
            end = waiting.popleft()
            for start in self._left[end]:
                if start not in following and self._left[start][end] > 0:
                    following[start] = end
                    waiting.append(start)
        return following
