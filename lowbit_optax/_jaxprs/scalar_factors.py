"""Which nodes are an array times a scalar, or a quotient of such arrays."""

from collections.abc import Mapping

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.graph import Call, Node, without_zero


def corrected_quotient(
    call: Call, uses: Mapping[Node, int]
) -> tuple[Node, Node | None, tuple[Node, Node, Node | None]] | None:
    """``m, c1, (v, c2, eps)`` of float32's ``(m / c1) / (sqrt(v / c2) + eps)``.

    m and v have the leaf's shape, the others are scalars; c1 and eps may be missing.
    What others need too is left as it is: then, and for other calls, it is None.
    """
    if call.primitive is not p.div_p or call.outputs[0].aval.dtype != jnp.float32:
        return None
    mean, denominator = call.inputs
    if uses[denominator] > 1:
        return None
    root, eps = _with_scalar(p.add_p, denominator) or (denominator, None)
    if root.call is None or root.call.primitive is not p.sqrt_p or uses[root] > 1:
        return None
    (corrected,) = root.call.inputs
    if corrected.call is not None and uses[corrected] == 1:
        # eps_root is usually 0.
        corrected = without_zero(corrected.call) or corrected
    square = _with_scalar(p.div_p, corrected)
    if square is None or uses[corrected] > 1:
        return None
    divided = _with_scalar(p.div_p, mean) if uses[mean] == 1 else None
    mean, mean_divisor = divided or (mean, None)
    return mean, mean_divisor, (*square, eps)


def times_scalar(node: Node) -> tuple[Node, Node] | None:
    """``(x, s)`` of a float32 product ``x s`` with a scalar s, or None."""
    is_float32 = node.aval.dtype == jnp.float32
    return _with_scalar(p.mul_p, node) if is_float32 else None


def _with_scalar(primitive: Primitive, node: Node) -> tuple[Node, Node] | None:
    """The array and the scalar of which a primitive computes a node, or None."""
    call = node.call
    if call is None or call.primitive is not primitive:
        return None
    orders = [call.inputs]
    if primitive is not p.div_p:
        orders.append(call.inputs[::-1])
    pairs = ((x, y) for x, y in orders if y.is_scalar and not x.is_scalar)
    return next(pairs, None)
