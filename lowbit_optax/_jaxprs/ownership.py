"""Find the leaf whose elements a result of a traced function follows.

    updates[i] = f(grads[i], masters[i], moments[i], scalars)

A function of several leaves is *elementwise* if it computes each element of a result
from the elements of one leaf's arrays at the same place, and from numbers that are the
same for all elements.
"""

import enum
from collections.abc import Hashable, Iterable, Mapping, Sequence

from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.elementwise import is_elementwise
from lowbit_optax._jaxprs.graph import UNCHANGED, Call, Graph, Node, calls_between
from pallas_kernels.operations import ClosedJaxpr


class Mark(enum.Enum):
    """An owner that is not a leaf.

    ``PLACED`` marks arrays without a leaf whose elements may differ, such as random
    numbers and tables. ``MIXED`` marks results of several leaves, or of several places.
    """

    PLACED = enum.auto()
    MIXED = enum.auto()


Owner = Hashable | None
"""A leaf or a :class:`Mark`; None for numbers that are the same for all elements."""

_OTHERS = UNCHANGED | {
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "complex", "conj",
    "cosh", "digamma", "erf", "erf_inv", "erfc", "imag", "lgamma", "nextafter", "real",
    "rem", "round", "sinh",
}  # fmt: skip
"""Names of elementwise primitives that kernels do not compute."""


def owners_of_results(
    closed: ClosedJaxpr, owners: Sequence[Owner], carried: Mapping[int, int]
) -> list[Owner]:
    """Return the owner of each result of a function that is called repeatedly.

    Args:
      closed: jaxpr of the function.
      owners: the owner of each input: its leaf, or None for a scalar without a leaf.
      carried: dict from the index of a result to that of the input which has its value
        in the next call.
    """
    graph, owners = Graph(closed, selects=True), list(owners)
    for i, node in enumerate(graph.inputs):
        if owners[i] is None and not node.is_scalar:
            owners[i] = Mark.PLACED
    while True:
        results = _owners(graph, owners)
        later = list(owners)
        for result, given in carried.items():
            later[given] = _joined([owners[given], results[result]])
        if later == owners:
            return results
        owners = later


def _owners(graph: Graph, owners: Sequence[Owner]) -> list[Owner]:
    found = dict(zip(graph.inputs, owners, strict=True))

    def owner(node: Node) -> Owner:
        return found.get(node, None if node.is_scalar else Mark.PLACED)

    for call in calls_between(graph.outputs, found):
        joined = _joined(map(owner, call.inputs))
        found |= {x: _owner_of(x, call, joined) for x in call.outputs}
    return [owner(node) for node in graph.outputs]


def _owner_of(result: Node, call: Call, joined: Owner) -> Owner:
    name = call.primitive.name
    if is_elementwise(call.primitive) or name in _OTHERS:
        return joined
    if joined not in (None, Mark.PLACED):
        return Mark.MIXED
    if result.is_scalar:
        return None
    return joined if call.primitive is p.broadcast_in_dim_p else Mark.PLACED


def _joined(owners: Iterable[Owner]) -> Owner:
    """Return the owner of an elementwise result of values with these owners."""
    found = {x for x in owners if x is not None}
    return Mark.MIXED if len(found) > 1 else next(iter(found), None)
