"""A jaxpr as a graph of values, with the functions that it calls written out.

:mod:`lowbit_optax._jaxprs.elementwise` asks such a graph what an inner transformation's
results are made of; :func:`evaluate` computes any of its values, and only what they
need.
"""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import primitives

from lowbit_optax._step.stacks import LAYERWISE

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
# A conditional of these becomes a selection: computing every branch costs little.
_DEAR = frozenset(
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


@dataclasses.dataclass(eq=False, slots=True)
class Call:
    """One application of a primitive; ``number`` counts calls in a valid order."""

    primitive: core.Primitive
    params: dict[str, typing.Any]
    inputs: tuple["Node", ...]
    number: int
    outputs: tuple["Node", ...] = ()


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """One value.

    Args:
      aval: its shape and dtype.
      call: what computes it; None for an input or a constant.
      constant: a constant's value, a number or an array.
    """

    aval: typing.Any
    call: Call | None = None
    constant: typing.Any = None

    @property
    def is_scalar(self) -> bool:
        return self.aval.shape == ()


class Graph:
    """A traced function's values.

    Args:
      closed: the jaxpr of a function of ``len(inputs)`` arrays.

    Attributes:
      inputs, outputs: lists of :class:`Node`, flat.
    """

    def __init__(self, closed: core.ClosedJaxpr):
        self._count = 0
        self._scalars: dict[typing.Any, list[Node]] = {}
        self.inputs = [Node(v.aval) for v in closed.jaxpr.invars]
        self.outputs = self._inline(closed, self.inputs)

    def call(self, primitive, params, inputs: Sequence[Node], avals) -> list[Node]:
        """Append an application of a primitive with results of these avals.

        Scalars that were computed from the same ones before are those: optax computes
        the learning rate of a step once for every leaf.
        """
        key = None
        if all(aval.shape == () for aval in avals):
            key = _key(primitive, params, inputs)
        if key in self._scalars:
            return self._scalars[key]
        results = self._append(primitive, params, inputs, avals)
        if key is not None:
            self._scalars[key] = results
        return results

    def _append(self, primitive, params, inputs, avals) -> list[Node]:
        call = Call(primitive, params, tuple(inputs), self._count)
        self._count += 1
        call.outputs = tuple(Node(aval, call) for aval in avals)
        return list(call.outputs)

    def _inline(self, closed: core.ClosedJaxpr, inputs: Sequence[Node]) -> list[Node]:
        jaxpr = closed.jaxpr
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
            known[var] = Node(var.aval, constant=const)

        def read(atom) -> Node:
            if isinstance(atom, core.Literal):
                return Node(atom.aval, constant=atom.val)
            return known[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            if eqn.primitive in _CALLS and eqn.params.get("name") != LAYERWISE:
                results = self._inline(_called(eqn), operands)
            elif eqn.primitive is primitives.copy_p:
                results = operands
            elif eqn.primitive is primitives.cond_p and not _is_dear(eqn):
                results = self._select(eqn, operands)
            else:
                avals = [var.aval for var in eqn.outvars]
                results = self.call(eqn.primitive, eqn.params, operands, avals)
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _select(self, eqn, operands: list[Node]) -> list[Node]:
        """A conditional as a selection among its branches' results."""
        which, *arguments = operands
        branches = [self._inline(b, arguments) for b in eqn.params["branches"]]
        if len(branches) == 2:
            # select_n takes a truth value for two, and a conditional an integer.
            aval = which.aval.update(dtype=jax.numpy.dtype(bool))
            zero = Node(which.aval, constant=which.aval.dtype.type(0))
            (which,) = self.call(primitives.gt_p, {}, [which, zero], [aval])
        return [
            self.call(primitives.select_n_p, {}, [which, *cases], [cases[0].aval])[0]
            for cases in zip(*branches, strict=True)
        ]


def evaluate(nodes: Sequence[Node], known: dict[Node, jax.Array]) -> list:
    """Values of nodes, computing only what they need.

    Args:
      nodes: wanted.
      known: values of inputs (and of any other nodes); what is computed is added.
    """
    calls, seen, waiting = [], set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node in known or node.call is None or node.call in seen:
            continue
        seen.add(node.call)
        calls.append(node.call)
        waiting.extend(node.call.inputs)

    def value(node: Node):
        if node in known:
            return known[node]
        if node.constant is None:
            raise KeyError("an input of the graph has no value")
        return node.constant

    for call in sorted(calls, key=lambda call: call.number):
        params = call.primitive.get_bind_params(call.params)
        results = call.primitive.bind(*map(value, call.inputs), **params)
        if not call.primitive.multiple_results:
            results = [results]
        known.update(zip(call.outputs, results, strict=True))
    return [value(node) for node in nodes]


def _key(primitive, params, inputs: Sequence[Node]):
    """What tells a computation of scalars from another; None if nothing does."""
    operands = []
    for node in inputs:
        if node.constant is None or isinstance(node.constant, jax.Array):
            operands.append(node)
        else:
            value = np.asarray(node.constant)
            operands.append((value.dtype, value.shape, value.tobytes()))
    key = primitive, tuple(sorted(params.items())), tuple(operands)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _called(eqn) -> core.ClosedJaxpr:
    inner = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
    return inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())


def _is_dear(eqn) -> bool:
    def dear(jaxpr) -> bool:
        return any(
            inner.primitive in _DEAR
            or any(map(dear, core.jaxprs_in_params(inner.params)))
            for inner in jaxpr.eqns
        )

    return any(dear(branch.jaxpr) for branch in eqn.params["branches"])
