"""The graph of an optimizer's step: which results depend on which gradients.

Two graphs of the same step tell whether the update of a stack does to each of its
layers what that of a layer does: in one the parameter is a stack, in the other one of
its layers. They must consist of the same operations, and every operation on the stack
must compute a layer of its result from the same layers of its inputs.
"""

from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs import elementwise
from lowbit_optax._jaxprs.graph import Call, Graph, Node
from lowbit_optax._step import context, trees
from lowbit_optax._step.context import LAYERWISE
from lowbit_optax.transformations.lowbit import step

StateStacks = Mapping[str, Sequence[int]]
"""By path of a stacked parameter, the numbers of the state's leaves that are stacks of
one layer for each of its layers."""


class StepGraph:
    """The graph of a step, and its inputs and results by leaf.

    Args:
      tx: the transformation.
      grads, state, params: shapes and dtypes of the step's arguments.

    Attributes:
      gradients: by path, the leaves' gradients.
      state, new_state: the state's leaves before and after the step.
      input_numbers: of the nodes that are inputs.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        grads: optax.Updates,
        state: optax.OptState,
        params: optax.Params,
    ):
        with context.analysis():
            closed, shapes = jax.make_jaxpr(
                lambda grads, state, params: step(tx, params, state, grads),
                return_shape=True,
            )(grads, state, params)
        graph = Graph(closed, opaque={LAYERWISE})
        names, leaves, _ = trees.named_leaves(params)
        gradients, self.state, self._params = _split_like(
            graph.inputs, (grads, state, params)
        )
        self._new_params, self.new_state = _split_like(graph.outputs, shapes)
        if len(self.new_state) != len(self.state):
            raise ValueError(
                "release: the optimizer's update returns a state of another structure"
            )
        self.gradients = dict(zip(names, gradients, strict=True))
        self.input_numbers = {node: n for n, node in enumerate(graph.inputs)}
        numbers = iter(range(len(self._params)))
        self._arrays = {
            name: [next(numbers) for _ in jax.tree.leaves(leaf)]
            for name, leaf in zip(names, leaves, strict=True)
        }
        # By node, a bit for every input that it depends on.
        self._dependencies = {node: 1 << n for node, n in self.input_numbers.items()}

    def inputs_of(self, name: str, state_stacks: StateStacks) -> list[Node]:
        """A leaf's gradient, its arrays and its stacks of the state."""
        stacks = [self.state[n] for n in state_stacks[name]]
        return [self.gradients[name], *self.params_of(name), *stacks]

    def params_of(self, name: str) -> list[Node]:
        """A leaf's arrays."""
        return [self._params[n] for n in self._arrays[name]]

    def new_params_of(self, name: str) -> list[Node]:
        """A leaf's new arrays."""
        return [self._new_params[n] for n in self._arrays[name]]

    def results_of(self, name: str, state_stacks: StateStacks) -> list[Node]:
        """A leaf's new arrays and new stacks of the state."""
        stacks = [self.new_state[n] for n in state_stacks[name]]
        return [*self.new_params_of(name), *stacks]

    def results(self, state_stacks: StateStacks) -> list[tuple[str | None, Node]]:
        """All results, each with the path of the leaf that it belongs to.

        What belongs to no leaf, the rest of the state, has None for a path.
        """
        found: list[tuple[str | None, Node]] = [
            (name, node)
            for name in state_stacks
            for node in self.results_of(name, state_stacks)
        ]
        for name in self._arrays:
            if name not in state_stacks:
                found += [(name, node) for node in self.new_params_of(name)]
        owned = {n for numbers in state_stacks.values() for n in numbers}
        rest = (x for n, x in enumerate(self.new_state) if n not in owned)
        return found + [(None, node) for node in rest]

    def depends_on(self, node: Node, inputs: Iterable[Node]) -> bool:
        """Whether a value is computed from any of these inputs."""
        wanted = 0
        for each in inputs:
            wanted |= self._dependencies[each]
        return bool(self._dependencies_of(node) & wanted)

    def _dependencies_of(self, node: Node) -> int:
        waiting = [node]
        while waiting:
            node = waiting[-1]
            if node in self._dependencies:
                waiting.pop()
                continue
            inputs = node.call.inputs if node.call is not None else ()
            missing = [x for x in inputs if x not in self._dependencies]
            if missing:
                waiting.extend(missing)
                continue
            bits = 0
            for x in inputs:
                bits |= self._dependencies[x]
            self._dependencies[node] = bits
        return self._dependencies[node]


def _split_like(nodes: Iterable[Node], trees: Sequence) -> list[list[Node]]:
    """One list of nodes for every tree, as long as the tree has leaves."""
    remaining = iter(nodes)
    return [[next(remaining) for _ in jax.tree.leaves(tree)] for tree in trees]


