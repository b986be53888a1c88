"""Parts of the parameters that an optimizer can update separately.

A :class:`Part` is a subset of the leaves, with the optimizer state that belongs to it.
To update a part, the step runs on all leaves, with zeros instead of the gradients that
are not complete yet. JAX removes the operations on which no result of the part depends.
Therefore, a part is any set of leaves and state that needs no other gradients.

A stack can be updated layer by layer if every layer of its new values depends only on
that layer of its gradient, parameter and state, and on scalars that do not depend on
gradients, such as a count or a schedule.

To check that such a step computes the same as the step on stacks, both are traced and
their values are compared. Computations that are equal except for their shapes have
equal ids. The id of a value represents the primitive that computes it and the ids of
its operands, back to gradients, parameters, state and constants.
"""

import dataclasses
import functools
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs import elementwise
from lowbit_optax._jaxprs.graph import Call, Graph, Node, calls_between
from lowbit_optax._step import context, trees
from lowbit_optax._step.context import LAYERWISE
from lowbit_optax.release.traced_loss import ParamLeaf, TracedLoss
from lowbit_optax.states.state_leaves import state_leaves
from lowbit_optax.transformations.step import step

_REDUCING = frozenset({p.reduce_sum_p, p.reduce_max_p, p.reduce_min_p})
_REARRANGING = _REDUCING | {p.broadcast_in_dim_p, p.reshape_p, p.squeeze_p}

Key = typing.Any
"""The key of a value: the index of a leaf of the state, or the path of a parameter
and the index of one of its arrays, or "gradient"."""


