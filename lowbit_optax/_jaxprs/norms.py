"""Norms of gradients that an inner update computes, such as for clipping.

A norm over all gradients is a sum over each, for which XLA launches one or two kernels
per leaf. Here these sums are found in the update's graph, to be computed together.
What is not found is left to XLA.
"""

from collections.abc import Collection, Sequence

import numpy as np
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.graph import Call, Node, is_constant_number


def sums_of_squares_of(
    arrays: Collection[Node], wanted: Sequence[Node]
) -> dict[Node, Node]:
    """The sums of squares of single arrays that some results need.

    Args:
      arrays: nodes, such as gradients.
      wanted: the results.

    Returns:
      By such a sum, the array.
    """
    found = {}
    for call in _calls(wanted):
        array = _squared_and_summed(call)
        if array in arrays:
            found[call.outputs[0]] = array
    return found


def _calls(wanted: Sequence[Node]) -> dict[Call, None]:
    """What the wanted nodes are computed by, always in the same order."""
    calls: dict[Call, None] = {}
    waiting = list(wanted)
    while waiting:
        call = waiting.pop().call
        if call is not None and call not in calls:
            calls[call] = None
            waiting.extend(call.inputs)
    return calls


def _squared_and_summed(call: Call) -> Node | None:
    """What the call sums the squares of, over all axes; None if it does not."""
    if call.primitive is not p.reduce_sum_p:
        return None
    (terms,) = call.inputs
    is_whole = len(call.params["axes"]) == len(terms.aval.shape)
    return _squared(terms) if is_whole else None


def _squared(node: Node) -> Node | None:
    """Of what a node is the square, or the sum of the square and zeros, or None."""
    call = node.call
    if call is None:
        return None
    first, *others = call.inputs
    if call.primitive in (p.add_p, p.add_jaxvals_p):
        # Optax adds the square of the imaginary part, which is 0.
        (second,) = others
        if _is_zero(second):
            return _squared(first)
        return _squared(second) if _is_zero(first) else None
    is_square = (
        call.primitive is p.square_p
        or (call.primitive is p.integer_pow_p and call.params["y"] == 2)
        or (call.primitive is p.mul_p and others == [first])
    )
    return first if is_square else None


def _is_zero(node: Node) -> bool:
    """Whether it is 0 everywhere, whatever the inputs."""
    if node.call is None:
        return is_constant_number(node) and not np.any(np.asarray(node.constant))
    if node.call.primitive not in (p.broadcast_in_dim_p, p.square_p):
        return False
    return _is_zero(node.call.inputs[0])
