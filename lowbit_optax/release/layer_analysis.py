"""Which leaves' updates can run layer by layer, before other gradients are there.

A stacked leaf can be updated inside the backward loop if every layer of its new values
is made of that layer of its own gradient, parameter and state, and of numbers that no
gradient goes into (a count, a schedule). That is read off the jaxpr of the whole step,
and off the jaxpr of a step in which the leaf is one of its layers: both must be the
same operations. (They are not where a mask asks for matrices, say.)
"""

import typing
from collections.abc import Mapping, Sequence

import jax
import numpy as np
import optax
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs import elementwise
from lowbit_optax._jaxprs.graph import Graph, Node
from lowbit_optax._step import context
from lowbit_optax._step.stacks import LAYERWISE
from lowbit_optax.formats import quantized_tensor as tensors
from lowbit_optax.release.floats import carrier
from lowbit_optax.transformation import step


class Whole(Exception):
    """Why a leaf's update needs the whole stack of its gradients."""


class Layerwise(typing.NamedTuple):
    """What :func:`analyse` found, by name of a stacked leaf.

    Args:
      slots: of leaves that are updated layer by layer, the numbers of the leaves of the
        state that have a layer for each of theirs.
      reasons: of the others, why they are not.
    """

    slots: Mapping[str, tuple[int, ...]]
    reasons: Mapping[str, str]


def analyse(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    stacked: Sequence[str],
) -> Layerwise:
    """Find which of the stacked leaves can be updated layer by layer.

    Args:
      tx: the transformation.
      grads, state, params: shapes and dtypes of its arguments.
      stacked: names of leaves whose first axis is one of layers.

    Raises:
      ValueError: if the update of one leaf needs the gradients of another.
    """
    slots, reasons = {}, {}
    for name in stacked:
        try:
            slots[name] = _slots(tx, state, params, name)
        except Whole as reason:
            reasons[name] = str(reason)
    if not slots:
        return Layerwise(slots, reasons)
    whole = _StepGraph(tx, grads, state, params)
    waiting = _refuse_what_needs_all(whole, slots)
    of_layers = _StepGraph(
        tx,
        _layers_of(grads, slots),
        jax.eval_shape(tx.init, _layers_of(params, slots)),
        _layers_of(params, slots),
    )
    for name in list(slots):
        try:
            if name in waiting:
                raise Whole(waiting[name])
            own = whole.inputs_of(name, slots)
            check = _SameLayers(whole, of_layers, own)
            pairs = zip(
                whole.results_of(name, slots),
                of_layers.results_of(name, slots),
                strict=True,
            )
            for result, of_layer in pairs:
                check(result, of_layer)
        except Whole as reason:
            reasons[name] = str(reason)
            del slots[name]
    return Layerwise(slots, reasons)


