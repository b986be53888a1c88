"""When an inner update leaves a moment or a weight alone, read off its graph.

An inner transformation may skip a step, as ``optax.apply_if_finite`` does, or make one
in a few, as ``optax.MultiSteps``. Then it returns the moments that it was given, and
updates of zero. What is stored must not change by a bit either. But encoding what was
decoded is a new rounding. So the scalar that decides is found here, and where it says
so, what is stored is kept.
"""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.graph import Graph, Node, is_by_platform, is_constant_number

Condition = Node | bool
"""A truth value: of rank 0, or known while tracing."""

_ONE_TO_ONE = frozenset({p.copy_p, p.stop_gradient_p, p.convert_element_type_p})


def unchanged_when(new: Node, old: Node, graph: Graph) -> Node | None:
    """When ``new`` is ``old`` by a condition: a node of rank 0, or None for never."""
    return _as_node(_when(new, graph, lambda node: node is old))


def zero_when(update: Node, graph: Graph) -> Node | None:
    """When an update is zero by a condition: a node of rank 0, or None for never."""
    return _as_node(_when(update, graph, _is_zero, through_products=True))


def _when(
    node: Node,
    graph: Graph,
    holds: Callable[[Node], bool],
    through_products: bool = False,
) -> Condition:
    """When a node is one for which ``holds``.

    Args:
      node, graph: the node and its graph, to which the condition is added.
      holds: of the nodes that are looked for.
      through_products: whether a product holds if a factor does.
    """

    def when(node: Node) -> Condition:
        if holds(node):
            return True
        if node.call is None:
            return False
        primitive, operands = node.call.primitive, node.call.inputs
        if primitive in _ONE_TO_ONE and operands[0].aval.dtype == node.aval.dtype:
            return when(operands[0])
        if through_products and primitive is p.neg_p:
            return when(operands[0])
        if through_products and primitive in (p.mul_p, p.div_p):
            # By a scalar; an array may hold infinities, whose product with 0 is NaN.
            scalars = [_scalar_of(x) for x in operands]
            if primitive is p.mul_p and scalars[0] is not None:
                return when(operands[1])
            return False if scalars[1] is None else when(operands[0])
        if primitive is p.select_n_p:
            which = _scalar_of(operands[0])
            if which is None:
                return False
            return _selected(which, [when(x) for x in operands[1:]], graph)
        if primitive is p.cond_p and not is_by_platform(primitive, node.call.params):
            number = [x is node for x in node.call.outputs].index(True)
            cases = [branch[number] for branch in graph.branches_of(node.call)]
            return _selected(operands[0], [when(x) for x in cases], graph)
        return False

    return when(node)


def _selected(which: Node, cases: list[Condition], graph: Graph) -> Condition:
    """The condition of the case that is selected by a number or a truth value."""
    if all(x is False for x in cases) or all(x is True for x in cases):
        return cases[0]
    nodes = [_constant(x) if isinstance(x, bool) else x for x in cases]
    aval = which.aval.update(dtype=jnp.dtype(bool))
    if len(cases) == 2 and which.aval.dtype != jnp.bool_:
        which = graph.is_positive(which)
    return graph.call(p.select_n_p, {}, [which, *nodes], [aval])[0]


def _scalar_of(node: Node) -> Node | None:
    """The scalar that a node is, or is made of by repeating it."""
    while not node.is_scalar:
        if node.call is None or node.call.primitive is not p.broadcast_in_dim_p:
            return None
        node = node.call.inputs[0]
    return node


def _is_zero(node: Node) -> bool:
    scalar = _scalar_of(node)
    if scalar is None or not is_constant_number(scalar):
        return False
    return bool(np.asarray(scalar.constant) == 0)


def _as_node(condition: Condition) -> Node | None:
    if condition is False:
        return None
    return _constant(True) if condition is True else typing.cast(Node, condition)


def _constant(value: bool) -> Node:
    return Node(jax.typeof(np.bool_(value)), constant=np.bool_(value))
