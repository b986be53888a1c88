"""Direct steps for transformations of this package inside optax's wrappers.

``optax.chain``, ``masked``, ``partition``, ``inject_hyperparams``, ``apply_if_finite``
and similar wrappers compute something before the update of a transformation of this
package, and return its updates unchanged. :func:`lowbit_optax.step` calls
:func:`step_wrapped`, which traces the wrappers on shapes with a marker for each such
update (:func:`.stepper.marked`). Then it runs the parts of the trace as follows:

    elementwise operations that compute an update's gradients:    in its kernel
    selections between results of an update and old values:       as a guard
    all other operations:                                         unchanged

The step returns new parameters instead of updates, and costs the same as without
wrappers. If a wrapper needs concrete values, the function returns None, and the caller
uses ``update`` and ``apply_updates``.

An update of ``lowbit`` is the difference of two stored parameters, and the residual in
the new state belongs to the new parameter. A wrapper may return the update unchanged,
or skip the step by returning zeros and the old state. Any other update leads to a
parameter that does not match the residual, and small updates are lost.
:attr:`WrapperTrace.origins` follows the results of markers through the wrappers. If an
update depends on a marker but does not have the value of one result, the function
raises a :class:`ChangedUpdateError`.
"""

import contextlib
import dataclasses
import functools
import itertools
import typing
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.elementwise import NotElementwise, ScalarTable, program_of
from lowbit_optax._jaxprs.graph import (
    UNCHANGED,
    Call,
    Graph,
    Node,
    before_identities,
    calls_between,
    evaluate,
    is_constant_number,
    is_zero,
    scalar_of,
)
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._numerics.landing import REPLACE
from lowbit_optax._step import context, trees
from lowbit_optax._step.engine import Lowbit
from lowbit_optax._step.guard import UNGUARDED, Guard
from lowbit_optax._step.run import NEEDS_VALUES
from lowbit_optax._step.state import holds_lowbit
from lowbit_optax._step.stepper import (
    MarkedArguments,
    split_extra_args,
    stepper_of,
    update_p,
    with_extra_args,
)

_MOVES = UNCHANGED | {
    "concatenate", "device_put", "dynamic_slice", "optimization_barrier", "reshape",
    "rev", "slice", "split", "squeeze", "stack", "transpose", "unstack",
}  # fmt: skip
"""Operations that move the elements of arrays without changing them."""


class Origin(typing.NamedTuple):
    """The result of a marked update whose value a node has.

    Args:
      call, number: the call of :data:`.stepper.update_p`, and the index of its result.
      old: the node of the old value of a leaf of the state; None for an update.
      conditions: scalar nodes. If one of them is false, the node is ``old`` or zero.
      is_direct: whether the wrapper only makes such selections.
    """

    call: Call
    number: int
    old: Node | None
    conditions: tuple[Node, ...] = ()
    is_direct: bool = True