class _StepGraph:
    """The graph of a step, with its inputs and results by leaf."""

    def __init__(self, tx, grads, state, params):
        with context.analysis():
            closed, shapes = jax.make_jaxpr(
                lambda grads, state, params: step(tx, params, state, grads),
                return_shape=True,
            )(grads, state, params)
        graph = Graph(closed)
        sizes = [len(jax.tree.leaves(tree)) for tree in (grads, state, params)]
        self.names, leaves, _ = tensors.named_leaves(params)
        gradients, self.state, self.params = _split(graph.inputs, sizes)
        self.gradients = dict(zip(self.names, gradients, strict=True))
        sizes = [len(jax.tree.leaves(tree)) for tree in shapes]
        self.new_params, self.new_state = _split(graph.outputs, sizes)
        if len(self.new_state) != len(self.state):
            raise ValueError(
                "release: the optimizer's update returns a state of another structure"
            )
        numbers = iter(range(len(self.params)))
        self.parts = {
            name: [next(numbers) for _ in jax.tree.leaves(leaf)]
            for name, leaf in zip(self.names, leaves, strict=True)
        }
        self.numbers = {node: n for n, node in enumerate(graph.inputs)}
        self._bits = {node: 1 << n for node, n in self.numbers.items()}

    def inputs_of(self, name: str, slots) -> list[Node]:
        """A leaf's gradient, arrays, and parts of the state."""
        arrays = [self.params[n] for n in self.parts[name]]
        return [self.gradients[name], *arrays, *(self.state[s] for s in slots[name])]

    def results_of(self, name: str, slots) -> list[Node]:
        """A leaf's new arrays and parts of the state."""
        arrays = [self.new_params[n] for n in self.parts[name]]
        return [*arrays, *(self.new_state[s] for s in slots[name])]

    def results(self, slots) -> list[tuple[str | None, Node]]:
        """All results with the leaves that they belong to."""
        found = [
            (name, node) for name in slots for node in self.results_of(name, slots)
        ]
        for name, parts in self.parts.items():
            if name not in slots:
                found += [(name, self.new_params[n]) for n in parts]
        taken = {s for numbers in slots.values() for s in numbers}
        rest = (x for s, x in enumerate(self.new_state) if s not in taken)
        return found + [(None, node) for node in rest]

    def reads(self, node: Node, inputs: Sequence[Node]) -> bool:
        """Whether a value is made of any of these inputs."""
        wanted = 0
        for each in inputs:
            wanted |= self._bits[each]
        return bool(self._made_of(node) & wanted)

    def _made_of(self, node: Node) -> int:
        waiting = [node]
        while waiting:
            node = waiting[-1]
            if node in self._bits:
                waiting.pop()
                continue
            inputs = node.call.inputs if node.call is not None else ()
            missing = [x for x in inputs if x not in self._bits]
            if missing:
                waiting.extend(missing)
                continue
            bits = 0
            for x in inputs:
                bits |= self._bits[x]
            self._bits[node] = bits
        return self._bits[node]


def _refuse_what_needs_all(graph: _StepGraph, slots) -> dict[str, str]:
    """Raise if a result is made of several leaves' gradients, one of them stacked.

    Returns:
      By name of a leaf, why it has to wait: what its own gradient goes into elsewhere.
    """
    waiting = {}
    for owner, result in graph.results(slots):
        read = {n for n, x in graph.gradients.items() if graph.reads(result, [x])}
        others = sorted(read - {owner})
        if not others or not (set(others) | {owner}) & set(slots):
            continue
        if owner is None and len(read) == 1:
            waiting[others[0]] = "the state keeps a number made of its whole gradient"
            continue
        what = "its state" if owner is None else f"the update of params{owner}"
        some = next((name for name in others if name in slots), others[0])
        raise ValueError(
            "release: the optimizer needs gradients of several leaves at once: "
            f"{what} is made of the gradient of params{some}. Inside the backward pass "
            "gradients are forgotten one by one. Instead of optax.clip_by_global_norm "
            "give value_and_update max_grad_norm=; what else needs all gradients "
            "(apply_if_finite, a norm in the state) has to be left out, or update by "
            "lowbit_optax.step without a release"
        )
    return waiting


def _layers_of(tree, names):
    """A tree like the parameters with one layer of these leaves."""

    def layer(name, leaf):
        if name not in names:
            return leaf
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), leaf)

    found, leaves, treedef = tensors.named_leaves(tree)
    return treedef.unflatten(map(layer, found, leaves))


def _slots(tx, state, params, name: str) -> tuple[int, ...]:
    """The numbers of the state's leaves that belong to a stacked leaf's layers."""
    names, leaves, _ = tensors.named_leaves(params)
    depth = jax.tree.leaves(leaves[names.index(name)])[0].shape[0]
    of_layer = jax.eval_shape(tx.init, _layers_of(params, {name}))
    given, structure = jax.tree.flatten(state)
    if jax.tree.structure(of_layer) != structure:
        raise Whole("the state of one of its layers has another structure")
    found = []
    for number, (stack, one) in enumerate(
        zip(given, jax.tree.leaves(of_layer), strict=True)
    ):
        if stack.shape == one.shape and stack.dtype == one.dtype:
            continue
        if stack.shape != (depth, *one.shape) or stack.dtype != one.dtype:
            raise Whole(
                f"its state {stack.dtype}{list(stack.shape)} is not a stack of layers"
            )
        if carrier(stack.dtype) is None:
            raise Whole(f"its state is {stack.dtype}")
        found.append(number)
    return tuple(found)


