"""Graphs of traced functions: values are nodes, and calls compute them.

A variable of a jaxpr is known only inside this jaxpr. A :class:`Node` is a value of the
whole program, including the values of inlined functions. The caller of :func:`inline`
passes a function that decides how to read each equation. :class:`Graph` is the graph of
a whole function. :func:`evaluate` computes the requested nodes of a graph, and only the
nodes on which they depend.
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

from pallas_kernels.operations import ClosedJaxpr

CALLS = frozenset({p.custom_jvp_call_p, p.custom_vjp_call_p, p.jit_p, p.remat_p}) | {
    # In JAX 0.12, the first two are the third, which will replace them.
    getattr(p, name)
    for name in ("call_p", "closed_call_p", "eval_jaxpr_p")
    if hasattr(p, name)
}
"""Primitives that call a function."""

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

UNCHANGED = frozenset(
    {"name", "pvary", "reshard", "sharding_constraint", "stop_gradient"}
)
"""Names of primitives whose result has the values of their only operand."""


@dataclasses.dataclass(eq=False, slots=True)
class Call:
    """One application of a primitive. Calls are compared by identity.

    Args:
      primitive, params: as in the equation of a jaxpr.
      inputs: the operands.
      number: index of the call in a valid order of all calls.
      avals: shapes and dtypes of the results.
      context: the equation's context, if it has one, such as the active mesh, which
        ``jax.sharding.auto_axes`` can change within a program.

    Attributes:
      outputs: the results.
    """

    primitive: core.Primitive
    params: dict[str, typing.Any]
    inputs: tuple["Node", ...]
    number: int
    avals: dataclasses.InitVar[Iterable]
    context: typing.Any = None
    outputs: tuple["Node", ...] = dataclasses.field(init=False)

    def __post_init__(self, avals: Iterable):
        self.outputs = tuple(Node(aval, self) for aval in avals)


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
    """Return the node of a constant, which is a number or an array."""
    return Node(jax.typeof(value), constant=value)


def inline(
    closed: ClosedJaxpr,
    inputs: Sequence[Node],
    read_equation: Callable[[typing.Any, list[Node]], Sequence[Node]],
) -> list[Node]:
    """Return the results of a jaxpr as nodes.

    Args:
      closed: the jaxpr.
      inputs: nodes for its inputs.
      read_equation: function that receives an equation and its operands, and returns
        its results. It can call ``inline`` for a function that the equation calls.
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
    """Return the wanted nodes and all nodes on which they depend, each once.

    The search stops at ``known`` nodes, and at scalars if ``with_scalars`` is False.
    The result does not contain the nodes at which it stops.
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


def calls_between(
    wanted: Iterable[Node], known: Iterable[Node], *, with_scalars: bool = True
) -> list[Call]:
    """Return the calls that compute the wanted nodes from known nodes, in order."""
    nodes = made_of(wanted, frozenset(known), with_scalars=with_scalars)
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
    instead: Mapping[Call, Callable[[list], Sequence]] = {},
    changed: Callable[[Node, typing.Any], typing.Any] = lambda _, value: value,
) -> None:
    """Run calls in order, and add their outputs to the known values.

    Args:
      calls: calls in a valid order.
      known: dict from nodes to their values. The outputs are added to it.
      instead: dict from calls to functions that replace them. A function receives the
        operands, and returns the outputs.
      changed: maps a node and its value to the value that later calls read.
    """
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
    if primitive is p.select_n_p:
        # Unlike other primitives, a selection does not mix scalars and arrays.
        shape = jnp.broadcast_shapes(*map(jnp.shape, operands))
        operands = [operands[0], *(jnp.broadcast_to(x, shape) for x in operands[1:])]
    with context:
        results = primitive.bind(*operands, **params)
    return results if primitive.multiple_results else [results]


def varying_alike(operands: Sequence) -> Sequence:
    """Make all operands vary over the same axes of a ``jax.shard_map``.

    JAX's primitives require this. :class:`Graph` drops the operations that make scalars
    vary, so this function replaces them.
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
    """Return the primitive, parameters and result dtype of a function of scalars.

    The function must apply a single primitive, whose parameters differ between versions
    of JAX.
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
    """Return the jaxpr of the function that an equation with these parameters calls."""
    key = "jaxpr" if "jaxpr" in params else "call_jaxpr"
    return as_closed_jaxpr(params[key])


def holds(params: Mapping[str, typing.Any], wanted: Callable[..., bool]) -> bool:
    """Return whether ``wanted`` is true for any equation of the nested functions."""
    return any(
        wanted(inner) or holds(inner.params, wanted)
        for jaxpr in core.jaxprs_in_params(dict(params))
        for inner in map(in_todays_terms, jaxpr.eqns)
    )


def is_by_platform(primitive: core.Primitive, params: Mapping) -> bool:
    """Return whether a call is a conditional of ``lax.platform_dependent``.

    A branch may compile on only one platform. Therefore, a selection must not compute
    all branches, and the call must not be moved into another conditional.
    """
    return primitive is p.cond_p and bool(params.get("branches_platforms"))


def scalar_of(node: Node) -> Node | None:
    """Return the node if it is a scalar, the scalar that it broadcasts, or None."""
    while not node.is_scalar:
        if node.call is None or not _is_one_of(node.call, "broadcast_in_dim"):
            return None
        (node,) = node.call.inputs
    return node


def before_identities(node: Node) -> Node:
    """Return the node that a node equals after operations that change no value."""
    while node.call is not None and _is_one_of(node.call):
        (node,) = node.call.inputs
    return node


def _is_one_of(call: Call, *names: str) -> bool:
    """Return whether a call has one of these names, or changes no value."""
    return call.primitive.name in UNCHANGED or call.primitive.name in names


def is_constant_number(node: Node) -> bool:
    """Return whether a node is a constant whose value is known during tracing."""
    return node.constant is not None and not isinstance(node.constant, jax.Array)


def is_zero(node: Node) -> bool:
    """Return whether a node is 0 everywhere, for all inputs."""
    while node.call is not None:
        if not _is_one_of(node.call, "broadcast_in_dim", "square"):
            return False
        (node,) = node.call.inputs
    return is_constant_number(node) and not np.any(np.asarray(node.constant))


class Graph:
    """A traced function as a graph of its values.

    Args:
      closed: jaxpr of the function.
      opaque: names of functions under ``jit`` that are not inlined. A call of such a
        function is one operation of the graph.
      selects: if True, conditionals with expensive branches also become selections.

    Attributes:
      inputs, outputs: flat lists of :class:`Node`.
      computes_all_branches: whether a selection has replaced expensive branches.
    """

    def __init__(
        self, closed: ClosedJaxpr, opaque: Collection[str] = (), selects: bool = False
    ):
        self._opaque = opaque
        self._selects = selects
        self.computes_all_branches = False
        self._count = 0
        self._scalars: dict[typing.Any, Sequence[Node]] = {}
        self.inputs = [Node(v.aval) for v in closed.jaxpr.invars]
        self.outputs = self._inlined(closed, self.inputs)

    def apply(self, function: Callable, *operands: Node) -> Node:
        """Apply a function with a single elementwise primitive; return the result."""
        dtypes = (x.aval.dtype for x in operands)
        primitive, params, dtype = primitive_of(function, *dtypes)
        like = next((x for x in operands if not x.is_scalar), operands[0])
        aval = like.aval.update(dtype=dtype)
        return self.call(primitive, params, operands, [aval])[0]

    def selected(self, which: Node, cases: Sequence[Node]) -> Node:
        """Return the case that ``which``, a bool or an integer, selects."""
        if len(cases) == 2 and which.aval.dtype != jnp.bool_:
            which = self.apply(lax.gt, which, constant(which.aval.dtype.type(0)))
        operands, aval = [which, *cases], cases[0].aval
        return self.call(p.select_n_p, {}, operands, [aval])[0]

    def elementwise(self, function: Callable, *operands: Node) -> list[Node]:
        """Apply a function of scalars to each element of the operands.

        A result is a scalar if it depends only on scalars.
        """
        scalars = [jax.ShapeDtypeStruct((), x.aval.dtype) for x in operands]
        return inline(jax.make_jaxpr(function)(*scalars), operands, self._read_element)

    def replaced(
        self, nodes: Sequence[Node], instead: Mapping[Node, Node]
    ) -> list[Node]:
        """Return the values that nodes would have if others had other values.

        Args:
          nodes: the nodes.
          instead: dict from nodes to the nodes whose values they would have.
        """
        known = dict(instead)
        for call in calls_between(nodes, instead):
            inputs = [known.get(x, x) for x in call.inputs]
            if inputs == [*call.inputs]:
                continue
            avals = [x.aval for x in call.outputs]
            new = self.call(call.primitive, call.params, inputs, avals, call.context)
            known |= zip(call.outputs, new, strict=True)
        return [known.get(x, x) for x in nodes]

    def call(
        self, primitive, params, inputs: Sequence[Node], avals, context=None
    ) -> Sequence[Node]:
        """Add a call of a primitive to the graph, and return its results.

        optax computes the learning rate separately for each leaf. Therefore, scalars
        that are computed in the same way from the same scalars share one node.

        Args:
          primitive, params, inputs, context: as in :class:`Call`.
          avals: shapes and dtypes of the results.
        """
        is_scalar = all(aval.shape == () for aval in avals)
        key = _computation_key(primitive, params, inputs) if is_scalar else None
        if key in self._scalars:
            return self._scalars[key]
        call = Call(primitive, params, tuple(inputs), self._count, avals, context)
        self._count += 1
        if key is not None:
            self._scalars[key] = call.outputs
        return call.outputs

    def _inlined(self, closed: ClosedJaxpr, operands: Sequence[Node]) -> list[Node]:
        return inline(closed, operands, self._read_equation)

    def _read_equation(self, eqn, operands: list[Node]) -> Sequence[Node]:
        primitive, params = eqn.primitive, eqn.params
        if primitive in CALLS and params.get("name") not in self._opaque:
            return self._inlined(called_jaxpr(params), operands)
        if primitive is p.copy_p:
            return operands
        if primitive.name == "pvary" and operands[0].is_scalar:
            # All leaves share a scalar, even if some leaves vary over mesh axes.
            return operands
        if primitive is p.cond_p and self._is_selection(params):
            which, *arguments = operands
            branches = [self._inlined(x, arguments) for x in params["branches"]]
            return [self.selected(which, x) for x in zip(*branches, strict=True)]
        avals = [var.aval for var in eqn.outvars]
        return self.call(primitive, params, operands, avals, eqn.ctx)

    def _read_element(self, eqn, operands: list[Node]) -> Sequence[Node]:
        if eqn.primitive in CALLS:
            return inline(called_jaxpr(eqn.params), operands, self._read_element)
        like = next((x for x in operands if not x.is_scalar), operands[0])
        avals = [like.aval.update(dtype=var.aval.dtype) for var in eqn.outvars]
        return self.call(eqn.primitive, eqn.params, operands, avals)

    def _is_selection(self, params: Mapping) -> bool:
        """Return whether to compute all branches of a conditional, and select one."""
        if is_by_platform(p.cond_p, params):
            return False
        is_expensive = holds(params, lambda x: x.primitive in EXPENSIVE)
        selects = self._selects or not is_expensive
        self.computes_all_branches |= selects and is_expensive
        return selects


def evaluate(nodes: Sequence[Node], known: dict[Node, typing.Any]) -> list:
    """Return the values of nodes, and add all computed values to ``known``."""
    run(calls_between(nodes, known), known)
    return [value_of(node, known) for node in nodes]


def _computation_key(primitive, params, inputs: Sequence[Node]):
    """Return a key that is equal for equal computations, or None if it has no hash."""

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


AS_BOUND = "as_bound"
"""Name of the parameter that stores the original primitive and its parameters."""

_COMING = {
    "CheckpointName": p.name_p,
    "CustomJVPTraced": p.custom_jvp_call_p,
    "CustomVJPTraced": p.custom_vjp_call_p,
    "RematTraced": p.remat_p,
}


def in_todays_terms(eqn: core.JaxprEqn) -> core.JaxprEqn:
    """Convert an equation of JAX's new autodiff to the primitive that it replaces.

    With ``jax_remat3``, ``jax_custom_vjp3`` and ``jax_custom_jvp3``, JAX represents
    checkpoints, names and functions with derivative rules as objects, and one primitive
    applies all of them. :func:`.graph.bind` still runs this original primitive.
    """
    applied = eqn.params.get("_prim")
    primitive = _COMING.get(type(applied).__name__)
    if applied is None or primitive is None:
        return eqn
    params = applied.params | {AS_BOUND: (eqn.primitive, eqn.params)}
    if "traced" in params:
        params["call_jaxpr"] = params["traced"].jaxpr
    return eqn.replace(primitive=primitive, params=params)
