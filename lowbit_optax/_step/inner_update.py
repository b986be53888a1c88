"""The inner update, traced on shapes: no master is joined and no moment decoded for it.

Its jaxpr is what XLA runs. As a graph it tells what kernels compute for each leaf, and
when a step leaves what is stored unchanged.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Collection, Container

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, jaxpr_as_fun, jaxprs_in_params
from jax.extend.core.primitives import (
    and_p,
    broadcast_in_dim_p,
    cond_p,
    select_n_p,
)

from lowbit_optax._jaxprs.graph import (
    Graph,
    Node,
    evaluate,
    is_zero,
    without_dead_equations,
)
from lowbit_optax._jaxprs.unchanged import unchanged_when, zero_when
from lowbit_optax._step import trees
from lowbit_optax._step.error_feedback import Feedback, Moves, feedback_of
from lowbit_optax._step.step import Step, no_moment_for_errors
from pallas_kernels.jaxprs import ClosedJaxpr


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
class InnerUpdate:
    """A traced inner update.

    Args:
      step: whose it is.
      closed: its jaxpr; where leaves take their rounding errors into moments, that of
        two updates by the same gradients.
      arguments: the structure of its gradients, state and masters.
      results: the structure of its updates, its new state and the next updates.
    """

    step: Step
    closed: ClosedJaxpr
    arguments: trees.PyTreeDef
    results: trees.PyTreeDef

    def run(self, step: Step) -> tuple[list, typing.Any]:
        """The updates of all leaves and the new inner state, by XLA.

        Args:
          step: the one that was traced, or the same in another branch.
        """
        inner_state = step.structure.unflatten(step.moments())
        arguments = step.tree(step.grads), inner_state, step.tree(step.masters)
        flat = jaxpr_as_fun(self.closed)(*jax.tree.leaves(arguments))
        updates, state, _ = jax.tree.unflatten(self.results, flat)
        return step.parts_of_updates(updates), state

    @functools.cached_property
    def may_leave_unchanged(self) -> bool:
        """Whether the update may leave a weight or a moment as it is."""
        return not _changes_everything(self.closed.jaxpr)

    @functools.cached_property
    def graph(self) -> Graph:
        """The graph of the update."""
        return Graph(self.closed)

    @functools.cached_property
    def nodes(self) -> UpdateNodes:
        """The inputs and outputs of the graph."""
        step = self.step
        parts_of = step.parts_of_updates
        grads, state, masters = jax.tree.unflatten(self.arguments, self.graph.inputs)
        updates, new_state, next_updates = jax.tree.unflatten(
            self.results, self.graph.outputs
        )
        return UpdateNodes(
            step.treedef.flatten_up_to(grads),
            step.treedef.flatten_up_to(masters),
            jax.tree.leaves(state),
            parts_of(updates),
            jax.tree.leaves(new_state),
            parts_of(next_updates) if next_updates != () else [],
        )

    @property
    def state_structure(self) -> trees.PyTreeDef:
        """The structure of the new inner state."""
        return self.results.children()[1]

    @property
    def keeps_structure(self) -> bool:
        """Whether the state has the same structure before and after.

        If it has not, parts before and after the update cannot be paired.
        """
        return self.arguments.children()[1] == self.state_structure

    @property
    def state_pairs(self) -> list[tuple[Node, Node]]:
        """Per part of the state, the nodes before and after the update."""
        if not self.keeps_structure:
            return []
        return list(zip(self.nodes.state, self.nodes.new_state, strict=True))

    @functools.cached_property
    def leaf_unchanged_if(self) -> list[Node | None]:
        """Per leaf, when its update is zero by a condition, such as a skipped step.

        A node of a truth value; None if it is not known to be zero ever.
        """
        updates = self.nodes.updates
        if not self.may_leave_unchanged:
            return [None] * len(updates)
        return [zero_when(node, self.graph) for node in updates]

    @functools.cached_property
    def part_unchanged_if(self) -> list[Node | None]:
        """Per part of the new state, when it is the old part by a condition.

        None for parts without a moment format, which are stored as they are.
        """
        if not (self.keeps_structure and self.may_leave_unchanged):
            return [None] * len(self.nodes.new_state)
        storage = self.step.plan.storage
        found = [
            None if how is None else self._unchanged_if(i)
            for i, how in enumerate(storage)
        ]
        # What is stored of a moment and of what it is relative to belongs together.
        relative: dict[int, list[int]] = {}
        for i, how in enumerate(storage):
            if how is not None and how.reference is not None:
                relative.setdefault(how.reference, []).append(i)
        for second, others in relative.items():
            of_all = self._unchanged_if(second)
            for i in others:
                of_all = self._both(of_all, found[i])
            if storage[second] is not None:
                others = [second, *others]
            for i in others:
                found[i] = of_all
        return found

    def _unchanged_if(self, number: int) -> Node | None:
        old, new = self.state_pairs[number]
        return unchanged_when(new, old, self.graph)

    def _both(self, first: Node | None, second: Node | None) -> Node | None:
        """When two truth values hold; None is one that never does."""
        if first is None or second is None or first is second:
            return first if first is second else None
        return self.graph.call(and_p, {}, [first, second], [first.aval])[0]

    @functools.cached_property
    def feedback(self) -> list[Feedback | None]:
        """Per leaf, where its rounding errors go; None if they are lost."""
        parts = enumerate(self.step.error_parts())
        return [self._feedback(number, part) for number, part in parts]

    def _feedback(self, number: int, part: int | None) -> Feedback | None:
        leaf, nodes = self.step.leaves[number], self.nodes
        update = nodes.updates[number]
        if leaf.format is None or leaf.format.error_into is None:
            return None
        if update.is_scalar or is_zero(update):
            return None
        if part is None:
            raise no_moment_for_errors(leaf.name, leaf.format.error_into)
        moves = Moves(
            nodes.masters[number],
            update,
            nodes.state[part],
            nodes.new_state[part],
            nodes.next_updates[number],
        )
        return feedback_of(leaf.name, part, moves, self.graph)

    @property
    def takes_errors(self) -> bool:
        """Whether leaves take their rounding errors into moments."""
        return any(part is not None for part in self.step.error_parts())

    def conditions(self, step: Step) -> tuple[list, list, list]:
        """The values of ``leaf_unchanged_if``, ``part_unchanged_if`` and ``feedback``.

        Args:
          step: as for :meth:`values`.
        """
        of_leaves, of_parts = self.leaf_unchanged_if, self.part_unchanged_if
        feedback = self.feedback
        rates = [x for into in feedback if into is not None for x in into[1:]]
        nodes = [x for x in (*of_leaves, *of_parts, *rates) if x is not None]
        values = self.values(step, nodes, {})
        return (
            [x and values[x] for x in of_leaves],
            [x and values[x] for x in of_parts],
            [
                x and Feedback(x.part, values[x.rate], values[x.growth])
                for x in feedback
            ],
        )

    def values(
        self, step: Step, wanted: Collection[Node], known: dict[Node, typing.Any]
    ) -> dict[Node | None, typing.Any]:
        """The values of nodes of the graph, by node.

        Args:
          step: the one that was traced, or the same in another branch.
          wanted: the nodes.
          known: values of nodes; what is computed is added.
        """
        nodes = self.nodes
        needed = _inputs_of(wanted, known)
        of_grads = [i for i, node in enumerate(nodes.grads) if node in needed]
        of_masters = [i for i, node in enumerate(nodes.masters) if node in needed]
        of_state = [i for i, node in enumerate(nodes.state) if node in needed]
        if of_grads:
            known |= {nodes.grads[i]: step.grads[i] for i in of_grads}
        for i in of_masters:
            known[nodes.masters[i]] = step.leaves[i].master()
        if of_state:
            moments = step.moments(of_state)
            known |= {nodes.state[i]: moments[i] for i in of_state}
        values = evaluate(list(wanted), known)
        return dict(zip(wanted, map(jnp.asarray, values), strict=True))


def trace_update(update: Callable, step: Step) -> InnerUpdate:
    """Trace an inner update.

    Args:
      update: from gradients, inner state and masters to updates and state.
      step: whose it is.
    """
    takes_errors = any(part is not None for part in step.error_parts())

    def twice(grads, state, masters):
        updates, new_state = update(grads, state, masters)
        if not takes_errors:
            return updates, new_state, ()
        return updates, new_state, update(grads, new_state, masters)[0]

    grads, parts, masters = _shapes(step)
    state = step.structure.unflatten(parts)
    arguments = step.tree(grads), state, step.tree(masters)
    closed, shapes = jax.make_jaxpr(twice, return_shape=True)(*arguments)
    closed, structure = without_dead_equations(closed), jax.tree.structure
    return InnerUpdate(step, closed, structure(arguments), structure(shapes))


def _shapes(step: Step) -> tuple[list, list, list]:
    """What stands for the gradients, the parts of the state and the masters.

    Moments lie on a mesh as their parameters do.
    """
    formats = {x.name: x.format for x in step.leaves if x.format is not None}
    params = {x.name: x.param for x in step.leaves}
    narrow = {x.name: x.grad for x in step.leaves if x.has_narrow_grad}

    def stand_ins(params, grads):
        masters = {name: formats[name].widen(x) for name, x in params.items()}
        return masters, {name: x.astype(jnp.float32) for name, x in grads.items()}

    masters, grads = jax.eval_shape(
        stand_ins, {name: params[name] for name in formats}, narrow
    )
    masters = params | masters
    parts = [
        part if how is None else _float32(masters[how.leaf])
        for how, part in zip(step.plan.storage, step.parts, strict=True)
    ]
    return (
        [grads.get(x.name, x.grad) for x in step.leaves],
        parts,
        [masters[name] for name in step.names],
    )


def _float32(like) -> jax.ShapeDtypeStruct:
    """A float32 array that lies as another one does."""
    aval = jax.typeof(like)
    if aval.dtype == jnp.float32:
        return like
    return jax.eval_shape(lambda x: x.astype(jnp.float32), like)


def _inputs_of(wanted: Collection[Node], known: Container[Node]) -> set[Node]:
    """The inputs of the graph that nodes are computed from, beside what is known."""
    found: set[Node] = set()
    seen: set[Node] = set()
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node in seen or node in known:
            continue
        seen.add(node)
        if node.call is not None:
            waiting.extend(node.call.inputs)
        elif node.constant is None:
            found.add(node)
    return found


def _changes_everything(jaxpr: Jaxpr) -> bool:
    """Whether nothing in a program can select what it was given, or zeros."""
    inputs = set(jaxpr.invars)
    if any(isinstance(x, Literal) or x in inputs for x in jaxpr.outvars):
        return False
    for eqn in jaxpr.eqns:
        is_array = any(getattr(x.aval, "shape", ()) for x in eqn.outvars)
        selects = is_array and eqn.primitive in (select_n_p, broadcast_in_dim_p)
        if selects or eqn.primitive is cond_p:
            return False
        if not all(map(_changes_everything, jaxprs_in_params(eqn.params))):
            return False
    return True
