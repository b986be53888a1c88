"""Graphs of traced functions: values are nodes, and calls compute them.

The variables of a jaxpr are only known inside of it. A :class:`Node` is a value of the
whole program. If a called function is inlined, its values are nodes like all others. A
function that is passed to :func:`inline` decides how to read each equation.
:class:`Graph` is the graph of a whole function. :func:`evaluate` computes some of its
values, and only the values that they need.
"""

import contextlib
import dataclasses
import functools
import typing
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.coming_autodiff import AS_BOUND, in_todays_terms
from pallas_kernels.operations import ClosedJaxpr

_CALLS = frozenset(
    {
        p.call_p, p.closed_call_p, p.custom_jvp_call_p, p.custom_vjp_call_p, p.jit_p,
        p.remat_p,
    }
)  # fmt: skip
SUMS = frozenset({p.add_p, p.add_jaxvals_p})
"""Primitives that add two arrays. JAX has a separate one for sums of derivatives."""

EXPENSIVE = frozenset(
    {
        p.conv_general_dilated_p, p.dot_general_p, p.eigh_p, p.fft_p, p.qr_p, p.scan_p,
        p.sort_p, p.svd_p, p.while_p,
    }
)  # fmt: skip
"""Primitives that XLA does not fuse with other operations.

A conditional without them becomes a selection, because computing all branches is cheap.
"""

_ZERO_OF_ZERO = (p.broadcast_in_dim_p, p.square_p)


@dataclasses.dataclass(eq=False, slots=True)
class Call:
    """One application of a primitive. Calls are compared by identity.

    Args:
      primitive, params: as in the equation of a jaxpr.
      inputs, outputs: operands and results.
      number: numbers the calls in a valid order.
      context: context of the equation, if any, such as the mesh that was active
        (``jax.sharding.auto_axes`` changes it within a program).
    """

    primitive: core.Primitive
    params: dict[str, typing.Any]
    inputs: tuple["Node", ...]
    number: int
    outputs: tuple["Node", ...] = ()
    context: typing.Any = None


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """One value. Nodes are compared by identity.

    Args:
      aval: shape and dtype.
      call: the call that computes the value; None for an input or a constant.
      constant: value of a constant, a number or an array.
    """

    aval: typing.Any
    call: Call | None = None
    constant: typing.Any = None

    @property
    def is_scalar(self) -> bool:
        """Whether the rank is 0."""
        return self.aval.shape == ()


def constant(value) -> Node:
    """Return a number or an array as a node without a call."""
    return Node(jax.typeof(value), constant=value)


def with_outputs(call: Call, avals: Iterable) -> list[Node]:
    """Create results of a call with these shapes and dtypes, and return them."""
    call.outputs = tuple(Node(aval, call) for aval in avals)
    return list(call.outputs)


def inline(
    closed: ClosedJaxpr,
    inputs: Sequence[Node],
    read_equation: Callable[[typing.Any, list[Node]], Sequence[Node]],
) -> list[Node]:
    """Return the results of a jaxpr as nodes.

    Args:
      closed: the jaxpr.
      inputs: nodes for its inputs.
      read_equation: makes the results of an equation from its operands. To inline a
        function that the equation calls, it calls ``inline`` again.
    """
    jaxpr = closed.jaxpr
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
        known[var] = Node(var.aval, constant=value)

    def read(atom) -> Node:
        if isinstance(atom, core.Literal):
            return Node(atom.aval, constant=atom.val)
        return known[atom]

    for eqn in map(in_todays_terms, jaxpr.eqns):
        results = read_equation(eqn, [read(atom) for atom in eqn.invars])
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def made_of(
    wanted: Iterable[Node], known: Container[Node] = (), *, with_scalars: bool = True
) -> list[Node]:
    """Return nodes and all nodes from which they are computed, each once.

    ``known`` nodes are left out, and so are scalars if ``with_scalars`` is False, each
    with the nodes from which they are computed.
    """
    found: dict[Node, None] = {}
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node in found or node in known or not (with_scalars or node.aval.shape):
            continue
        found[node] = None
        if node.call is not None:
            waiting.extend(node.call.inputs)
    return list(found)


def calls_between(wanted: Iterable[Node], known: Iterable[Node]) -> list[Call]:
    """Return the calls that compute wanted values from known ones, in order."""
    nodes = made_of(wanted, frozenset(known))
    calls = {x.call for x in nodes if x.call is not None}
    return sorted(calls, key=lambda call: call.number)


