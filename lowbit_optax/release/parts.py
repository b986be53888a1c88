"""Parts of the parameters that an optimizer can update separately.

A :class:`Part` is a subset of the leaves, with the optimizer state that belongs to it.
The transformation usually sees ``optax.MaskedNode`` instead of every other leaf, as
inside ``optax.masked``.

A stack can be updated layer by layer if every layer of its new values depends only on
that layer of its gradient, parameter and state, and on scalars that do not depend on
gradients, such as a count or a schedule.

To check that such a step computes the same as the step on all leaves, both are traced
and their values are compared. Equal computations have equal ids. The id of a value
represents its shape, the primitive that computes it, and the ids of its operands, back
to gradients, parameters, state and constants. A second id ignores shapes, so that a
step on one layer can be compared with a step on a stack of layers.
"""

import dataclasses
import functools
import typing
from collections.abc import Iterable, Mapping, Sequence

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
      numbers: two ids. Computations with equal first ids are equal and have the same
        shape. Computations with equal second ids are equal except for their shapes.
      needs: the paths of the parameters whose gradients the value depends on.
      in_stacks: whether the value depends on stacks of layers.
      several: whether one layer of the value needs several layers of a stack, or other
        values than scalars that do not depend on layers.
    """

    numbers: tuple[int, int]
    needs: frozenset[str]
    in_stacks: bool
    several: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Some leaves, and the state that a transformation keeps for them.

    Args:
      leaves: leaves of the parameters.
      structure: the structure of the state that the transformation receives.
      numbers: for each leaf of this state, its index in the whole state.
      exclusive: the indices of the state that is updated with the leaves, such as
        moments. Other state, such as a count, is only read.
      others: other leaves that the transformation receives. Their results are ignored.
      depth: the number of layers if a loop updates the leaves, which are then stacks.
    """

    leaves: Sequence[ParamLeaf]
    structure: typing.Any
    numbers: Sequence[int]
    exclusive: Sequence[int]
    others: Sequence[ParamLeaf] = ()
    depth: int | None = None


