"""Quotients of bias-corrected averages, with one scalar factor in place of two.

Adam divides both of its averages by ``1 - b^t``:

    u  = (m / c1) / (sqrt(v / c2) + eps)
    w' = w - eta (u + d w)

In a kernel that is two products per element more than with the factors taken out:

    q  = m / (sqrt(v) + eps sqrt(c2)),    S = sqrt(c2) / c1
    w' = w - (eta S) (q + (d / S) w)

``S`` and the other factors are scalars, computed once per leaf. The averages must be
divided by scalars, not multiplied: c1 and c2 are then not infinite, so that S is not 0
and may be divided by.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.graph import Call, Node, is_zero


@dataclasses.dataclass(frozen=True)
class CorrectedQuotient:
    """``(mean / mean_divisor) / (sqrt(square / square_divisor) + eps)``.

    Args:
      mean, square: of the leaf's shape, float32.
      mean_divisor: c1, a scalar; None where the mean is not divided.
      square_divisor: c2, a scalar.
      eps: a scalar; None for none.
    """

    mean: Node
    mean_divisor: Node | None
    square: Node
    square_divisor: Node
    eps: Node | None


def corrected_quotient(
    call: Call, uses: Mapping[Node, int]
) -> CorrectedQuotient | None:
    """The quotient that a call computes; None if it is none of this form.

    Args:
      call: any.
      uses: by node, how often the program reads it. What others need too is left as it
        is.
    """
    if call.primitive is not p.div_p or not _is_float32(call.outputs[0]):
        return None
    mean, root = call.inputs
    if root.is_scalar or uses[root] > 1:
        return None
    eps = None
    if root.call is not None and root.call.primitive is p.add_p:
        root, eps = root.call.inputs
        if root.is_scalar:
            root, eps = eps, root
        if root.is_scalar or not eps.is_scalar or uses[root] > 1:
            return None
    if root.call is None or root.call.primitive is not p.sqrt_p:
        return None
    (corrected,) = root.call.inputs
    if corrected.call is not None and corrected.call.primitive is p.add_p:
        terms = corrected.call.inputs  # eps_root, which is usually 0
        if uses[corrected] > 1 or not any(map(is_zero, terms)):
            return None
        corrected = terms[0] if is_zero(terms[1]) else terms[1]
    square = _divided_by_scalar(corrected, uses)
    if square is None:
        return None
    divided = _divided_by_scalar(mean, uses)
    mean, mean_divisor = (mean, None) if divided is None else divided
    return CorrectedQuotient(mean, mean_divisor, *square, eps)


def times_scalar(node: Node) -> tuple[Node, Node] | None:
    """``(x, s)`` of a float32 product ``x s`` with a scalar s, or None."""
    call = node.call
    if call is None or call.primitive is not p.mul_p or not _is_float32(node):
        return None
    for x, scalar in (call.inputs, call.inputs[::-1]):
        if scalar.is_scalar and not x.is_scalar and _is_float32(scalar):
            return x, scalar
    return None


def _divided_by_scalar(
    node: Node, uses: Mapping[Node, int]
) -> tuple[Node, Node] | None:
    call = node.call
    if call is None or call.primitive is not p.div_p or uses[node] > 1:
        return None
    x, scalar = call.inputs
    if x.is_scalar or not scalar.is_scalar or not _is_float32(scalar):
        return None
    return x, scalar


def _is_float32(node: Node) -> bool:
    return np.dtype(node.aval.dtype) == jnp.float32
