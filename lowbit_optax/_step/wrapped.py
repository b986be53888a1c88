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
wrappers. If a wrapper computes with the updates or needs concrete values, the function
returns None, and the caller uses ``update`` and ``apply_updates``.
"""

import contextlib
import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.elementwise import NotElementwise, Scalars, program_of
from lowbit_optax._jaxprs.graph import (
    Call,
    Graph,
    Node,
    before_identities,
    evaluate,
    is_zero,
    made_of,
    scalar_of,
)
from lowbit_optax._numerics.landing import REPLACE
from lowbit_optax._step import context, trees
from lowbit_optax._step.backends import NEEDS_VALUES
from lowbit_optax._step.changed_updates import check_state, check_updates
from lowbit_optax._step.engine import Lowbit
from lowbit_optax._step.guard import UNGUARDED, Guard, Unguarded
from lowbit_optax._step.state import holds_lowbit
from lowbit_optax._step.stepper import (
    split_extra_args,
    stepper_of,
    update_p,
    with_extra_args,
)


@dataclasses.dataclass(frozen=True, eq=False)
class InnerStep:
    """The update of a transformation of this package inside wrappers.

    Args:
      call: the call of :data:`.stepper.update_p`.
      grads, state, params, extra_args: the arguments of the update, as trees of nodes.
      held: nodes that the transformation itself contains.
      leaves: for each of its leaves, the index of the leaf among all parameters.
      conditions: scalar nodes; the update happens if all of them are true.
    """

    call: Call
    grads: typing.Any
    state: typing.Any
    params: typing.Any
    extra_args: typing.Any
    held: typing.Any
    leaves: list[int]
    conditions: tuple[Node, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class WrapperTrace:
    """The update of a wrapped transformation, traced on shapes.

    Args:
      graph: the graph of the update.
      arguments: the structure of gradients, state and parameters.
      results: the structure of updates and new state.
    """

    graph: Graph
    arguments: trees.PyTreeDef
    results: trees.PyTreeDef

    @functools.cached_property
    def inputs(self) -> tuple:
        """Gradients, state and parameters, as trees of nodes."""
        return jax.tree.unflatten(self.arguments, self.graph.inputs)

    @functools.cached_property
    def params(self) -> tuple[list[str], list, trees.PyTreeDef]:
        """Paths, leaves and structure of the parameters."""
        return trees.named_leaves(self.inputs[2])

    @functools.cached_property
    def grads(self) -> list[Node]:
        """The gradients, as a list in the order of the parameters' leaves."""
        names, _, treedef = self.params
        return trees.parts_of(names, treedef, self.inputs[0], "grads")

    @functools.cached_property
    def outputs(self) -> tuple[list[Node], list[Node]]:
        """The updates as a list of leaves, and the leaves of the new state."""
        updates, state = jax.tree.unflatten(self.results, self.graph.outputs)
        names, _, treedef = self.params
        updates = trees.parts_of(names, treedef, updates, "updates")
        return updates, jax.tree.leaves(state)

    @property
    def keeps_state(self) -> bool:
        """Whether the update keeps the state's structure, shapes and dtypes."""
        like = lambda nodes: [(x.aval.shape, x.aval.dtype) for x in nodes]
        same = self.arguments.children()[1] == self.results.children()[1]
        return same and like(jax.tree.leaves(self.inputs[1])) == like(self.outputs[1])

    @functools.cached_property
    def found(self) -> "dict[Node, tuple[Call, int, tuple[Node, ...]]]":
        """The results of the marked updates, keyed by output node.

        The dict is empty if any other output depends on a marked update.
        """
        old_state = jax.tree.leaves(self.inputs[1])
        updates, new_state = self.outputs
        found = {}
        if len(old_state) != len(new_state):
            return {}
        # A gradient of a frozen quantised weight may be a tree of float0 arrays.
        updates = jax.tree.leaves(updates)
        before: list[Node | None] = [*[None] * len(updates), *old_state]
        for node, old in zip([*updates, *new_state], before, strict=True):
            result = _result(node, old, self.graph)
            if result is None:
                if any(map(_is_marked, made_of([node]))):
                    return {}
                continue
            call, number, _ = result
            if (old is None) != (number < call.params["updates"]):
                return {}
            found[node] = result
        return found

    @functools.cached_property
    def inner(self) -> dict[Call, InnerStep]:
        """The updates of this package, keyed by call; empty if wrappers change them."""
        conditions: dict[Call, tuple[Node, ...]] = {}
        for call, _, when in self.found.values():
            if conditions.setdefault(call, when) != when:
                return {}
        first_node = lambda leaf: jax.tree.leaves(leaf)[0]
        numbers = {first_node(leaf): i for i, leaf in enumerate(self.params[1])}
        inner = {}
        for call, when in conditions.items():
            structure = call.params["structure"]
            grads, state, params, extra, held = structure.unflatten(call.inputs)
            if any(map(_is_marked, made_of([*call.inputs, *when]))):
                return {}
            leaves = []
            for i, leaf in enumerate(trees.named_leaves(params)[1]):
                number = numbers.get(first_node(leaf))
                if number is None:
                    return {}
                if self.found.get(self.outputs[0][number], ())[:2] != (call, i):
                    return {}
                leaves.append(number)
            inner[call] = InnerStep(
                call, grads, state, params, extra, held, leaves, when
            )
        return inner

    def gets_gradients(self, inner: InnerStep) -> bool:
        """Return whether an update gets the gradients unchanged."""
        grads = self.grads
        pairs = zip(jax.tree.leaves(inner.grads), inner.leaves, strict=True)
        return all(node is grads[i] for node, i in pairs)

    def is_elementwise(self, inner: InnerStep) -> bool:
        """Return whether kernels can compute the gradients of an update."""
        grads, scalars = self.grads, Scalars(self.graph)
        if not isinstance(inner.call.params["stepper"], Lowbit):
            return self.gets_gradients(inner)
        try:
            for i, node in zip(inner.leaves, jax.tree.leaves(inner.grads), strict=True):
                program_of([node], [grads[i]], scalars, is_exact=True)
        except NotElementwise:
            return False
        return True


