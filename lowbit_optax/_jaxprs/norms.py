"""Norms of gradients that an inner update computes, such as for clipping.

A norm over all gradients is a sum over each, for which XLA launches one or two kernels
per leaf. Here these sums are found in the update's graph, to be computed together.
What is not found is left to XLA.
"""

from collections.abc import Collection, Sequence

from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.graph import Call, Node, made_of, without_zero


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
    for node in made_of(wanted):
        array = None if node.call is None else _squared_and_summed(node.call)
        if array is not None and array in arrays:
            found[node] = array
    return found


def _squared_and_summed(call: Call) -> Node | None:
    """The array whose squares a call sums over all axes; None for other calls."""
    if call.primitive is not p.reduce_sum_p:
        return None
    (terms,) = call.inputs
    is_whole = len(call.params["axes"]) == len(terms.aval.shape)
    return _root(terms) if is_whole else None


def _root(node: Node) -> Node | None:
    """The node whose square another one is, beside zeros; None if it is no square."""
    call = node.call
    if call is None:
        return None
    # Optax adds the square of the imaginary part, which is 0.
    term = without_zero(call)
    if term is not None:
        return _root(term)
    first, *others = call.inputs
    is_square = (
        call.primitive is p.square_p
        or (call.primitive is p.integer_pow_p and call.params["y"] == 2)
        or (call.primitive is p.mul_p and others == [first])
    )
    return first if is_square else None