def value_of(node: Node, known: Mapping[Node, typing.Any]):
    """Return the known value of a node, or its constant."""
    if node in known:
        return known[node]
    if node.constant is None:
        raise KeyError("known must have a value for each input of the graph")
    return node.constant


def run(
    calls: Iterable[Call],
    known: dict[Node, typing.Any],
    instead: Mapping[Call, Callable[[list], Sequence]] | None = None,
    changed: Callable[[Node, typing.Any], typing.Any] = lambda _, value: value,
) -> None:
    """Run calls in order, and add their outputs to the known values.

    Args:
      calls, known: calls in a valid order, and values by node.
      instead: for some calls, functions that compute the outputs from the operands.
      changed: maps a node and its value to the value that later calls read.
    """
    instead = instead or {}
    for call in calls:
        operands = [value_of(node, known) for node in call.inputs]
        apply = instead.get(call)
        results = bind(call, operands) if apply is None else apply(operands)
        for node, result in zip(call.outputs, results, strict=True):
            known[node] = changed(node, result)


def bind(call: Call, operands: Sequence) -> Sequence:
    """Return the results of a call for these operands."""
    primitive, params = call.params.get(AS_BOUND, (call.primitive, call.params))
    params = primitive.get_bind_params(params)
    context = call.context.manager if call.context else contextlib.nullcontext()
    if not any(core.jaxprs_in_params(params)):
        operands = varying_alike(operands)
    with context:
        results = primitive.bind(*operands, **params)
    return results if primitive.multiple_results else [results]