class Value(typing.NamedTuple):
    """A value of a step, and how it was computed.

    Args:
      number: an id. Computations with equal ids are equal except for their shapes.
      needs: the paths of the parameters whose gradients the value depends on.
      in_stacks: whether the value depends on stacks of layers.
      several: whether one layer of the value needs several layers of a stack, or other
        values than scalars that do not depend on layers.
    """

    number: int
    needs: frozenset[str]
    in_stacks: bool
    several: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Leaves and state that are updated together.

    Args:
      leaves: leaves of the parameters.
      numbers: the indices of leaves of the state.
      depth: the number of layers if a loop updates the leaves, which are then stacks.
    """

    leaves: Sequence[ParamLeaf]
    numbers: Collection[int]
    depth: int | None = None


class Parts:
    """The parts that a transformation can update separately.

    Args:
      tx: the transformation.
      opt_state: the state of the transformation.
      loss: the traced loss.
      stacks: the leaves whose first axis is an axis of layers in a scan.

    Attributes:
      state: the shapes of the state's leaves.
      stacks: for each leaf that can be updated layer by layer, the indices of the
        state's leaves that are stacks with the same layers.
      reasons: for each other stack, why it cannot be updated layer by layer.
    """

    def __init__(self, tx, opt_state, loss: TracedLoss, stacks: Iterable[ParamLeaf]):
        self._tx, self._loss, self._ids = tx, loss, {}
        self._of_state = list(state_leaves(self._params_of(), opt_state))
        self._structure = jax.tree.structure(opt_state)
        self.state = [trees.abstract(x.leaf) for x in self._of_state]
        found: dict = {leaf: self._stacks_of(leaf) for leaf in stacks}
        self.reasons = {leaf: x for leaf, x in found.items() if isinstance(x, str)}
        self.stacks = {x: found[x] for x in found if x not in self.reasons}
        if self.stacks:
            self.reasons |= self._not_by_layer()
            self.stacks = {x: found[x] for x in found if x not in self.reasons}

    @property
    def stack_numbers(self) -> set[int]:
        """The indices of the state that is updated layer by layer."""
        return {n for numbers in self.stacks.values() for n in numbers}

    def part(self, leaves: Sequence[ParamLeaf]) -> Part | str:
        """Return the part for these leaves, or the reason why there is none."""
        whole, names = self._whole_step, {leaf.name for leaf in leaves}
        numbers = [
            n
            for n, x in enumerate(self._of_state)
            if names.issuperset(whole[n].needs) and (whole[n].needs or x.owner in names)
        ]
        own = {key for key in whole if _owner(key) in names}.union(numbers)
        if any(whole[key].needs - names for key in own):
            return "its update needs the gradients of other leaves"
        if any(whole[key].needs & names for key in whole.keys() - own):
            return "other leaves, or the rest of the state, also need its gradient"
        return Part(leaves, numbers)

    def in_loop(self, leaves: Sequence[ParamLeaf]) -> Part:
        """Return the part for leaves that a loop updates layer by layer."""
        numbers = [n for leaf in leaves for n in self.stacks[leaf]]
        return Part(leaves, numbers, leaves[0].gradient.shape[0])

    @functools.cached_property
    def _whole_step(self) -> dict[Key, Value]:
        """The values of the step on whole leaves."""
        stacks = {leaf.name for leaf in self.stacks} | self.stack_numbers
        return self._values_of_step(stacks)

    def _values_of_step(self, stacks=(), layers=()) -> dict[Key, Value]:
        """Trace the step, and return its results by key.

        Args:
          stacks: paths of parameters, and indices of state, that are stacks of layers.
          layers: stacks of which the step gets only one layer.
        """
        grads = {x.name: x.gradient for x in self._loss.leaves}
        grads |= {x.name: _layer(x.gradient) for x in layers}
        params, state = self._params_of(layers), list(self.state)
        for number in (n for leaf in layers for n in self.stacks[leaf]):
            state[number] = _layer(state[number])
        state = self._structure.unflatten(state)
        closed = _traced(self._tx, self._loss.tree_of(grads), state, params)
        graph, values = Graph(closed, opaque={LAYERWISE}), _Values(self._ids)
        leaves = trees.by_path(params).items()
        arrays = [(x, n) for x, y in leaves for n, _ in enumerate(jax.tree.leaves(y))]
        results = [*arrays, *range(len(self.state))]
        keys = [*results, *((name, "gradient") for name, _ in leaves)]
        for node, key in zip(graph.inputs, keys, strict=True):
            owner = _owner(key)
            needs = frozenset([owner] if key == (owner, "gradient") else ())
            is_stack = (key if owner is None else owner) in stacks
            several = not is_stack and not node.is_scalar
            values[node] = Value(values.number(key), needs, is_stack, several)
        for call in calls_between(graph.outputs, graph.inputs):
            values.add(call)
        return dict(zip(results, map(values.of, graph.outputs), strict=True))

    def _params_of(self, layers: Iterable[ParamLeaf] = ()):
        """Return shapes of parameters, with one layer for each stack in ``layers``."""
        shapes = {x.name: trees.abstract(x.value) for x in self._loss.leaves}
        one = {x.name: jax.tree.map(_layer, shapes[x.name]) for x in layers}
        return self._loss.tree_of(shapes | one)

    def _stacks_of(self, leaf: ParamLeaf) -> list[int] | str:
        """Return the indices of the state's leaves that are stacked like ``leaf``.

        These leaves change their shape when a single layer replaces the parameter. If
        the state is not a stack of layers, return the reason instead.
        """
        shapes, start = self._params_of([leaf]), context.without_masters
        layers = context.init_with(start, self._tx, shapes)
        layers, structure = jax.tree.flatten(layers)
        if structure != self._structure:
            return "the state of a single layer has a different structure"
        depth, found = leaf.value.shape[0], []
        for number, (stack, layer) in enumerate(zip(self.state, layers, strict=True)):
            is_blank = self._of_state[number].kind == "blank"
            if is_blank or _is_like(stack, layer, layer.shape):
                continue
            if not _is_like(stack, layer, (depth, *layer.shape)):
                of = f"{stack.dtype}{list(stack.shape)}"
                return f"its state, {of}, is not a stack of layers"
            found.append(number)
        return found

    def _not_by_layer(self) -> dict[ParamLeaf, str]:
        """Return the stacks that cannot be updated layer by layer, with reasons.

        The step is traced twice, on the stacks and on one layer of each stack. The
        traces differ, for example, if a mask selects matrices.

        Raises:
          ValueError: if the update of a leaf needs the gradient of another leaf.
        """
        whole = self._whole_step
        reasons = _refuse_several_gradients(whole, self.stacks)
        layer = self._values_of_step(layers=self.stacks)
        for leaf, numbers in self.stacks.items():
            own = [key for key in whole if _owner(key) == leaf.name or key in numbers]
            for key in own:
                if whole[key].several:
                    reason = "its update needs values of several layers"
                elif whole[key].number != layer[key].number:
                    reason = "the optimizer updates a layer differently than the stack"
                else:
                    continue
                reasons.setdefault(leaf, reason)
        return reasons


def _owner(key: Key) -> typing.Any:
    """Return the path of the parameter to which a result belongs, or None."""
    return key[0] if isinstance(key, tuple) else None


def _layer(stack) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)


def _is_like(array, other, shape) -> bool:
    return array.shape == shape and array.dtype == other.dtype


def _refuse_several_gradients(
    whole: Mapping[Key, Value], stacks: Mapping[ParamLeaf, Sequence[int]]
) -> dict[ParamLeaf, str]:
    """Raise an error if a result needs the gradients of a stack and of another leaf.

    Returns:
      The reasons why stacks have to wait for their whole gradients.
    """
    leaves = {leaf.name: leaf for leaf in stacks}
    owners = {n: leaf.name for leaf, numbers in stacks.items() for n in numbers}
    waiting = {}
    # Check the results of stacks first, so that error messages name stacks.
    own = lambda key: _owner(key) not in leaves and key not in owners
    for key in sorted(whole, key=own):
        owner = owners.get(key) if _owner(key) is None else _owner(key)
        others = sorted(whole[key].needs - {owner})
        if not others or not (owner in leaves or leaves.keys() & others):
            continue
        if owner is None and len(whole[key].needs) == 1:
            reason = "the state stores a number that depends on its whole gradient"
            waiting[leaves[others[0]]] = reason
            continue
        what = "its state" if owner is None else f"the update of params{owner}"
        other = next((name for name in others if name in leaves), others[0])
        raise ValueError(
            "release: tx must not need the gradients of several leaves at once, but "
            f"{what} depends on the gradient of params{other}. Instead of optax."
            "clip_by_global_norm, pass max_grad_norm to value_and_update. For other "
            "such transformations, such as apply_if_finite, use lowbit_optax.step"
        )
    return waiting


def _traced(tx, grads, state, params):
    try:
        with context.changed(is_analysed=True):
            trace = jax.make_jaxpr(functools.partial(step, tx), return_shape=True)
            closed, (_, new_state) = trace(params, state, grads)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise ValueError(
            "release: tx.update must need only gradients, state and parameters, unlike "
            f"optimizers that read the loss or run a line search: {error}"
        ) from error
    if jax.tree.structure(new_state) != jax.tree.structure(state):
        raise ValueError("release: tx.update must keep the structure of its state")
    return closed


class _Values(dict[Node, Value]):
    """The values of the nodes of a graph."""

    def __init__(self, ids: dict):
        super().__init__()
        self._ids = ids

    def number(self, key) -> int:
        """Return the id of a computation, which may be a new one."""
        return self._ids.setdefault(key, len(self._ids))

    def of(self, node: Node) -> Value:
        """Return the value of a node, which may be a constant."""
        if node.constant is None:
            return self[node]
        constant = node.constant
        is_key = jnp.issubdtype(node.aval.dtype, jax.dtypes.extended)
        if isinstance(constant, Tracer) or is_key:
            key: tuple = ("array", id(constant))
        else:
            array = np.asarray(constant)
            key = ("constant", str(array.dtype), array.shape, array.tobytes())
        return Value(self.number(key), frozenset(), False, not node.is_scalar)

    def add(self, call: Call) -> None:
        """Add the results of a call."""
        operands = [self.of(node) for node in call.inputs]
        needs = frozenset().union(*(x.needs for x in operands))
        in_stacks = any(x.in_stacks for x in operands)
        several = any(x.several for x in operands) or not _keeps_layers(call)
        key = _axes_of_layer(call, in_stacks), *(x.number for x in operands)
        for n, node in enumerate(call.outputs):
            is_several = several and (in_stacks or not node.is_scalar)
            number = self.number((call.primitive, n, *key))
            self[node] = Value(number, needs, in_stacks, is_several)


def _axes_of_layer(call: Call, in_stacks: bool) -> tuple:
    """Return the shapes and axes of a call that rearranges axes, for one layer.

    ``jnp.sum(x, range(1, x.ndim))`` sums over all axes of a layer in a stack, and over
    fewer axes if the layer is the whole leaf. Both calls have the same primitive.
    """
    if call.primitive not in _REARRANGING or _are_scalars(call.inputs):
        return ()
    (before,), (after,) = call.inputs, call.outputs
    shapes = [x.aval.shape for x in (before, after)]
    # Axes are counted from the end, where stacks and layers have the same axes.
    names = ("axes", "dimensions", "broadcast_dimensions")
    axes = next((call.params[x] for x in names if call.params.get(x)), ())
    rank = len(shapes[call.primitive is p.broadcast_in_dim_p])
    places = tuple(axis - rank for axis in axes if axis or not in_stacks)
    return (*(shape[in_stacks:] for shape in shapes), places)


def _are_scalars(nodes: Iterable[Node]) -> bool:
    return all(node.is_scalar for node in nodes)


def _keeps_layers(call: Call) -> bool:
    """Return whether each layer of the results depends only on that input layer."""
    primitive, params = call.primitive, call.params
    if _are_scalars((*call.inputs, *call.outputs)):
        return True
    if primitive is p.jit_p:
        return params["name"] == LAYERWISE
    if primitive is p.broadcast_in_dim_p and _are_scalars(call.inputs):
        return True
    result = call.outputs[0].aval.shape
    stacks = [x.aval.shape for x in call.inputs if x.aval.shape]
    if not result or not stacks or any(s[0] != result[0] for s in stacks):
        return False
    if primitive is p.bitcast_convert_type_p or elementwise.is_elementwise(primitive):
        # Axes of length 1 may be repeated, but not the axis of the layers.
        return all(len(shape) == len(result) for shape in stacks)
    if primitive in _REDUCING:
        return 0 not in params["axes"]
    if primitive is p.broadcast_in_dim_p:
        return params["broadcast_dimensions"][:1] == (0,)
    if primitive in (p.reshape_p, p.squeeze_p):
        return 0 not in (params.get("dimensions") or ())
    return False
