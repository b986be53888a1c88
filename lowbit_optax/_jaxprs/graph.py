"""The graph of a traced function, with the functions that it calls inlined.

:mod:`lowbit_optax._jaxprs.elementwise` asks such a graph what an inner transformation's
results are made of; :func:`evaluate` computes any of its values, and only what they
need.
"""

import typing
from collections.abc import Collection, Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives

from lowbit_optax._jaxprs.nodes import (
    Call,
    Node,
    called_jaxpr,
    holds,
    inline,
    is_by_platform,
    is_constant_number,
    run,
    value_of,
    with_outputs,
)
from pallas_kernels.jaxprs import ClosedJaxpr

_CALLS = frozenset(
    {
        primitives.call_p,
        primitives.closed_call_p,
        primitives.custom_jvp_call_p,
        primitives.custom_vjp_call_p,
        primitives.jit_p,
        primitives.remat_p,
    }
)
# A conditional without these becomes a selection: computing every branch costs little.
_EXPENSIVE = frozenset(
    {
        primitives.conv_general_dilated_p,
        primitives.dot_general_p,
        primitives.eigh_p,
        primitives.fft_p,
        primitives.qr_p,
        primitives.scan_p,
        primitives.sort_p,
        primitives.svd_p,
        primitives.while_p,
    }
)


class Graph:
    """A traced function's values.

    Args:
      closed: the jaxpr of a function of ``len(inputs)`` arrays.
      opaque: names of functions under ``jit`` that are not inlined: calls of them are
        operations like any other.

    Attributes:
      inputs, outputs: lists of :class:`Node`, flat.
    """

    def __init__(self, closed: ClosedJaxpr, opaque: Collection[str] = ()):
        self._opaque = opaque
        self._count = 0
        self._scalars: dict[typing.Any, list[Node]] = {}
        self.inputs = [Node(v.aval) for v in closed.jaxpr.invars]
        self.outputs = inline(closed, self.inputs, self._read_equation)

    def call(self, primitive, params, inputs: Sequence[Node], avals) -> list[Node]:
        """Append an application of a primitive, and return its results.

        A scalar that is computed from the same scalars in the same way as an earlier
        one is that earlier one: optax computes the learning rate of a step once for
        every leaf.

        Args:
          primitive, params, inputs: as in :class:`Call`.
          avals: shapes and dtypes of the results.
        """
        key = None
        if all(aval.shape == () for aval in avals):
            key = _computation_key(primitive, params, inputs)
        if key in self._scalars:
            return self._scalars[key]
        call = Call(primitive, params, tuple(inputs), self._count)
        self._count += 1
        results = with_outputs(call, avals)
        if key is not None:
            self._scalars[key] = results
        return results

    def _read_equation(self, eqn, operands: list[Node]) -> list[Node]:
        if eqn.primitive in _CALLS and eqn.params.get("name") not in self._opaque:
            return inline(called_jaxpr(eqn.params), operands, self._read_equation)
        if eqn.primitive is primitives.copy_p:
            return operands
        if eqn.primitive.name == "pvary" and operands[0].is_scalar:
            # A scalar is the same for all leaves, whether these vary or not.
            return operands
        if eqn.primitive is primitives.cond_p and _is_cheap(eqn):
            return self._select(eqn, operands)
        avals = [var.aval for var in eqn.outvars]
        return self.call(eqn.primitive, eqn.params, operands, avals)

    def branches_of(self, call: Call) -> list[list[Node]]:
        """The results of each branch of a conditional."""
        return self._branches(call.params, call.inputs[1:])

    def is_positive(self, number: Node) -> Node:
        """Whether a number is positive: a truth value."""
        aval = number.aval.update(dtype=jnp.dtype(bool))
        zero = Node(number.aval, constant=number.aval.dtype.type(0))
        return self.call(primitives.gt_p, {}, [number, zero], [aval])[0]

    def _branches(self, params, arguments: Sequence[Node]) -> list[list[Node]]:
        return [
            inline(branch, arguments, self._read_equation)
            for branch in params["branches"]
        ]

    def _select(self, eqn, operands: list[Node]) -> list[Node]:
        """A conditional as a selection among its branches' results."""
        which, *arguments = operands
        branches = self._branches(eqn.params, arguments)
        if len(branches) == 2:
            # select_n takes a truth value for two, and a conditional an integer.
            which = self.is_positive(which)
        return [
            self.call(primitives.select_n_p, {}, [which, *cases], [cases[0].aval])[0]
            for cases in zip(*branches, strict=True)
        ]


def evaluate(nodes: Sequence[Node], known: dict[Node, typing.Any]) -> list:
    """Values of nodes, computing only what they need.

    Args:
      nodes: wanted.
      known: values of inputs (and of any other nodes); what is computed is added.
    """
    calls: set[Call] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node in known or node.call is None or node.call in calls:
            continue
        calls.add(node.call)
        waiting.extend(node.call.inputs)
    run(sorted(calls, key=lambda call: call.number), known)
    return [value_of(node, known) for node in nodes]


def _computation_key(primitive, params, inputs: Sequence[Node]):
    """Equal for equal computations of scalars; None if they cannot be compared."""
    operands = []
    for node in inputs:
        if is_constant_number(node):
            value = np.asarray(node.constant)
            operands.append((value.dtype, value.shape, value.tobytes()))
        else:
            operands.append(node)
    key = primitive, tuple(sorted(params.items())), tuple(operands)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _is_cheap(eqn) -> bool:
    """Whether all branches of a conditional can be computed at little cost."""
    is_expensive = lambda inner: inner.primitive in _EXPENSIVE
    by_platform = is_by_platform(eqn.primitive, eqn.params)
    return not by_platform and not holds(eqn.params, is_expensive)
