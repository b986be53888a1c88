"""Steps inside wrappers of other packages cost what they cost alone.

``optax.chain``, ``masked``, ``partition``, ``inject_hyperparams``, ``apply_if_finite``
and their like compute something before the update of a transformation of this package,
and hand on what it returns. :func:`lowbit_optax.step` traces them on shapes, with an
equation in the place of each such update (:func:`.stepper.marked`), and reads the
trace:

    grads --- elementwise, by scalars ---> the update's gradients:  part of its kernel
    new state, updates <--- selected ----- its results:             a guard
    all others                                                      computed as they are

New parameters then take the places of updates. If a wrapper computes with the updates,
or needs values, there is no such step, and it is made with differences.
"""

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
from lowbit_optax._jaxprs.graph import Call, Graph, Node, evaluate, is_zero, made_of
from lowbit_optax._jaxprs.unchanged import scalar_of
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._numerics.landing import REPLACE
from lowbit_optax._step import context, trees
from lowbit_optax._step.engine import Lowbit
from lowbit_optax._step.guard import UNGUARDED, Guard, Unguarded
from lowbit_optax._step.state import LowbitState
from lowbit_optax._step.stepper import Stepper, stepper_of, update_p

_REFUSALS = (TypeError, ValueError, AttributeError, NotImplementedError)