class WaitsForWholeGradient(Exception):
    """Why a leaf is updated only when its whole gradient is there."""


class SameLayers:
    """Raises :class:`WaitsForWholeGradient` unless layers are updated alone.

    Args:
      of_stack: the graph of a step on the whole stack.
      of_layer: that of a step on one layer.
      own_inputs: the inputs to the first that belong to the stack.
    """

    def __init__(self, of_stack: StepGraph, of_layer: StepGraph, own_inputs: list):
        self._of_stack, self._of_layer = of_stack, of_layer
        self._own_inputs = own_inputs
        self._depth = own_inputs[0].aval.shape[0]
        self._compared: set[tuple[Node, Node, bool]] = set()

    def check(self, stack: Node, layer: Node) -> None:
        """Compare what a result of the one and the same of the other are made of."""
        waiting = [(stack, layer, False)]
        while waiting:
            pair = stack, layer, is_shared = waiting.pop()
            if pair in self._compared:
                continue
            self._compared.add(pair)
            # A schedule or a count, whatever it is made of, is the same for all layers.
            is_number = not stack.aval.shape
            is_shared |= is_number and not self._of_stack.depends_on(
                stack, self._own_inputs
            )
            self._check_alike(stack, layer, is_shared)
            if stack.call is None or layer.call is None:
                continue
            if not is_shared:
                self._check_call(stack.call)
            inputs = zip(stack.call.inputs, layer.call.inputs, strict=True)
            waiting += ((a, b, is_shared) for a, b in inputs)

    def _check_alike(self, stack: Node, layer: Node, is_shared: bool) -> None:
        """Whether both are made by the same operation, input or constant."""
        of_shape = "a number in its update depends on the stack's shape"
        differs = "the update of a layer is not that of the stack"
        if is_shared and stack.aval.shape != layer.aval.shape:
            raise WaitsForWholeGradient(of_shape)
        if operation(stack) != operation(layer):
            raise WaitsForWholeGradient(differs)
        if stack.call is not None:
            return
        number = self._of_stack.input_numbers.get(stack)
        if number != self._of_layer.input_numbers.get(layer):
            raise WaitsForWholeGradient(differs)
        if number is None and not same_constant(stack.constant, layer.constant):
            raise WaitsForWholeGradient(of_shape)
        if not is_shared and stack.aval.shape and stack not in self._own_inputs:
            raise WaitsForWholeGradient(
                f"its update takes another array, {list(stack.aval.shape)}"
            )

    def _check_call(self, call: Call) -> None:
        """Whether a call's layers are made of the same layers of its inputs."""
        inputs = [list(x.aval.shape) for x in call.inputs]
        is_spread = call.primitive is p.broadcast_in_dim_p and inputs[0] == []
        if is_spread or _keeps_layers(call, self._depth):
            return
        raise WaitsForWholeGradient(
            f"its update takes {call.primitive} of {inputs} to "
            f"{list(call.outputs[0].aval.shape)}, which is of several layers"
        )


def operation(node: Node):
    """What makes a value, to be compared; None for an input or a constant."""
    if node.call is None:
        return None
    call = node.call
    return call.primitive, len(call.inputs), call.outputs.index(node)


def same_constant(a, b) -> bool:
    """Whether two constants are equal in every bit."""
    if a is b:
        return True
    if jax.typeof(a) != jax.typeof(b) or isinstance(a, Tracer):
        return False
    if jnp.issubdtype(jax.typeof(a).dtype, jax.dtypes.extended):
        return False
    # By bytes, so that NaN is equal to itself.
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _keeps_layers(call: Call, depth: int) -> bool:
    """Whether a layer of a call's results is made of the same layer of its inputs."""
    primitive, params = call.primitive, call.params
    if primitive is p.jit_p:
        return params["name"] == LAYERWISE
    result = call.outputs[0].aval.shape
    stacks = [x.aval.shape for x in call.inputs if x.aval.shape]
    if result[:1] != (depth,) or not stacks or any(s[0] != depth for s in stacks):
        return False
    if primitive is p.bitcast_convert_type_p or elementwise.is_elementwise(primitive):
        return all(shape == result for shape in stacks)
    if primitive in (p.reduce_sum_p, p.reduce_max_p, p.reduce_min_p):
        return 0 not in params["axes"]
    if primitive is p.broadcast_in_dim_p:
        return params["broadcast_dimensions"][:1] == (0,)
    if primitive in (p.reshape_p, p.squeeze_p):
        return 0 not in (params.get("dimensions") or ())
    return False
