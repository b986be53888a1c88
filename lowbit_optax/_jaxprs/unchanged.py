"""When an inner update leaves a moment or a weight alone, read off its graph.

An inner transformation may skip a step, as ``optax.apply_if_finite`` does, or make one
in a few, as ``optax.MultiSteps``. Then it returns the moments that it was given, and
updates of zero. What is stored must not change by a bit either, but encoding what was
decoded rounds again. So this module finds the scalar that decides, and what is stored
stays where the scalar says so.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.graph import Graph, Node, constant, is_by_platform, is_zero

Condition = Node | bool
"""A truth value: of rank 0, or known while tracing."""

_COPIES = frozenset({p.copy_p, p.stop_gradient_p, p.convert_element_type_p})


def unchanged_when(new: Node, old: Node, graph: Graph) -> Node | None:
    """When ``new`` is ``old`` by a condition: a node of rank 0, or None for never."""
    return _as_node(_when(new, graph, lambda node: node is old))


def zero_when(update: Node, graph: Graph) -> Node | None:
    """When an update is zero by a condition: a node of rank 0, or None for never."""
    return _as_node(_when(update, graph, is_zero, through_products=True))


def _when(
    node: Node,
    graph: Graph,
    holds: Callable[[Node], bool],
    through_products: bool = False,
) -> Condition:
    """When a node is one for which ``holds``.

    Args:
      node, graph: the node and its graph, to which the condition is added.
      holds: whether a node is one that is looked for.
      through_products: whether a product is one if a factor is.
    """

    def when(node: Node) -> Condition:
        if holds(node):
            return True
        if node.call is None:
            return False
        primitive, operands = node.call.primitive, node.call.inputs
        if primitive in _COPIES and operands[0].aval.dtype == node.aval.dtype:
            return when(operands[0])
        if through_products and primitive is p.neg_p:
            return when(operands[0])
        if through_products and primitive in (p.mul_p, p.div_p):
            # By a scalar; an array may hold infinities, whose product with 0 is NaN.
            if primitive is p.mul_p and scalar_of(operands[0]) is not None:
                return when(operands[1])
            return scalar_of(operands[1]) is not None and when(operands[0])
        if primitive is p.select_n_p:
            which = scalar_of(operands[0])
            return which is not None and selected(which, operands[1:])
        if primitive is p.cond_p and not is_by_platform(primitive, node.call.params):
            number = [x is node for x in node.call.outputs].index(True)
            branches = graph.branches(node.call.params, operands[1:])
            return selected(operands[0], [branch[number] for branch in branches])
        return False

    def selected(which: Node, cases: Sequence[Node]) -> Condition:
        conditions = [when(case) for case in cases]
        if all(x is False for x in conditions) or all(x is True for x in conditions):
            return conditions[0]
        nodes = [
            x if isinstance(x, Node) else constant(np.bool_(x)) for x in conditions
        ]
        return graph.selected(which, nodes)

    return when(node)


def scalar_of(node: Node) -> Node | None:
    """The scalar that a node is, or is made of by repeating it."""
    while not node.is_scalar:
        if node.call is None or node.call.primitive is not p.broadcast_in_dim_p:
            return None
        node = node.call.inputs[0]
    return node


def _as_node(condition: Condition) -> Node | None:
    """A condition as a node; None for one that never holds."""
    if isinstance(condition, Node):
        return condition
    return constant(np.bool_(True)) if condition else None