def trace_wrapper(tx, grads, state, params, extra_args: dict) -> WrapperTrace | None:
    """Trace an update, or return None if it cannot return new parameters directly.

    This is the case if ``tx`` contains no transformation of this package, or if a
    wrapper computes with the results of a step or needs concrete values. Raises a
    ChangedUpdateError if a wrapper changes an update of ``lowbit``.
    """

    def update(grads, state, params):
        with context.changed(wants_params=True):
            return tx.update(grads, state, params, **extra_args)

    check_state(state, params)
    arguments = grads, state, params
    try:
        closed, shapes = jax.make_jaxpr(update, return_shape=True)(*arguments)
        if closed.effects:
            return None
        structure = jax.tree.structure
        traced = WrapperTrace(Graph(closed), structure(arguments), structure(shapes))
        if traced.inner:
            return traced
        whole = Graph(closed, selects=True)
        read = dataclasses.replace(traced, graph=whole)
        updates, nodes = read.outputs[0], read.params[1]
    except NEEDS_VALUES:
        return None
    check_updates(whole, updates, nodes, params)
    return None


def _result(
    node: Node, old: Node | None, graph: Graph
) -> tuple[Call, int, tuple[Node, ...]] | None:
    """Return ``(call, result index, conditions)`` for a result of a marked update.

    If a condition is false, the result must be replaced by ``old``, or by zeros if
    ``old`` is None. The function returns None for all other nodes.
    """
    call = node.call
    if call is None:
        return None
    if call.primitive is update_p:
        return call, [x is node for x in call.outputs].index(True), ()
    if call.primitive is not p.select_n_p or len(call.inputs) != 3:
        return None
    which, *cases = call.inputs
    which = scalar_of(which)
    if which is None:
        return None
    for case, other, holds in zip(cases, cases[::-1], (False, True), strict=True):
        is_kept = is_zero(other) if old is None else before_identities(other) is old
        found = _result(case, old, graph) if is_kept else None
        if found is not None:
            condition = which if holds else graph.apply(lax.bitwise_not, which)
            return *found[:2], (*found[2], condition)
    return None


