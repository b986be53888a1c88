"""Elementwise derivatives of a leaf's results with respect to its inputs.

    u = s * m + d * w   -->   du/dm = s,   du/dw = d

Each element of the result must be a linear function of the input element at its index.
A derivative is a node of the graph, and may be a scalar or an array. A scalar, such as
a norm, counts as a constant even if it depends on the input.
"""

import functools
import typing
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.graph import SUMS, Call, Graph, Node, constant

ZERO, ONE = constant(np.float32(0)), constant(np.float32(1))


class NotLinear(Exception):
    """Raised with the reason why a result is not linear in each element of an input."""


def linear_factor(
    result: Node, of: Node, graph: Graph, *, strict: bool = True
) -> Node | None:
    """Return the elementwise derivative of a result with respect to an input.

    Args:
      result: a node of rank 1 or more.
      of: the input, a node of the same shape.
      graph: the graph of both nodes, to which the derivative is added.
      strict: if True, a term that is not linear raises :class:`NotLinear`. If False, it
        counts as 0.

    Returns:
      A node that is a scalar or has the shape of the result; None if it is 0.
    """
    return _Derivative(of, graph, strict).of_node(result)


def inverse(node: Node, graph: Graph) -> tuple[Node, Node]:
    """Return ``1 / node``, without dividing by a quotient or by a scalar that is 0.

    Adam divides by a root, so the derivative of its update is a quotient of a scalar
    and the root. Its inverse needs no division of arrays.

    Returns:
      The inverse, and a float32 scalar: 0 if a scalar factor of the node is 0, so that
      there is no inverse, otherwise 1.
    """
    call = node.call
    if call is not None and call.primitive is p.div_p:
        return divided(call.inputs[1], ONE, call.inputs[0], graph)
    if call is not None and call.primitive is p.mul_p:
        for factor, other in (call.inputs, call.inputs[::-1]):
            if factor.is_scalar:
                return divided(*inverse(other, graph), factor, graph)
    return divided(ONE, ONE, node, graph)


def divided(node: Node, exists: Node, by: Node, graph: Graph) -> tuple[Node, Node]:
    """Return ``node / by``, and ``exists`` or 0; the divisor is 1 if a scalar is 0."""
    if by.is_scalar:
        # JAX's checks for NaNs and infinities would stop at a learning rate of 0.
        is_zero = graph.apply(lax.eq, by, ZERO)
        cases = [by, ONE], [exists, ZERO]
        by, exists = (graph.selected(is_zero, x) for x in cases)
    return graph.apply(lax.div, node, by), exists


class _Derivative:
    def __init__(self, of: Node, graph: Graph, strict: bool):
        self._graph, self._strict = graph, strict
        self._known: dict[Node, Node | None] = {of: ONE}

    def of_node(self, node: Node) -> Node | None:
        """Return the derivative of a node, or None if it is 0."""
        if node.is_scalar or node.call is None:
            return self._known.get(node)
        if node not in self._known:
            self._known[node] = self._of_call(node, node.call)
        return self._known[node]

    def _of_call(self, node: Node, call: Call) -> Node | None:
        factors = [self.of_node(x) for x in call.inputs]
        if all(x is None for x in factors):
            return None
        found = self._linear(node, call, factors)
        if found is None and self._strict:
            raise NotLinear(f"{call.primitive} is not linear in each element of it")
        return found

    def _linear(
        self, node: Node, call: Call, factors: Sequence[Node | None]
    ) -> Node | None:
        """Return the derivative of a call's result, or None if it is not linear."""
        primitive, operands = call.primitive, call.inputs
        shapes = {x.aval.shape for x in operands if not x.is_scalar}
        if shapes != {node.aval.shape} or node.aval.dtype != np.float32:
            return None
        if primitive in SUMS:
            return self._sum(factors)
        if primitive is p.sub_p:
            return self._sum([factors[0], self._negative(factors[1])])
        if primitive is p.neg_p:
            return self._negative(factors[0])
        if primitive is p.mul_p and None in factors:
            i = 0 if factors[1] is None else 1
            factor, other = typing.cast(Node, factors[i]), operands[1 - i]
            return other if factor is ONE else self._graph.apply(lax.mul, factor, other)
        if primitive is p.div_p and factors[1] is None:
            factor = typing.cast(Node, factors[0])
            return self._graph.apply(lax.div, factor, operands[1])
        if primitive is p.select_n_p:
            return self._selected(node, operands[0], factors[1:])
        if primitive in (p.convert_element_type_p, p.broadcast_in_dim_p, p.copy_p):
            return factors[0]
        return None

    def _sum(self, factors: Sequence[Node | None]) -> Node | None:
        terms = [x for x in factors if x is not None]
        return terms[0] if len(terms) < 2 else self._graph.apply(lax.add, *terms)

    def _negative(self, factor: Node | None) -> Node | None:
        return factor and self._graph.apply(lax.neg, factor)

    def _selected(
        self, node: Node, which: Node, factors: Sequence[Node | None]
    ) -> Node:
        cases = [ZERO if x is None else x for x in factors]
        if not (which.is_scalar and all(x.is_scalar for x in cases)):
            # Unlike other primitives, a selection does not mix scalars and arrays.
            cases = [self._repeated(x, node) for x in cases]
        return self._graph.selected(which, cases)

    def _repeated(self, factor: Node, like: Node) -> Node:
        if not factor.is_scalar:
            return factor
        params = _broadcast_params(like.aval.shape)
        return self._graph.call(p.broadcast_in_dim_p, params, [factor], [like.aval])[0]


@functools.lru_cache(maxsize=4096)
def _broadcast_params(shape: tuple[int, ...]) -> dict:
    scalar = jax.ShapeDtypeStruct((), np.float32)
    repeat = lambda x: lax.broadcast_in_dim(x, shape, ())
    (equation,) = jax.make_jaxpr(repeat)(scalar).jaxpr.eqns
    return equation.params
