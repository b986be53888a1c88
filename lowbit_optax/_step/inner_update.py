"""``InnerUpdate``: the inner transformation's update, traced to a jaxpr and a graph.

:func:`.run.run` calls :func:`trace_update` with a :class:`.step.Step`. The trace
needs only shapes, so no master is joined and no moment is decoded for it. XLA runs the
jaxpr. :mod:`lowbit_optax._step.plan` reads from the graph which operations a
kernel must compute for each leaf.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from lowbit_optax._jaxprs.graph import Graph, Node, evaluate, made_of
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._step import context, trees
from lowbit_optax._step.leaf import widen
from lowbit_optax._step.step import Step
from pallas_kernels.operations import ClosedJaxpr


class UpdateNodes(typing.NamedTuple):
    """The inputs and outputs of an inner update in its graph.

    Args:
      grads, masters, updates: one node per leaf.
      state, new_state: one node per part; a part is a leaf of the inner state.
    """

    grads: list[Node]
    masters: list[Node]
    state: list[Node]
    updates: list[Node]
    new_state: list[Node]


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class InnerUpdate:
    """A traced inner update, and the step that it belongs to, as a tree of arrays.

    Args:
      step: the step that was traced.
      closed: the jaxpr.
      arguments: the structure of its gradients, state and masters.
      results: the structure of its updates and new state.
    """

    step: Step
    closed: ClosedJaxpr
    arguments: trees.PyTreeDef
    results: trees.PyTreeDef

    def tree_flatten(self):
        """Return the arrays of the step, and those that the jaxpr contains."""
        # Numbers stay constants, because programs of kernels may contain them.
        is_array = [isinstance(x, jax.Array) for x in self.closed.consts]
        pairs = list(zip(self.closed.consts, is_array, strict=True))
        arrays = [x for x, is_one in pairs if is_one]
        others = [None if is_one else x for x, is_one in pairs]
        # In JAX 0.12 and newer, the jaxpr would otherwise contain the arrays.
        closed = ClosedJaxpr(self.closed.jaxpr, others)
        return (self.step, arrays), (closed, self.arguments, self.results)

    @classmethod
    def tree_unflatten(cls, static, children) -> "InnerUpdate":
        """Invert :meth:`tree_flatten`."""
        step, arrays = children
        closed, *structures = static
        rest = iter(arrays)
        consts = [next(rest) if x is None else x for x in closed.consts]
        return cls(step, ClosedJaxpr(closed.jaxpr, consts), *structures)

    def update(self, *arguments) -> tuple[typing.Any, typing.Any]:
        """Return ``(updates, new inner state)`` from gradients, state and masters."""
        flat = jaxpr_as_fun(self.closed)(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(self.results, flat)

    @functools.cached_property
    def graph(self) -> Graph:
        return Graph(self.closed)

    @functools.cached_property
    def nodes(self) -> UpdateNodes:
        step = self.step
        parts_of = step.parts_of_updates
        grads, state, masters = jax.tree.unflatten(self.arguments, self.graph.inputs)
        updates, new_state = jax.tree.unflatten(self.results, self.graph.outputs)
        return UpdateNodes(
            step.treedef.flatten_up_to(grads),
            step.treedef.flatten_up_to(masters),
            jax.tree.leaves(state),
            parts_of(updates),
            jax.tree.leaves(new_state),
        )

    @property
    def state_structure(self) -> trees.PyTreeDef:
        """The structure of the new inner state."""
        return self.results.children()[1]

    @property
    def keeps_structure(self) -> bool:
        """Whether parts of the state before and after the update can be paired."""
        return self.arguments.children()[1] == self.state_structure

    @functools.cached_property
    def nodes_stored_first(self) -> dict[int, Node]:
        """The new moments to store before updates are computed, by part index."""
        parts, nodes = self.step.plan.stored_first, self.nodes.new_state
        return {i: nodes[i] for i in sorted(parts) if nodes[i].call is not None}

    def updates_from_stored(
        self, leaves: Iterable[int], parts: Sequence, first: frozenset[int]
    ) -> tuple[list, list]:
        """Compute the updates of leaves from moments that are rounded and stored.

        Args:
          leaves: indices of the leaves.
          parts: the parts of the new state; those in ``first`` are float32 moments.
          first: indices of the moments to store.

        Returns:
          ``(updates, parts)``: the updates, and the parts with these moments in their
          stored form.
        """
        others, plan = set(range(len(parts))) - first, self.step.plan
        stored = plan.encode(parts, self.step.draws, others)
        decoded, nodes = plan.decode(stored, first), self.nodes_stored_first
        known = {nodes[i]: decoded[i] for i in first if i in nodes}
        nodes = [self.nodes.updates[i] for i in leaves]
        values = self.values(nodes, known)
        return [values[node] for node in nodes], stored

    def values(
        self, wanted: Collection[Node], known: Mapping = {}
    ) -> dict[Node, typing.Any]:
        """Compute the values of nodes of the graph, and return a dict keyed by node.

        Args:
          wanted: the nodes.
          known: dict from nodes to values that are already known.
        """
        known, step = dict(known), self.step
        nodes, needed = self.nodes, frozenset(made_of(wanted, known))
        read = lambda nodes: [(i, x) for i, x in enumerate(nodes) if x in needed]
        known |= {x: step.grads[i] for i, x in read(nodes.grads)}
        known |= {x: step.leaves[i].master() for i, x in read(nodes.masters)}
        moments = step.plan.decode(step.parts, [i for i, _ in read(nodes.state)])
        known |= {x: moments[i] for i, x in read(nodes.state)}
        values = evaluate(list(wanted), known)
        return dict(zip(wanted, map(jnp.asarray, values), strict=True))


def trace_update(update: Callable, step: Step) -> InnerUpdate:
    """Trace an inner update, a function of gradients, inner state and masters."""
    grads, parts, masters = _shapes(step)
    state = step.structure.unflatten(parts)
    arguments = step.tree(grads), state, step.tree(masters)
    closed, shapes = jax.make_jaxpr(update, return_shape=True)(*arguments)
    of_wrappers = set(map(id, context.current().of_wrappers))
    _check_hyperparameters([x for x in closed.consts if id(x) not in of_wrappers])
    closed, structure = _without_dead_equations(closed), jax.tree.structure
    return InnerUpdate(step, closed, structure(arguments), structure(shapes))


def _check_hyperparameters(held: Iterable) -> None:
    """Raise an error for scalars that cannot represent a hyperparameter.

    ``optax.inject_hyperparams`` stores hyperparameters in the parameters' widest dtype.
    A b2 of 0.999 becomes 1 in bfloat16, and 0 in the uint32 words of quantized weights.
    """
    for x in held:
        is_lossy = is_narrow(x.dtype) or jnp.issubdtype(x.dtype, jnp.unsignedinteger)
        if is_lossy and not x.shape:
            raise TypeError(
                "lowbit: a hyperparameter of the inner transformation must be a number "
                f"or a float32 scalar, got a {x.dtype} scalar. With "
                "optax.inject_hyperparams, pass hyperparam_dtype=jnp.float32"
            )


def _without_dead_equations(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Remove the equations at the top level of a jaxpr whose results are not used.

    Even for an empty tree, optax computes the values that all leaves share.
    """
    needed, equations = set(map(id, closed.jaxpr.outvars)), []
    for eqn in reversed(closed.jaxpr.eqns):
        if eqn.effects or any(id(x) in needed for x in eqn.outvars):
            needed |= set(map(id, eqn.invars))
            equations.append(eqn)
    return ClosedJaxpr(closed.jaxpr.replace(eqns=equations[::-1]), closed.consts)


def _shapes(step: Step) -> tuple[list, list, list]:
    """Return the gradients, parts and masters for the trace, as arrays or shapes.

    Moments get the shardings of their parameters.
    """
    grads = [_float32(x.grad) if x.has_narrow_grad else x.grad for x in step.leaves]
    masters = [
        x.master() if x.format is None else widen.eval_shape(x.format, x.param)
        for x in step.leaves
    ]
    by_name = dict(zip(step.names, masters, strict=True))
    parts = [
        part if moment is None else _float32(by_name[moment.leaf])
        for moment, part in zip(step.plan.storage, step.parts, strict=True)
    ]
    return grads, parts, masters


def _float32(like) -> jax.ShapeDtypeStruct:
    """Return a float32 array or shape with the sharding of ``like``."""
    aval = jax.typeof(like)
    if aval.dtype == jnp.float32:
        return like
    return _to_float32.eval_shape(like)


@jax.jit
def _to_float32(x: jax.Array) -> jax.Array:
    """Return the array in float32. Traced once per shape, dtype and sharding."""
    return x.astype(jnp.float32)