def varying_alike(operands: Sequence) -> Sequence:
    """Return operands that vary over the same axes of a ``jax.shard_map``.

    Primitives require this. :class:`Graph` leaves out the operations with which JAX
    makes scalars vary.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return operands
    axes = [jax.typeof(x).manual_axis_type.varying for x in operands]
    union = frozenset().union(*axes)
    return [
        lax.pcast(x, tuple(sorted(union - mine)), to="varying") if mine < union else x
        for x, mine in zip(operands, axes, strict=True)
    ]


@functools.cache
def primitive_of(
    function: Callable, *dtypes: np.dtype
) -> tuple[core.Primitive, dict[str, typing.Any], np.dtype]:
    """Return the only primitive of a function of scalars, with parameters and dtype.

    The parameters differ between versions of JAX.
    """
    scalars = [jax.ShapeDtypeStruct((), dtype) for dtype in dtypes]
    closed, result = jax.make_jaxpr(function, return_shape=True)(*scalars)
    (equation,) = closed.jaxpr.eqns
    return equation.primitive, equation.params, result.dtype


def as_closed_jaxpr(jaxpr) -> ClosedJaxpr:
    """Return a jaxpr from the parameters of an equation as a closed jaxpr."""
    is_closed = isinstance(jaxpr, ClosedJaxpr)
    return jaxpr if is_closed else ClosedJaxpr(jaxpr, ())


def called_jaxpr(params: Mapping[str, typing.Any]) -> ClosedJaxpr:
    """Return the function that an equation with these parameters calls once."""
    key = "jaxpr" if "jaxpr" in params else "call_jaxpr"
    return as_closed_jaxpr(params[key])


def holds(params: Mapping[str, typing.Any], wanted: Callable[..., bool]) -> bool:
    """Return whether a function in the parameters has an equation that is wanted."""
    return any(
        wanted(inner) or holds(inner.params, wanted)
        for jaxpr in core.jaxprs_in_params(dict(params))
        for inner in map(in_todays_terms, jaxpr.eqns)
    )


def is_by_platform(primitive: core.Primitive, params: Mapping) -> bool:
    """Return whether a call is a conditional of ``lax.platform_dependent``.

    Some of its branches may compile on only one platform. Therefore, they can neither
    all be computed nor be moved into another conditional.
    """
    return primitive is p.cond_p and bool(params.get("branches_platforms"))


def scalar_of(node: Node) -> Node | None:
    """Return the scalar that a node is or repeats, or None."""
    while not node.is_scalar:
        if node.call is None or node.call.primitive is not p.broadcast_in_dim_p:
            return None
        (node,) = node.call.inputs
    return node


def is_constant_number(node: Node) -> bool:
    """Return whether a node is a constant whose value is known during tracing."""
    return node.constant is not None and not isinstance(node.constant, jax.Array)


def is_zero(node: Node) -> bool:
    """Return whether a node is 0 everywhere, for all inputs."""
    while node.call is not None:
        if node.call.primitive not in _ZERO_OF_ZERO:
            return False
        (node,) = node.call.inputs
    return is_constant_number(node) and not np.any(np.asarray(node.constant))


class Graph:
    """The values of a traced function.

    Args:
      closed: jaxpr of a function of ``len(inputs)`` arrays.
      opaque: names of functions under ``jit`` that are not inlined. Their calls are
        like other operations.
      selects: whether every conditional becomes a selection, and not only cheap ones.

    Attributes:
      inputs, outputs: flat lists of :class:`Node`.
    """

    def __init__(
        self, closed: ClosedJaxpr, opaque: Collection[str] = (), selects: bool = False
    ):
        self._opaque = opaque
        self._selects = selects
        self._count = 0
        self._scalars: dict[typing.Any, list[Node]] = {}
        self.inputs = [Node(v.aval) for v in closed.jaxpr.invars]
        self.outputs = self._inlined(closed, self.inputs)

    def apply(self, function: Callable, *operands: Node) -> Node:
        """Apply a function that is one elementwise primitive to arrays and scalars."""
        dtypes = (x.aval.dtype for x in operands)
        primitive, params, dtype = primitive_of(function, *dtypes)
        like = next((x for x in operands if not x.is_scalar), operands[0])
        aval = like.aval.update(dtype=dtype)
        return self.call(primitive, params, operands, [aval])[0]

    def selected(self, which: Node, cases: Sequence[Node]) -> Node:
        """Return the case that a bool or an integer selects, as in conditionals."""
        if len(cases) == 2 and which.aval.dtype != jnp.bool_:
            which = self.apply(lax.gt, which, constant(which.aval.dtype.type(0)))
        operands, aval = [which, *cases], cases[0].aval
        return self.call(p.select_n_p, {}, operands, [aval])[0]

    def call(
        self, primitive, params, inputs: Sequence[Node], avals, context=None
    ) -> list[Node]:
        """Append an application of a primitive, and return its results.

        optax computes the learning rate of a step again for every leaf. Therefore,
        scalars that are computed in the same way from the same scalars become one node.

        Args:
          primitive, params, inputs, context: as in :class:`Call`.
          avals: shapes and dtypes of the results.
        """
        is_scalar = all(aval.shape == () for aval in avals)
        key = _computation_key(primitive, params, inputs) if is_scalar else None
        if key in self._scalars:
            return self._scalars[key]
        call = Call(primitive, params, tuple(inputs), self._count, context=context)
        self._count += 1
        results = with_outputs(call, avals)
        if key is not None:
            self._scalars[key] = results
        return results

    def _inlined(self, closed: ClosedJaxpr, operands: Sequence[Node]) -> list[Node]:
        return inline(closed, operands, self._read_equation)

    def _read_equation(self, eqn, operands: list[Node]) -> list[Node]:
        primitive, params = eqn.primitive, eqn.params
        if primitive in _CALLS and params.get("name") not in self._opaque:
            return self._inlined(called_jaxpr(params), operands)
        if primitive is p.copy_p:
            return operands
        if primitive.name == "pvary" and operands[0].is_scalar:
            # Scalars are the same for all leaves, even if some leaves vary.
            return operands
        if primitive is p.cond_p and self._is_selection(params):
            which, *arguments = operands
            branches = [self._inlined(x, arguments) for x in params["branches"]]
            return [self.selected(which, x) for x in zip(*branches, strict=True)]
        avals = [var.aval for var in eqn.outvars]
        return self.call(primitive, params, operands, avals, eqn.ctx)

    def _is_selection(self, params: Mapping) -> bool:
        """Return whether a conditional becomes a selection, which runs all branches."""
        if is_by_platform(p.cond_p, params):
            return False
        expensive = lambda x: x.primitive in EXPENSIVE
        return self._selects or not holds(params, expensive)


def evaluate(nodes: Sequence[Node], known: dict[Node, typing.Any]) -> list:
    """Return values of nodes. Adds them, and values that they need, to ``known``."""
    run(calls_between(nodes, known), known)
    return [value_of(node, known) for node in nodes]


def _computation_key(primitive, params, inputs: Sequence[Node]):
    """Return equal keys for equal computations of scalars; None if not comparable."""

    def operand_key(node: Node):
        if not is_constant_number(node):
            return node
        value = np.asarray(node.constant)
        return value.dtype, value.shape, value.tobytes()

    key = primitive, tuple(sorted(params.items())), tuple(map(operand_key, inputs))
    try:
        hash(key)
    except TypeError:
        return None
    return key