class Parts:
    """The parts that a transformation can update separately.

    Args:
      tx: the transformation.
      opt_state: the state of the transformation.
      loss: the traced loss.
      stacks: the leaves whose first axis is an axis of layers in a scan.

    Attributes:
      whole: the part with all leaves.
      stacks: for each leaf that can be updated layer by layer, the indices of the
        state's leaves that are stacks with the same layers.
      reasons: for each other stack, why it cannot be updated layer by layer.
    """

    def __init__(self, tx, opt_state, loss: TracedLoss, stacks: Iterable[ParamLeaf]):
        self._tx, self._loss, self._numbered = tx, loss, {}
        with_path, structure = jax.tree_util.tree_flatten_with_path(opt_state)
        self._state = [trees.abstract(x) for _, x in with_path]
        self._numbers = {
            jax.tree_util.keystr(k): n for n, (k, _) in enumerate(with_path)
        }
        of_state = enumerate(state_leaves(self._params_of(loss.leaves), opt_state))
        self._blanks = {n for n, part in of_state if part.kind == "blank"}
        numbers = range(len(self._state))
        self.whole = Part(loss.leaves, structure, numbers, numbers)
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

    def part(self, leaves: Sequence[ParamLeaf], is_last: bool = False) -> Part | str:
        """Return the part for these leaves, or why they cannot be updated separately.

        Args:
          leaves: leaves of the parameters.
          is_last: whether the part also updates the state that belongs to no leaf.
        """
        whole, names = self._whole_step, {leaf.name for leaf in leaves}
        own = {key for key in whole if _owner(key) in names}
        if any(whole[key].needs - names for key in own):
            return "its update needs the gradients of other leaves"
        shared, found = self._shared, self._state_of(leaves)
        if isinstance(found, str) or isinstance(shared, str):
            return found if isinstance(found, str) else str(shared)
        structure, numbers = found
        exclusive = [n for n in numbers if n not in shared[1]]
        part = Part(leaves, structure, numbers, exclusive)
        own.update(exclusive)
        if any(whole[key].needs & names for key in whole.keys() - own):
            return "other leaves, or the rest of the state, also need its gradient"
        alone = self._step_on(part)
        compared = own.union(numbers if is_last else ())
        if any(whole[k].numbers[0] != alone[k].numbers[0] for k in compared):
            return "the optimizer updates it differently without the other leaves"
        return part

    def in_loop(self, leaves: Sequence[ParamLeaf]) -> Part:
        """Return the part for leaves that a loop updates layer by layer."""
        part = self.with_others(leaves, [n for x in leaves for n in self.stacks[x]])
        return dataclasses.replace(part, depth=leaves[0].gradient.shape[0])

    def with_others(self, leaves: Sequence[ParamLeaf], numbers: list[int]) -> Part:
        """Return a part whose step runs on all leaves, but updates only ``leaves``."""
        others = [leaf for leaf in self._loss.leaves if leaf not in leaves]
        return dataclasses.replace(
            self.whole, leaves=leaves, exclusive=numbers, others=others
        )

    @functools.cached_property
    def _whole_step(self) -> dict[Key, Value]:
        """The values of the step on all leaves."""
        stacks = {leaf.name for leaf in self.stacks} | self.stack_numbers
        return self._step_on(self.whole, stacks)

    def _step_on(self, part: Part, stacks=(), layers=()) -> dict[Key, Value]:
        """Trace the step on a part, and return its results by key.

        Args:
          part: the part that the step updates.
          stacks: paths of parameters, and indices of state, that are stacks of layers.
          layers: stacks of which the step gets only one layer.
        """
        grads = {x.name: x.gradient for x in part.leaves}
        grads |= {x.name: _layer(x.gradient) for x in layers}
        params = self._params_of(part.leaves, layers)
        state = part.structure.unflatten([self._state[n] for n in part.numbers])
        if layers:
            state = jax.eval_shape(self._tx.init, params)
        closed = _traced(self._tx, self._loss.tree_of(grads), state, params)
        graph, values = Graph(closed, opaque={LAYERWISE}), _Values(self._numbered)
        leaves = trees.by_path(params).items()
        arrays = [(x, n) for x, y in leaves for n, _ in enumerate(jax.tree.leaves(y))]
        keys = [*arrays, *part.numbers, *((name, "gradient") for name, _ in leaves)]
        for node, key in zip(graph.inputs, keys, strict=True):
            owner = _owner(key)
            needs = frozenset([owner] if key == (owner, "gradient") else ())
            is_stack = (key if owner is None else owner) in stacks
            several = not is_stack and not node.is_scalar
            values[node] = Value(values.both(key, key), needs, is_stack, several)
        for call in calls_between(graph.outputs, graph.inputs):
            values.add(call)
        results = map(values.of, graph.outputs)
        return dict(zip([*arrays, *part.numbers], results, strict=True))

    def _params_of(self, leaves: Iterable[ParamLeaf], layers: Iterable = ()):
        """Return shapes of parameters, with one layer for each stack in ``layers``."""
        shapes = {leaf.name: trees.abstract(leaf.value) for leaf in leaves}
        one = {leaf.name: jax.tree.map(_layer, shapes[leaf.name]) for leaf in layers}
        return self._loss.tree_of(shapes | one)

    @functools.cached_property
    def _shared(self) -> tuple | str:
        """The result of :meth:`_state_of` for the state that belongs to no leaf."""
        return self._state_of([])

    def _state_of(self, leaves: Sequence[ParamLeaf]) -> tuple | str:
        """Return the structure of the state for these leaves, and its indices.

        If the leaves cannot be updated separately, return the reason instead.
        """
        try:
            state = jax.eval_shape(self._tx.init, self._params_of(leaves))
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            # A user's function that masks or labels may not support MaskedNode.
            return f"without the other leaves, init raises {error!r}"
        with_path, structure = jax.tree_util.tree_flatten_with_path(state)
        names = [jax.tree_util.keystr(path) for path, _ in with_path]
        numbers = [self._numbers.get(name, -1) for name in names]
        for name, number, (_, leaf) in zip(names, numbers, with_path, strict=True):
            if number < 0 or not _is_like(self._state[number], leaf, leaf.shape):
                return f"state{name} is different without the other leaves"
        return structure, numbers

    def _stacks_of(self, leaf: ParamLeaf) -> list[int] | str:
        """Return the indices of the state's leaves that are stacked like ``leaf``.

        These leaves change their shape when a single layer replaces the parameter. If
        the state is not a stack of layers, return the reason instead.
        """
        params = self._params_of(self._loss.leaves, [leaf])
        layers, structure = jax.tree.flatten(jax.eval_shape(self._tx.init, params))
        if structure != self.whole.structure:
            return "the state of a single layer has a different structure"
        depth, found = leaf.value.shape[0], []
        for number, (stack, layer) in enumerate(zip(self._state, layers, strict=True)):
            if number in self._blanks or _is_like(stack, layer, layer.shape):
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
        layer = self._step_on(self.whole, layers=self.stacks)
        for leaf, numbers in self.stacks.items():
            own = [key for key in whole if _owner(key) == leaf.name or key in numbers]
            for key in own:
                if whole[key].several:
                    reason = "its update needs values of several layers"
                elif whole[key].numbers[1] != layer[key].numbers[1]:
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

    def __init__(self, numbers: dict):
        super().__init__()
        self._numbers = numbers

    def both(self, key, other) -> tuple[int, int]:
        """Return the ids of two computations, and add new ids if necessary."""
        number = self._numbers.setdefault(key, len(self._numbers))
        return number, self._numbers.setdefault(other, len(self._numbers))

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
        return Value(self.both(key, key), frozenset(), False, not node.is_scalar)

    def add(self, call: Call) -> None:
        """Add the results of a call."""
        operands = [self.of(node) for node in call.inputs]
        needs = frozenset().union(*(x.needs for x in operands))
        in_stacks = any(x.in_stacks for x in operands)
        several = any(x.several for x in operands) or not _keeps_layers(call)
        of_layer = _axes_of_layer(call, in_stacks)
        for n, node in enumerate(call.outputs):
            numbers = self.both(
                (call.primitive, n, node.aval.shape, *(x.numbers[0] for x in operands)),
                (call.primitive, n, of_layer, *(x.numbers[1] for x in operands)),
            )
            is_several = several and (in_stacks or not node.is_scalar)
            self[node] = Value(numbers, needs, in_stacks, is_several)


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