class _SameLayers:
    """Raises :class:`Whole` unless a result's layers are made of their own layers.

    Args:
      whole: the graph of a step on the whole stack.
      of_layers: that of a step on layers.
      own: the stack's inputs to the first.
    """

    def __init__(self, whole: _StepGraph, of_layers: _StepGraph, own: list[Node]):
        self._whole, self._of_layers, self._own = whole, of_layers, own
        self._depth = own[0].aval.shape[0]
        self._seen: dict[Node, Node] = {}

    def __call__(self, stack: Node, layer: Node) -> None:
        waiting = [(stack, layer, False)]
        while waiting:
            stack, layer, is_shared = waiting.pop()
            if stack in self._seen and self._seen[stack] is layer:
                continue
            self._seen[stack] = layer
            # A schedule or a count, whatever it is made of, is the same for all layers.
            is_number = not stack.aval.shape
            is_shared |= is_number and not self._whole.reads(stack, self._own)
            self._check_alike(stack, layer, is_shared)
            if stack.call is None:
                continue
            if not is_shared:
                self._check_call(stack.call)
            pairs = zip(stack.call.inputs, layer.call.inputs, strict=True)
            waiting += ((a, b, is_shared) for a, b in pairs)

    def _check_alike(self, stack: Node, layer: Node, is_shared: bool) -> None:
        """Whether both are made by the same operation, input or constant."""
        if is_shared and stack.aval.shape != layer.aval.shape:
            raise Whole("a number in its update depends on the stack's shape")
        if _operation(stack) != _operation(layer):
            raise Whole("the update of a layer is not that of the stack")
        if stack.call is not None:
            return
        numbers = self._whole.numbers.get(stack), self._of_layers.numbers.get(layer)
        if numbers[0] != numbers[1]:
            raise Whole("the update of a layer is not that of the stack")
        if numbers[0] is None and not _same_constant(stack.constant, layer.constant):
            raise Whole("a number in its update depends on the stack's shape")
        if not is_shared and stack.aval.shape and stack not in self._own:
            raise Whole(f"its update takes another array, {list(stack.aval.shape)}")

    def _check_call(self, call) -> None:
        """Whether a call's layers are made of the same layers of its inputs."""
        inputs = [list(x.aval.shape) for x in call.inputs]
        is_spread = call.primitive is p.broadcast_in_dim_p and inputs[0] == []
        if is_spread or _keeps_layers(call, self._depth):
            return
        raise Whole(
            f"its update takes {call.primitive} of {inputs} to "
            f"{list(call.outputs[0].aval.shape)}, which is of several layers"
        )


def _operation(node: Node):
    if node.call is None:
        return None
    call = node.call
    return call.primitive, len(call.inputs), call.outputs.index(node)


def _same_constant(a, b) -> bool:
    if a is b:
        return True
    if jax.typeof(a) != jax.typeof(b) or isinstance(a, jax.core.Tracer):
        return False
    if jax.dtypes.issubdtype(jax.typeof(a).dtype, jax.dtypes.extended):
        return False
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()  # NaN is itself


def _keeps_layers(call, depth: int) -> bool:
    """Whether layers of a call's results are made of the same layers of its inputs."""
    stacks = [x for x in call.inputs if x.aval.shape]
    aligned = bool(stacks) and all(x.aval.shape[0] == depth for x in stacks)
    if call.primitive is p.jit_p:
        return call.params["name"] == LAYERWISE
    if call.outputs[0].aval.shape[:1] != (depth,):
        return False
    is_cast = call.primitive is p.bitcast_convert_type_p
    if is_cast or elementwise.is_elementwise(call.primitive):
        shape = call.outputs[0].aval.shape
        return aligned and all(x.aval.shape == shape for x in stacks)
    if call.primitive in (p.reduce_sum_p, p.reduce_max_p, p.reduce_min_p):
        return aligned and 0 not in call.params["axes"]
    if call.primitive is p.broadcast_in_dim_p:
        return aligned and call.params["broadcast_dimensions"][:1] == (0,)
    if call.primitive in (p.reshape_p, p.squeeze_p):
        return aligned and 0 not in (call.params.get("dimensions") or ())
    return False


def _split(items: Sequence, sizes: Sequence[int]) -> list[list]:
    items = iter(items)
    return [[next(items) for _ in range(size)] for size in sizes]
