"""The inner update as a graph, for kernels and for what a step leaves unchanged."""

import dataclasses
import functools
import typing
from collections.abc import Callable

import jax
from jax.extend.core.primitives import and_p

from lowbit_optax._jaxprs.graph import Graph, evaluate
from lowbit_optax._jaxprs.nodes import Node, is_zero
from lowbit_optax._step import trees
from lowbit_optax._step.error_feedback import Feedback, Moves, feedback_of
from lowbit_optax._step.moments import MomentStorage
from lowbit_optax._step.prepared import PreparedStep, no_moment_for_errors
from lowbit_optax._step.unchanged import unchanged_when, zero_when


class UpdateNodes(typing.NamedTuple):
    """Nodes of an inner update's inputs and outputs, per leaf or per part of the state.

    Args:
      grads, masters, updates: per leaf.
      state, new_state: per part, which is a leaf of the inner state.
      next_updates: per leaf, of a second update by the same gradients, if it is traced.
    """

    grads: list[Node]
    masters: list[Node]
    state: list[Node]
    updates: list[Node]
    new_state: list[Node]
    next_updates: list[Node]


@dataclasses.dataclass(frozen=True, eq=False)
class UpdateGraph:
    """A traced inner update.

    Args:
      graph: its graph.
      nodes: the graph's inputs and outputs.
      state_tree: structure of the new inner state.
      keeps_structure: whether the state has the same structure before and after. If it
        has not, parts before and after the update cannot be paired.
      storage: per part of the old state, how it is stored; None without a format.
      feedback: per leaf, where its rounding errors go; None if they are lost.
      effects: its side effects.
    """

    graph: Graph
    nodes: UpdateNodes
    state_tree: trees.PyTreeDef
    keeps_structure: bool
    storage: list[MomentStorage | None]
    feedback: list[Feedback | None]
    effects: typing.Any

    @property
    def state_pairs(self) -> list[tuple[Node, Node]]:
        """Per part of the state, the nodes before and after the update."""
        if not self.keeps_structure:
            return []
        return list(zip(self.nodes.state, self.nodes.new_state, strict=True))

    @functools.cached_property
    def still_leaves(self) -> list[Node | None]:
        """Per leaf, when its update is zero by a condition, such as a skipped step.

        A node of a truth value; None if it is not known to be zero ever.
        """
        return [zero_when(node, self.graph) for node in self.nodes.updates]

    @functools.cached_property
    def still_parts(self) -> list[Node | None]:
        """Per part of the new state, when it is the old part by a condition.

        None for parts without a moment format, which are stored as they are.
        """
        if not self.keeps_structure:
            return [None] * len(self.nodes.new_state)
        still = [
            None if how is None else self._unchanged_when(i)
            for i, how in enumerate(self.storage)
        ]
        # What is stored of a moment and of what it is relative to belongs together.
        together: dict[int, list[int]] = {}
        for i, how in enumerate(self.storage):
            if how is not None and how.reference is not None:
                together.setdefault(how.reference, []).append(i)
        for second, others in together.items():
            of_all = self._unchanged_when(second)
            for i in others:
                of_all = self._both(of_all, still[i])
            if self.storage[second] is not None:
                others = [second, *others]
            for i in others:
                still[i] = of_all
        return still

    def _unchanged_when(self, number: int) -> Node | None:
        old, new = self.state_pairs[number]
        return unchanged_when(new, old, self.graph)

    def _both(self, first: Node | None, second: Node | None) -> Node | None:
        """When two truth values hold; None is one that never does."""
        if first is None or second is None or first is second:
            return first if first is second else None
        return self.graph.call(and_p, {}, [first, second], [first.aval])[0]

    def still_values(self, prepared: PreparedStep) -> tuple[list, list]:
        """The values of :attr:`still_leaves` and :attr:`still_parts`, for XLA."""
        of_all = self._values(prepared, [*self.still_leaves, *self.still_parts])
        count = len(self.nodes.updates)
        return of_all[:count], of_all[count:]

    def feedback_values(self, prepared: PreparedStep) -> list[Feedback | None]:
        """:attr:`feedback` with its values, for XLA."""
        nodes = [x for of in self.feedback if of is not None for x in of[1:]]
        values = iter(self._values(prepared, nodes))
        return [
            None if of is None else Feedback(of.part, next(values), next(values))
            for of in self.feedback
        ]

    def _values(self, prepared: PreparedStep, wanted: list[Node | None]) -> list:
        """The values of nodes; None for None."""
        nodes = self.nodes
        known = dict(zip(nodes.grads, prepared.grads, strict=True))
        known |= zip(nodes.masters, prepared.masters, strict=True)
        known |= zip(nodes.state, jax.tree.leaves(prepared.inner_state), strict=True)
        values = iter(evaluate([x for x in wanted if x is not None], known))
        return [None if x is None else next(values) for x in wanted]


def trace_update(inner_update: Callable, prepared: PreparedStep) -> UpdateGraph:
    """Trace an inner update.

    Args:
      inner_update: from gradients, inner state and masters to updates and state.
      prepared: the step.
    """
    tree = prepared.tree
    error_parts = prepared.error_parts()
    takes_errors = any(part is not None for part in error_parts)

    def twice(grads, state, masters):
        updates, new_state = inner_update(grads, state, masters)
        if not takes_errors:
            return updates, new_state, ()
        return updates, new_state, inner_update(grads, new_state, masters)[0]

    arguments = tree(prepared.grads), prepared.inner_state, tree(prepared.masters)
    traced = jax.make_jaxpr(twice, return_shape=True)
    closed, shapes = traced(*arguments)
    graph = Graph(closed)
    grads, state, masters = jax.tree.unflatten(
        jax.tree.structure(arguments), graph.inputs
    )
    updates, new_state, next_updates = jax.tree.unflatten(
        jax.tree.structure(shapes), graph.outputs
    )
    new_state, state_tree = jax.tree.flatten(new_state)
    parts_of = lambda tree: trees.parts_of(
        prepared.names, prepared.treedef, tree, "inner updates"
    )
    nodes = UpdateNodes(
        prepared.treedef.flatten_up_to(grads),
        prepared.treedef.flatten_up_to(masters),
        jax.tree.leaves(state),
        parts_of(updates),
        new_state,
        parts_of(next_updates) if takes_errors else [],
    )
    return UpdateGraph(
        graph=graph,
        nodes=nodes,
        state_tree=state_tree,
        keeps_structure=jax.tree.structure(state) == state_tree,
        storage=prepared.described_moments(),
        feedback=[
            _feedback(prepared, number, part, nodes, graph)
            for number, part in enumerate(error_parts)
        ],
        effects=closed.effects,
    )


def _feedback(
    prepared: PreparedStep, number: int, part: int | None, nodes: UpdateNodes, graph
) -> Feedback | None:
    """The feedback of the leaf of this number into this part, if there is one."""
    name, format_ = prepared.names[number], prepared.formats[number]
    update = nodes.updates[number]
    if format_ is None or format_.error_into is None:
        return None
    if update.is_scalar or is_zero(update):
        return None
    if part is None:
        raise no_moment_for_errors(name, format_.error_into)
    moves = Moves(
        nodes.masters[number],
        nodes.updates[number],
        nodes.state[part],
        nodes.new_state[part],
        nodes.next_updates[number],
    )
    return feedback_of(name, part, moves, graph)