class _NotDirect(Exception):
    """A wrapper computes with the results of a step."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Inner:
    """The update of a transformation of this package, within wrappers.

    Args:
      call: its equation.
      grads, state, params, extra_args: of the update, trees of nodes.
      held: what the transformation holds of the trace, nodes.
      leaves: which leaf of all parameters each of its own is.
      conditions: the update happens where all of these scalars are true.
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
class Wrapped:
    """A wrapped transformation's update, traced on shapes.

    Args:
      graph: of the update.
      arguments: the structure of gradients, state and parameters.
      results: the structure of updates and new state.
    """

    graph: Graph
    arguments: trees.PyTreeDef
    results: trees.PyTreeDef

    @functools.cached_property
    def _inputs(self) -> tuple[list[Node], list[Node], list]:
        """Gradients by leaf, the state's leaves, and parameters by leaf."""
        grads, state, _ = jax.tree.unflatten(self.arguments, self.graph.inputs)
        names, leaves, treedef = trees.named_leaves(self._params)
        grads = trees.parts_of(names, treedef, grads, "grads")
        return grads, jax.tree.leaves(state), leaves

    @property
    def _params(self):
        return jax.tree.unflatten(self.arguments, self.graph.inputs)[2]

    @functools.cached_property
    def _outputs(self) -> tuple[list[Node], list[Node]]:
        """Updates by leaf of the parameters, and the leaves of the new state."""
        updates, state = jax.tree.unflatten(self.results, self.graph.outputs)
        names, _, treedef = trees.named_leaves(self._params)
        updates = trees.parts_of(names, treedef, updates, "updates")
        return updates, jax.tree.leaves(state)

    @property
    def keeps_state(self) -> bool:
        """Whether the state has the same structure, shapes and dtypes afterwards."""
        like = lambda nodes: [(x.aval.shape, x.aval.dtype) for x in nodes]
        same = self.arguments.children()[1] == self.results.children()[1]
        return same and like(self._inputs[1]) == like(self._outputs[1])

    @functools.cached_property
    def _found(self) -> "dict[Node, tuple[Call, int, tuple[Node, ...]]]":
        """By an output that is a result of a marked update, which, and when it is.

        Raises:
          _NotDirect: if something is computed of such a result.
        """
        old_state = self._inputs[1]
        updates, new_state = self._outputs
        found = {}
        if len(old_state) != len(new_state):
            raise _NotDirect
        is_old = lambda old: lambda x: x is old
        outputs = [(x, True, is_zero) for x in updates]
        outputs += [
            (new, False, is_old(old))
            for old, new in zip(old_state, new_state, strict=True)
        ]
        for node, is_update, is_kept in outputs:
            result = _result(node, is_kept, self.graph)
            if result is None:
                if any(map(_is_marked, made_of([node]))):
                    raise _NotDirect
                continue
            call, number, _ = result
            if is_update != (number < call.params["updates"]):
                raise _NotDirect
            found[node] = result
        return found

    @functools.cached_property
    def inner(self) -> dict[Call, _Inner]:
        """The updates of this package's transformations, by their calls in the graph.

        Raises:
          _NotDirect: if a wrapper does more with them than hand them on.
        """
        conditions: dict[Call, tuple[Node, ...]] = {}
        for call, _, when in self._found.values():
            if conditions.setdefault(call, when) != when:
                raise _NotDirect
        numbers = {
            id(x): i
            for i, leaf in enumerate(self._inputs[2])
            for x in jax.tree.leaves(leaf)
        }
        inner = {}
        for call, when in conditions.items():
            structure = call.params["structure"]
            grads, state, params, extra, held = structure.unflatten(call.inputs)
            if any(map(_is_marked, made_of([*call.inputs, *when]))):
                raise _NotDirect
            leaves = []
            for i, leaf in enumerate(trees.named_leaves(params)[1]):
                number = numbers.get(id(_first(leaf)))
                if number is None:
                    raise _NotDirect
                if self._found.get(self._outputs[0][number], ())[:2] != (call, i):
                    raise _NotDirect
                leaves.append(number)
            inner[call] = _Inner(call, grads, state, params, extra, held, leaves, when)
        return inner

    def gets_gradients(self, inner: _Inner) -> bool:
        """Whether an update gets the gradients as they are given."""
        grads = self._inputs[0]
        pairs = zip(jax.tree.leaves(inner.grads), inner.leaves, strict=True)
        return all(node is grads[i] for node, i in pairs)

    def is_elementwise(self, inner: _Inner) -> bool:
        """Whether its kernels can make an update's gradients of the given ones."""
        grads, scalars = self._inputs[0], Scalars(self.graph)
        if not isinstance(inner.call.params["stepper"], Lowbit):
            return self.gets_gradients(inner)
        try:
            for i, node in zip(inner.leaves, jax.tree.leaves(inner.grads), strict=True):
                program_of([node], [grads[i]], scalars, is_exact=True)
        except NotElementwise:
            return False
        return True

    def run(
        self, given: "Given", apply_update: Callable, guard: Guard | Unguarded
    ) -> tuple[optax.Params, optax.OptState]:
        """``(new params, new state)``."""
        flat = jax.tree.leaves((given.seen, given.state, given.params))
        known = dict(zip(self.graph.inputs, flat, strict=True))
        results = {
            call: self._run_inner(inner, given, known, guard)
            for call, inner in self.inner.items()
        }

        def value(node: Node):
            if node not in self._found:
                return evaluate([node], known)[0]
            call, number, _ = self._found[node]
            return results[call][number]

        updates, new_state = self._outputs
        _, leaves, treedef = trees.named_leaves(given.params)
        new = [
            value(node)
            if node in self._found
            else guard.chosen(apply_update(param, value(node)), param)
            for param, node in zip(leaves, updates, strict=True)
        ]
        state = [
            value(node) if node in self._found else guard.chosen(value(node), old)
            for old, node in zip(jax.tree.leaves(given.state), new_state, strict=True)
        ]
        structure = self.results.children()[1]
        return treedef.unflatten(new), structure.unflatten(state)

    def _run_inner(
        self, inner: _Inner, given: "Given", known: dict, guard: Guard | Unguarded
    ) -> list:
        """The new parameters of an update, and then the leaves of its new state."""
        value_of = lambda tree: jax.tree.map(lambda x: evaluate([x], known)[0], tree)
        state, params, extra = map(
            value_of, (inner.state, inner.params, inner.extra_args)
        )
        stepper = inner.call.params["with_held"](value_of(inner.held))
        structure, means = jax.tree.structure(inner.grads), given.means
        for node in inner.conditions:
            guard = guard.within(jnp.float32(1), evaluate([node], known)[0])
        is_lowbit = isinstance(stepper, Lowbit)
        if not (self.is_elementwise(inner) and (is_lowbit or means is None)):
            grads, means = value_of(inner.grads), None
            if guard.scalars:
                guard = Guard(jnp.float32(1), guard.scalars[1])
        else:
            grads = structure.unflatten(given.grads[i] for i in inner.leaves)
            if is_lowbit and not self.gets_gradients(inner):
                before = functools.partial(self._before, inner, known)
                stepper = dataclasses.replace(
                    stepper, inner=_preceded(before, stepper.inner)
                )
        if means is not None and isinstance(stepper, Lowbit):
            stepper = means.among(stepper, inner.leaves)
        new, new_state = stepper.run(params, state, grads, REPLACE, extra, guard)
        return [*trees.named_leaves(new)[1], *jax.tree.leaves(new_state)]

    def _before(self, inner: _Inner, known: dict, grads):
        """The gradients of an update, made of its own leaves' float32 gradients."""
        nodes = [self._inputs[0][i] for i in inner.leaves]
        # What is known was computed of the gradients outside of this trace.
        inputs = {x: known[x] for x in self.graph.inputs}
        inputs |= zip(nodes, jax.tree.leaves(grads), strict=True)
        wanted, structure = jax.tree.flatten(inner.grads)
        return structure.unflatten(evaluate(wanted, inputs))


class Means(typing.Protocol):
    """Means of gradients, which kernels can make of the last ones."""

    @property
    def seen(self) -> typing.Any:
        """The means in float32, a tree."""
        ...

    def among(self, lowbit: Lowbit, leaves: Sequence[int]) -> Stepper:
        """The transformation of some leaves, of the last gradients."""
        ...


