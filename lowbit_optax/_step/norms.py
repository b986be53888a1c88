"""Norms of gradients that an inner update computes, such as for clipping.

A norm over all gradients is a sum over each, for which XLA launches one or two kernels
per leaf. Here these sums are found in the update's graph, to be computed together.
What is not found is left to XLA.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.nodes import Call, Node, is_constant_number
from lowbit_optax._step.prepared import PreparedStep
from pallas_kernels.platforms import Implementation
from pallas_kernels.reductions import MIN_ARRAYS, sums_of_squares


def sums_of_gradients(
    wanted: Sequence[Node],
    grads: Sequence[Node],
    prepared: PreparedStep,
    implementation: Implementation,
) -> dict:
    """The sums of squares of single gradients that an update's results need.

    Args:
      wanted: the results.
      grads: per leaf, the gradient.
      prepared: the step.
      implementation: as in :func:`pallas_kernels.fused_update`.

    Returns:
      The values of the nodes that are such sums.
    """
    numbers = {
        node: i
        for i, (node, grad) in enumerate(zip(grads, prepared.given_grads, strict=True))
        if node.aval.dtype == jnp.float32 and grad.dtype.itemsize <= 4
    }
    found = {}
    for call in _calls(wanted):
        grad = _squared_and_summed(call)
        if grad in numbers:
            found[call.outputs[0]] = numbers[grad]
    if len(found) < MIN_ARRAYS:
        return {}
    factor = next(iter(prepared.guard.scalars), None)
    arrays = [prepared.given_grads[i] for i in found.values()]
    sums = sums_of_squares(arrays, factor, implementation)
    return dict(zip(found, sums, strict=True))


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