def _is_marked(node: Node) -> bool:
    """Return whether a node is a result of a marked update."""
    return node.call is not None and node.call.primitive is update_p


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
    """Runs the step of a wrapped transformation.

    Args:
      traced: the trace of the wrappers.
      seen: the tree of gradients that wrappers see.
      params, state: the arguments of ``update``.
      grads: list of the gradients that the user passed.
      apply_update, guard, summed: see :func:`step_wrapped`.
    """

    traced: WrapperTrace
    seen: typing.Any
    params: typing.Any
    state: typing.Any
    grads: list
    apply_update: Callable
    guard: Guard | Unguarded
    summed: Summed | None

    def result(self) -> tuple:
        """Return ``(new params, new state)``."""
        traced, choose = self.traced, self.guard.chosen
        updates, new_state = traced.outputs
        _, leaves, treedef = trees.named_leaves(self.params)

        def after(old, nodes, apply: Callable = lambda _, value: value):
            value = jax.tree.map(self._value, nodes)
            if traced.found.keys() >= set(jax.tree.leaves(nodes)):
                return value  # already selected by its own guard
            return choose(apply(old, value), old)

        new = [after(*x, self.apply_update) for x in zip(leaves, updates, strict=True)]
        old_state = jax.tree.leaves(self.state)
        state = [after(*x) for x in zip(old_state, new_state, strict=True)]
        structure = traced.results.children()[1]
        return treedef.unflatten(new), structure.unflatten(state)

    @functools.cached_property
    def _known(self) -> dict[Node, typing.Any]:
        """Values by node: the arguments, and values that were computed from them."""
        flat = jax.tree.leaves((self.seen, self.state, self.params))
        return dict(zip(self.traced.graph.inputs, flat, strict=True))

    def _value(self, node: Node):
        if node not in self.traced.found:
            return evaluate([node], self._known)[0]
        call, number, _ = self.traced.found[node]
        return self._steps[call][number]

    @functools.cached_property
    def _steps(self) -> dict[Call, list]:
        """The results of the updates of this package's transformations."""
        return {call: self._step(inner) for call, inner in self.traced.inner.items()}

    def _step(self, inner: InnerStep) -> list:
        """Return a list of the new parameters and the leaves of the new state."""
        one, guard = jnp.float32(1), self.guard
        values = lambda tree: jax.tree.map(self._value, tree)
        stepper = inner.call.params["with_held"](values(inner.held))
        for node in inner.conditions:
            guard = guard.within(one, self._value(node))
        run, is_lowbit = stepper.run, isinstance(stepper, Lowbit)
        # If a wrapper may skip the step, its kernels cannot reset the accumulators.
        takes_sums = is_lowbit and not inner.conditions
        if self.traced.is_elementwise(inner) and (takes_sums or self.summed is None):
            structure = jax.tree.structure(inner.grads)
            grads = structure.unflatten(self.grads[i] for i in inner.leaves)
            if is_lowbit:
                run = self._in_kernels(stepper, inner)
        else:
            grads = values(inner.grads)
            guard = Guard(one, guard.scalars[1]) if guard.scalars else guard
        state, params, extra_args = map(
            values, (inner.state, inner.params, inner.extra_args)
        )
        extra_args = extra_args | inner.call.params["static"]()
        with context.changed(of_wrappers=tuple(self._known.values())):
            new, new_state = run(params, state, grads, REPLACE, extra_args, guard)
        return [*trees.named_leaves(new)[1], *jax.tree.leaves(new_state)]

    def _in_kernels(self, lowbit: Lowbit, inner: InnerStep) -> Callable:
        """Return a step of ``lowbit`` whose kernels also compute its gradients."""
        within = with_extra_args(lowbit.inner)

        def update(updates, state, params=None, **extra_args):
            updates = self._changed(inner, updates)
            return within.update(updates, state, params, **extra_args)

        if not self.traced.gets_gradients(inner):
            changed = optax.GradientTransformationExtraArgs(within.init, update)
            lowbit = dataclasses.replace(lowbit, inner=changed)
        if self.summed is None:
            return lowbit.run
        return functools.partial(self.summed.run, lowbit, inner.leaves)

    def _changed(self, inner: InnerStep, grads):
        """Compute an update's gradients from the float32 gradients of its leaves."""
        nodes = [self.traced.grads[i] for i in inner.leaves]
        # Other known values were computed from gradients outside of this trace.
        known = {node: self._known[node] for node in self.traced.graph.inputs}
        known |= zip(nodes, jax.tree.leaves(grads), strict=True)
        wanted, structure = jax.tree.flatten(inner.grads)
        return structure.unflatten(evaluate(wanted, known))


def step_wrapped(
    tx: optax.GradientTransformationExtraArgs,
    params,
    state,
    grads,
    extra_args: dict,
    apply_update: Callable,
    guard: Guard | Unguarded = UNGUARDED,
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
      contains no transformation of this package.

    Raises:
      ChangedUpdateError: if a wrapper changes an update of ``lowbit``.
    """
    found = _chosen_trace(tx, params, state, grads, extra_args, guard, summed)
    if found is None:
        return None
    names, _, treedef = trees.named_leaves(params)
    leaves = trees.parts_of(names, treedef, grads, "grads")
    traced, seen = found
    run = _Run(traced, seen, params, state, leaves, apply_update, guard, summed)
    return run.result()


def _chosen_trace(
    tx, params, state, grads, extra_args: dict, guard, summed: Summed | None
) -> tuple[WrapperTrace, typing.Any] | None:
    """Return a trace and the gradients for wrappers, or None if updates are needed.

    By default, wrappers receive the user's gradients unchanged, as in optax. They
    receive float32 gradients in two cases: if the step is guarded, and if this lets
    kernels compute the wrappers' operations.
    """
    wide = jax.tree.map(_wide, grads)
    seen = wide if guard.scalars else grads
    traced = trace_wrapper(tx, seen, state, params, extra_args)
    if traced is None:
        return None
    if guard.scalars:
        return traced, guard.unscaled(wide) if summed is None else summed.seen
    if not all(map(traced.gets_gradients, traced.inner.values())):
        as_wide = trace_wrapper(tx, wide, state, params, extra_args)
        if (
            as_wide is not None
            and as_wide.keeps_state
            and all(map(as_wide.is_elementwise, as_wide.inner.values()))
        ):
            return as_wide, wide
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