class Given(typing.NamedTuple):
    """The arguments of a step.

    Args:
      grads: leaf by leaf, as they are given.
      seen: a tree of them as wrappers see them.
      state, params: as in optax.
      means: what wrappers see in place of the gradients; None if they see these.
    """

    grads: list
    seen: typing.Any
    state: typing.Any
    params: typing.Any
    means: "Means | None" = None


def step_wrapped(
    tx: optax.GradientTransformationExtraArgs,
    params: optax.Params,
    state: optax.OptState,
    grads: optax.Updates,
    extra_args: dict,
    apply_update: Callable,
    guard: Guard | Unguarded = UNGUARDED,
    means: Means | None = None,
) -> tuple[optax.Params, optax.OptState] | None:
    """The step of a wrapped transformation, by new parameters in place of updates.

    What wrappers make of the gradients becomes part of the kernels if it is elementwise
    but for scalars, such as clipping by a global norm. It is then computed in float32,
    as inside ``lowbit``, and not in the gradients' dtypes.

    Args:
      tx, params, state, grads, extra_args: of the update.
      apply_update: ``(param, update) -> param``, for leaves that transformations of
        other packages update.
      guard: unscales the gradients, and decides whether the step happens.
      means: what the step is made with in place of the gradients; with a guard.

    Returns:
      ``(new params, new state)``; None if the transformation cannot step directly,
      because a wrapper prevents it or because it is not from this package.
    """
    try:
        names, _, treedef = trees.named_leaves(params)
        leaves = trees.parts_of(names, treedef, grads, "grads")
        wide = treedef.unflatten(map(_wide, leaves))
        if guard.scalars:
            seen = guard.unscaled(wide) if means is None else means.seen
            given, traced = Given(leaves, seen, state, params, means), None
        else:
            given = Given(leaves, grads, state, params)
            traced = _traced(tx, grads, state, params, extra_args)
            if not traced.inner:
                return None
        if traced is None or not all(map(traced.gets_gradients, traced.inner.values())):
            folded = _traced(tx, wide, state, params, extra_args)
            inner = folded.inner.values()
            is_folded = folded.keeps_state and all(map(folded.is_elementwise, inner))
            if traced is None:
                if not inner:
                    return None
                traced = folded
            elif is_folded:
                given, traced = given._replace(seen=wide), folded
        return traced.run(given, apply_update, guard)
    except _NotDirect:
        return None
    except _REFUSALS:
        # What wrappers raise that compute with values. An error in the arguments occurs
        # again, and is reported, in the step with differences.
        return None


def is_direct(tx, params: optax.Params, state: optax.OptState) -> bool | None:
    """Whether ``lowbit_optax.step`` writes new parameters without differences.

    Parameters and state may be shapes: nothing is computed. None if ``tx`` holds no
    transformation of this package.
    """
    is_own = lambda x: isinstance(x, LowbitState)
    if not any(map(is_own, jax.tree.leaves(state, is_leaf=is_own))):
        return None
    if stepper_of(tx) is not None:
        return True
    found = []

    def step(params, state):
        _, leaves, treedef = trees.named_leaves(params)
        grads = treedef.unflatten(jnp.zeros(x.shape, jnp.float32) for x in leaves)
        wide = optax.with_extra_args_support(tx)
        new = step_wrapped(wide, params, state, grads, {}, lambda param, _: param)
        found.append(new is not None)

    with context.analysis():
        jax.eval_shape(step, params, state)
    return found[0]


def _traced(tx, grads, state, params, extra_args: dict) -> Wrapped:
    def update(grads, state, params):
        with context.params_wanted():
            return tx.update(grads, state, params, **extra_args)

    arguments = grads, state, params
    closed, shapes = jax.make_jaxpr(update, return_shape=True)(*arguments)
    if closed.effects:
        raise _NotDirect
    structure = jax.tree.structure
    return Wrapped(Graph(closed), structure(arguments), structure(shapes))


def _result(
    node: Node, is_kept: Callable[[Node], bool], graph: Graph
) -> tuple[Call, int, tuple[Node, ...]] | None:
    """The marked update that a node is a result of, which one, and when it is.

    Otherwise it must be what is kept if there is no step. None for other nodes.
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
        found = _result(case, is_kept, graph) if is_kept(other) else None
        if found is not None:
            condition = which if holds else graph.apply(lax.bitwise_not, which)
            return *found[:2], (*found[2], condition)
    return None


def _preceded(before: Callable, inner: optax.GradientTransformation):
    """A transformation that updates by what a function makes of the gradients."""
    wide = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, **extra_args):
        return wide.update(before(updates), state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _wide(grad):
    is_few_bits = trees.is_float(grad) and is_narrow(grad.dtype)
    return grad.astype(jnp.float32) if is_few_bits else grad


def _is_marked(node: Node) -> bool:
    """Whether a node is a result of a marked update."""
    return node.call is not None and node.call.primitive is update_p


def _first(leaf):
    return jax.tree.leaves(leaf)[0]