class InnerStep(typing.NamedTuple):
    """The update of a transformation of this package inside wrappers.

    Args:
      call: the call of :data:`.stepper.update_p`.
      arguments: the arguments of the update, as trees of nodes.
      leaves: for each of its leaves, the index of the leaf among all parameters.
      grads: the gradients of these leaves before the wrappers.
      conditions: scalar nodes; the update happens if all of them are true.
    """

    call: Call
    arguments: MarkedArguments
    leaves: list[int]
    grads: list[Node]
    conditions: tuple[Node, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class WrapperTrace:
    """The update of a wrapped transformation, traced on shapes.

    Args:
      graph: the graph of the update.
      grads, state, params: the arguments of the update, as trees of nodes.
      updates: list with a node, or a tree of nodes, for each leaf of the parameters.
      new_state: the new state, as a tree of nodes.
    """

    graph: Graph
    grads: typing.Any
    state: typing.Any
    params: typing.Any
    updates: list
    new_state: typing.Any

    @property
    def keeps_state(self) -> bool:
        """Whether the update keeps the state's structure, shapes and dtypes."""
        avals = lambda tree: trees.abstract(jax.tree.map(lambda x: x.aval, tree))
        old, new = map(jax.tree.flatten, map(avals, (self.state, self.new_state)))
        return old == new

    @functools.cached_property
    def marked(self) -> dict[Call, MarkedArguments]:
        """The marked updates and their arguments, as trees of nodes."""
        calls = calls_between(self.graph.outputs, ())
        marked = [x for x in calls if x.primitive is update_p]
        return {x: x.params["structure"].unflatten(x.inputs) for x in marked}

    @functools.cached_property
    def origins(self) -> dict[Node, Origin | None]:
        """The origins of all nodes that marked updates affect.

        The origin is None if the node does not have the value of one result. An update
        that depends on another one has no such results.
        """
        origins: dict[Node, Origin | None] = {}
        for call in calls_between(self.graph.outputs, ()):
            if not origins.keys().isdisjoint(call.inputs):
                origins |= dict.fromkeys(call.outputs, self._after(call, origins))
            elif call in self.marked:
                state = jax.tree.leaves(self.marked[call].state)
                old = [*[None] * call.params["updates"], *map(before_identities, state)]
                results = enumerate(zip(call.outputs, old, strict=True))
                origins |= {node: Origin(call, i, x) for i, (node, x) in results}
        return origins

    def _after(self, call: Call, origins: dict[Node, Origin | None]) -> Origin | None:
        """Return the origin of the results of a call, given the origins before it."""
        primitive, dtype = call.primitive, call.outputs[0].aval.dtype
        if primitive is p.select_n_p:
            return self._selected(call, origins)
        affected = [x for x in call.inputs if x in origins]
        first = origins[affected[0]]
        if first is None:
            return None
        moved = first._replace(is_direct=False)
        # A cast to one of these dtypes keeps every bit of an update.
        is_wide = dtype in (jnp.float32, jnp.float64)
        is_widened = primitive is p.convert_element_type_p and is_wide
        if primitive.name in _MOVES or is_widened:
            kinds = {x and (x.call, x.conditions) for x in map(origins.get, affected)}
            return moved if len(kinds) == 1 else None
        if primitive not in (p.add_p, p.mul_p) or len(affected) == 2:
            return None
        (other,) = [x for x in call.inputs if x not in origins]
        if primitive is p.add_p:
            return moved if _is_nothing(other) else None
        factor = scalar_of(other)
        if factor is None:
            return None
        if is_constant_number(factor) and factor.constant == 1:
            return moved
        holds = _truth_value(factor)
        return holds and moved._replace(conditions=(*moved.conditions, holds))

    def _selected(self, call: Call, origins: dict) -> Origin | None:
        """Return the origin of a selection between results and zeros or ``old``."""
        which, *cases = call.inputs
        condition, others = scalar_of(which), [x for x in cases if x not in origins]
        found = [origins[x] for x in cases if x in origins]
        if condition is None or not found or None in found:
            return None
        first = found[0]
        is_old = lambda x: before_identities(x) is first.old
        is_skip = is_zero if first.old is None else is_old
        if not all(map(is_skip, others)) or len({x.old for x in found}) > 1:
            return None
        if cases[0] in origins:
            condition = self.graph.apply(lax.bitwise_not, condition)
        is_direct = first.is_direct and len(found) == len(others) == 1
        return first._replace(
            conditions=(*first.conditions, condition),
            is_direct=is_direct and which not in origins,
        )

    @functools.cached_property
    def found(self) -> dict[Node, Origin]:
        """The origins of the outputs that marked updates affect.

        The dict is empty if the wrapper computes any of these outputs.
        """
        # A gradient of a frozen quantized weight may be a tree of float0 arrays.
        updates, state = map(jax.tree.leaves, (self.updates, self.state))
        olds, outputs = [*[None] * len(updates), *state], self.graph.outputs
        if len(outputs) != len(olds) or self.graph.computes_all_branches:
            return {}
        found = {}
        for node, old in zip(outputs, olds, strict=True):
            if node in self.origins:
                found[node] = of = self.origins[node]
                if of is None or not of.is_direct or of.old is not old:
                    return {}
        return found

    @functools.cached_property
    def inner(self) -> list[InnerStep]:
        """The updates of this package; empty if the step cannot be direct."""
        first_node = lambda leaf: jax.tree.leaves(leaf)[0]
        names, leaves, treedef = trees.named_leaves(self.params)
        numbers = {first_node(leaf): i for i, leaf in enumerate(leaves)}
        inner = []
        for call in dict.fromkeys(of.call for of in self.found.values()):
            arguments = self.marked[call]
            params = map(first_node, trees.named_leaves(arguments.params)[1])
            leaves = [numbers[x] for x in params if x in numbers]
            origins = [self.found.get(self.updates[i], ())[:2] for i in leaves]
            passes_on = origins == [(call, i) for i in range(call.params["updates"])]
            conditions = {x.conditions for x in self.found.values() if x.call is call}
            if not passes_on or len(conditions) != 1:
                return []
            grads = trees.parts_of(names, treedef, self.grads, "grads")
            grads = [grads[i] for i in leaves]
            inner.append(InnerStep(call, arguments, leaves, grads, *conditions))
        return inner

    def changes(self, param, update) -> bool:
        """Return whether a wrapper changes the update of a parameter.

        A wrapper may skip an update or freeze a parameter, but only together with the
        old state.
        """
        nodes = lambda tree: {*jax.tree.leaves(tree)}
        outputs, param, updates = {*self.graph.outputs}, nodes(param), nodes(update)
        stepping = {
            call
            for call, arguments in self.marked.items()
            if outputs & {*call.outputs[call.params["updates"] :]}
        }
        of_param = {x for x in stepping if param & nodes(self.marked[x].params)}

        def is_kept(of: Origin | None) -> bool:
            if of is None or of.old is not None or of_param - {of.call}:
                return False
            return not of.conditions or of.call not in stepping

        is_ours = of_param or updates & self.origins.keys()
        return bool(is_ours) and not all(map(is_kept, map(self.origins.get, updates)))

    def gets_gradients(self, inner: InnerStep) -> bool:
        """Return whether an update gets the gradients unchanged."""
        return jax.tree.leaves(inner.arguments.grads) == inner.grads

    def is_elementwise(self, inner: InnerStep) -> bool:
        """Return whether kernels can compute the gradients of an update."""
        grads, scalars = jax.tree.leaves(inner.arguments.grads), ScalarTable(self.graph)
        if not isinstance(inner.call.params["stepper"], Lowbit):
            return self.gets_gradients(inner)
        with contextlib.suppress(NotElementwise):
            for node, grad in zip(grads, inner.grads, strict=True):
                program_of([node], [grad], scalars, is_exact=True)
            return True
        return False


def _is_nothing(node: Node) -> bool:
    """Return whether a node is 0 or a product with 0, as for a weight decay of 0."""
    call = node.call
    if call is not None and call.primitive in (p.convert_element_type_p, p.mul_p):
        return any(map(_is_nothing, call.inputs))
    return is_zero(node)


def _truth_value(scalar: Node) -> Node | None:
    """Return the bool from which a scalar, 0 or 1, is cast; None for other scalars."""
    while scalar.call is not None and scalar.aval.dtype != jnp.bool_:
        if scalar.call.primitive is not p.convert_element_type_p:
            return None
        (scalar,) = scalar.call.inputs
    return scalar if scalar.aval.dtype == jnp.bool_ else None


def trace_wrapper(tx, grads, state, params, extra_args: dict) -> WrapperTrace | None:
    """Trace an update, or return None if it cannot return new parameters directly.

    This is the case if ``tx`` contains no ``lowbit``, or if a wrapper computes with the
    results of a step or needs concrete values. Raises a ChangedUpdateError if a wrapper
    changes an update of ``lowbit``.
    """

    def update(grads, state, params):
        with context.changed(wants_params=True):
            return tx.update(grads, state, params, **extra_args)

    if not holds_lowbit(state):
        return None
    check_state(state, params)
    arguments = grads, state, params
    try:
        closed, shapes = jax.make_jaxpr(update, return_shape=True)(*arguments)
    except NEEDS_VALUES:
        return None
    if closed.effects:
        return None
    graph, structure = Graph(closed, selects=True), jax.tree.structure
    of_grads, of_state, of_params = structure(arguments).unflatten(graph.inputs)
    updates, new_state = structure(shapes).unflatten(graph.outputs)
    names, leaves, treedef = trees.named_leaves(of_params)
    updates = trees.parts_of(names, treedef, updates, "updates")
    traced = WrapperTrace(graph, of_grads, of_state, of_params, updates, new_state)
    if traced.inner:
        return traced
    check_updates(params, map(traced.changes, leaves, updates))
    return None


class Summed(typing.Protocol):
    """Accumulated gradients, which kernels can decode."""

    @property
    def seen(self) -> typing.Any:
        """The tree of sums in float32."""
        ...

    def run(self, lowbit: Lowbit, leaves: Sequence[int], params, state, *args) -> tuple:
        """Run a step that updates the given leaves with their sums."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class _Run:
    """Runs the steps inside a wrapper.

    Args:
      traced: the trace of the wrappers.
      known: dict from nodes to values: the gradients that wrappers see, state and
        parameters, and values that were computed from them.
      grads: list of the gradients that the user passed.
      guard, summed: see :func:`step_wrapped`.
    """

    traced: WrapperTrace
    known: dict[Node, typing.Any]
    grads: list
    guard: Guard
    summed: Summed | None

    def step(self, inner: InnerStep) -> list:
        """Return a list of the new parameters and the leaves of the new state."""
        one, guard, arguments = jnp.float32(1), self.guard, inner.arguments
        stepper = inner.call.params["with_held"](self._values(arguments.held))
        for node in self._values(inner.conditions):
            guard = guard.within(one, node)
        run, is_lowbit = stepper.run, isinstance(stepper, Lowbit)
        # If a wrapper may skip the step, its kernels cannot reset the accumulators.
        takes_sums = is_lowbit and not inner.conditions
        if self.traced.is_elementwise(inner) and (takes_sums or self.summed is None):
            structure = jax.tree.structure(arguments.grads)
            grads = structure.unflatten(self.grads[i] for i in inner.leaves)
            if is_lowbit:
                run = self._in_kernels(stepper, inner)
        else:
            grads = self._values(arguments.grads)
            guard = Guard(one, guard.scalars[1]) if guard.scalars else guard
        state, params, extra_args = self._values(arguments[1:4])
        extra_args = extra_args | inner.call.params["static"]()
        with context.changed(of_wrappers=tuple(self.known.values())):
            new, new_state = run(params, state, grads, REPLACE, extra_args, guard)
        return [*trees.named_leaves(new)[1], *jax.tree.leaves(new_state)]

    def _values(self, tree):
        nodes, structure = jax.tree.flatten(tree)
        return structure.unflatten(evaluate(nodes, self.known))

    def _in_kernels(self, lowbit: Lowbit, inner: InnerStep) -> Callable:
        """Return a step of ``lowbit`` whose kernels also compute its gradients."""
        within = with_extra_args(lowbit.inner)
        wanted, structure = jax.tree.flatten(inner.arguments.grads)

        def update(updates, state, params=None, **extra_args):
            # Other known values were computed from gradients outside of this trace.
            known = {node: self.known[node] for node in self.traced.graph.inputs}
            known |= zip(inner.grads, jax.tree.leaves(updates), strict=True)
            updates = structure.unflatten(evaluate(wanted, known))
            return within.update(updates, state, params, **extra_args)

        if not self.traced.gets_gradients(inner):
            changed = optax.GradientTransformationExtraArgs(within.init, update)
            lowbit = dataclasses.replace(lowbit, inner=changed)
        if self.summed is None:
            return lowbit.run
        return functools.partial(self.summed.run, lowbit, inner.leaves)


def step_wrapped(
    tx: optax.GradientTransformationExtraArgs,
    params,
    state,
    grads,
    extra_args: dict,
    apply_update: Callable,
    guard: Guard = UNGUARDED,
    summed: Summed | None = None,
) -> tuple | None:
    """Run a step of a wrapped transformation that returns new parameters directly.

    If wrappers change the gradients with elementwise operations and scalars, as in
    clipping by a global norm, these operations become part of the kernels. They run in
    float32, as they do inside ``lowbit``, and not in the dtypes of the gradients.

    Args:
      tx, params, state, grads, extra_args: the transformation and the arguments of its
        update.
      apply_update: ``(param, update) -> param``, for leaves that other transformations
        update.
      guard: unscales the gradients, and decides whether the step happens.
      summed: accumulated gradients to use instead of ``grads``; needs a guard.

    Returns:
      ``(new params, new state)``, or None if a wrapper prevents a direct step or ``tx``
      contains no ``lowbit``.

    Raises:
      ChangedUpdateError: if a wrapper changes an update of ``lowbit``.
    """
    chosen = _chosen_trace(tx, params, state, grads, extra_args, guard, summed)
    if chosen is None:
        return None
    traced, seen = chosen
    names, leaves, treedef = trees.named_leaves(params)
    grads = trees.parts_of(names, treedef, grads, "grads")
    outputs, inputs = traced.graph.outputs, jax.tree.leaves((seen, state, params))
    known = dict(zip(traced.graph.inputs, inputs, strict=True))
    run = _Run(traced, known, grads, guard, summed)
    for inner in traced.inner:
        new, found = run.step(inner), traced.found.items()
        known |= {x: new[of.number] for x, of in found if of.call is inner.call}
    values = dict(zip(outputs, evaluate(outputs, known), strict=True))

    def after(old, nodes, apply: Callable = lambda _, value: value):
        value = jax.tree.map(values.__getitem__, nodes)
        if traced.found.keys() >= set(jax.tree.leaves(nodes)):
            return value  # already selected by its own guard
        return guard.chosen(apply(old, value), old)

    new = [after(*x, apply_update) for x in zip(leaves, traced.updates, strict=True)]
    nodes, structure = jax.tree.flatten(traced.new_state)
    stored = [after(*x) for x in zip(jax.tree.leaves(state), nodes, strict=True)]
    return treedef.unflatten(new), structure.unflatten(stored)


def _chosen_trace(
    tx, params, state, grads, extra_args: dict, guard, summed: Summed | None
) -> tuple[WrapperTrace, typing.Any] | None:
    """Return a trace and the gradients for wrappers, or None if updates are needed.

    By default, wrappers receive the user's gradients unchanged, as in optax. They
    receive float32 gradients in two cases: if the step is guarded, and if this lets
    kernels compute the wrappers' operations.
    """
    trace = lambda grads: trace_wrapper(tx, grads, state, params, extra_args)
    wide = jax.tree.map(_wide, grads)
    traced = trace(wide if guard.scalars else grads)
    if traced is None:
        return None
    if guard.scalars:
        return traced, guard.unscaled(wide) if summed is None else summed.seen
    if not all(map(traced.gets_gradients, traced.inner)):
        wider = trace(wide)
        if wider and wider.keeps_state and all(map(wider.is_elementwise, wider.inner)):
            return wider, wide
    return traced, grads


def is_direct(tx, params, state, extra_args: dict) -> bool | None:
    """Return whether ``lowbit_optax.step`` computes new parameters without updates.

    Parameters, state and extra arguments may be shapes, because nothing is computed.
    The extra argument ``value`` is optional. The result is None if ``tx`` contains no
    transformation of this package.

    Raises:
      ChangedUpdateError: if a wrapper changes an update of ``lowbit``.
    """
    stepper = stepper_of(tx)
    if not holds_lowbit(state) or isinstance(stepper, Lowbit):
        return holds_lowbit(state) or None
    found = []
    value = {"value": jax.ShapeDtypeStruct((), jnp.float32)}

    traced, static = split_extra_args(value | extra_args)

    def step(params, state, traced):
        extra_args = traced | static
        _, leaves, treedef = trees.named_leaves(params)
        grads = treedef.unflatten(jnp.zeros(x.shape, jnp.float32) for x in leaves)
        if stepper is not None:
            stepper.run(params, state, grads, REPLACE, extra_args)
            return
        wide = with_extra_args(tx)
        arguments = wide, params, state, grads, extra_args, UNGUARDED, None
        found.append(_chosen_trace(*arguments) is not None)

    # The transformation may need arguments that are not given here.
    with context.changed(is_analysed=True), contextlib.suppress(TypeError):
        jax.eval_shape(step, params, state, traced)
    return any(found) or stepper is not None


def _wide(grad):
    return grad.astype(jnp.float32) if trees.is_narrow_array(grad) else grad


class ChangedUpdateError(ValueError):
    """A wrapper changes updates that ``lowbit`` has already rounded.

    Args:
      params: dict from paths to parameters, for parameters with changed updates.
    """

    def __init__(self, params: dict):
        self.names = tuple(params)
        name, leaf = next(iter(params.items()))
        others = f" ({len(params) - 1} more)" if len(params) > 1 else ""
        super().__init__(
            "lowbit: a transformation after or around lowbit must not change updates, "
            f"but changes the update of params{name}, {trees.describe(leaf)}{others}. "
            "This update is rounded to match the residual, so a changed update would "
            "lose the low bits of the weights. Put the transformation inside, as in "
            "lowbit(optax.chain(optax.adamw(1e-3), optax.scale(0.5))). Around lowbit, "
            "use only wrappers that return its updates unchanged, or zeros together "
            "with the old state"
        )


def check_updates(params, is_changed: Iterable[bool]) -> None:
    """Raise an error if the update of a narrow or quantized parameter is changed."""
    leaves = trees.by_path(params).items()
    changed = {
        name: leaf
        for (name, leaf), changes in zip(leaves, is_changed, strict=False)
        if changes and (trees.is_quantized(leaf) or is_narrow(jnp.asarray(leaf).dtype))
    }
    if changed:
        raise ChangedUpdateError(changed)


def check_state(state, params) -> None:
    """Raise ChangedUpdateError for the state of a wrapper that changes updates.

    This check finds ``optax.contrib.mechanize`` by its state, because JAX cannot trace
    its update if gradients and parameters differ in dtype.
    """
    if any(map(holds_lowbit, trees.all_of(optax.contrib.MechanicState, state))):
        check_updates(params, itertools.repeat(True))
