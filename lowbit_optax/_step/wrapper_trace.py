"""``WrapperTrace``: the operations of optax's wrappers around an update.

:mod:`lowbit_optax._step.wrapped` calls :func:`trace_wrapper` with a transformation that
contains one of this package. In the trace, each update of this package is a call of
:data:`.stepper.update_p`. The graph shows how wrappers compute the gradients of these
updates, and how they use the results.
"""

import dataclasses
import functools
import typing

import jax
from jax import lax
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.elementwise import NotElementwise, Scalars, program_of
from lowbit_optax._jaxprs.graph import (
    Call,
    Graph,
    Node,
    before_identities,
    is_zero,
    made_of,
    scalar_of,
)
from lowbit_optax._step import context, trees
from lowbit_optax._step.backends import NEEDS_VALUES
from lowbit_optax._step.changed_updates import check_state, check_updates
from lowbit_optax._step.engine import Lowbit
from lowbit_optax._step.stepper import update_p


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
