"""The graph of an optimizer's step: which results depend on which gradients.

Two graphs of a step tell whether a step on less than all leaves, or on one layer of a
stack, computes the same: both must consist of the same operations on the same inputs.
Every operation on a stack must also compute a layer of its result from the same layers
of its operands.
"""

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs import elementwise
from lowbit_optax._jaxprs.graph import Call, Graph, Node, calls_between
from lowbit_optax._step import context, trees
from lowbit_optax._step.context import LAYERWISE
from lowbit_optax.transformations.lowbit import step


class WaitsForWholeGradient(Exception):
    """Why a leaf is updated only when its whole gradient is there."""


class StepGraph:
    """The graph of a step, and its inputs and results by leaf.

    Args:
      tx: the transformation.
      grads, state, params: shapes and dtypes of the step's arguments.

    Attributes:
      inputs: all of them.
      gradients: by path, the leaves' gradients.
      params, new_params: by path, the leaves' arrays before and after the step.
      state, new_state: the state's leaves before and after the step.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        grads: optax.Updates,
        state: optax.OptState,
        params: optax.Params,
    ):
        with context.analysis():
            closed, (_, new_state) = jax.make_jaxpr(
                lambda grads, state, params: step(tx, params, state, grads),
                return_shape=True,
            )(grads, state, params)
        graph = Graph(closed, opaque={LAYERWISE})
        self.inputs = graph.inputs
        names, leaves, _ = trees.named_leaves(params)
        gradients, self.state, *arrays = _split_like(
            graph.inputs, [grads, state, *leaves]
        )
        *new_arrays, self.new_state = _split_like(graph.outputs, [*leaves, new_state])
        if len(self.new_state) != len(self.state):
            raise ValueError(
                "release: the optimizer's update returns a state of another structure"
            )
        self.gradients = dict(zip(names, gradients, strict=True))
        self.params = dict(zip(names, arrays, strict=True))
        self.new_params = dict(zip(names, new_arrays, strict=True))
        # By node, a bit for every input that it depends on.
        self._dependencies = {node: 1 << n for n, node in enumerate(graph.inputs)}
        for call in calls_between(graph.outputs, graph.inputs):
            bits = self._bits(call.inputs)
            self._dependencies |= dict.fromkeys(call.outputs, bits)

    def results_of(self, name: str, numbers: Iterable[int]) -> list[Node]:
        """A leaf's new arrays, and these leaves of the new state."""
        return [*self.new_params[name], *(self.new_state[n] for n in numbers)]

    def depends_on(self, node: Node, inputs: Iterable[Node]) -> bool:
        """Whether a result, or what it is made of, is computed from these inputs."""
        return bool(self._bits([node]) & self._bits(inputs))

    def _bits(self, nodes: Iterable[Node]) -> int:
        each = (self._dependencies.get(node, 0) for node in nodes)
        return functools.reduce(operator.or_, each, 0)


def _split_like(nodes: Iterable[Node], trees: Sequence) -> list[list[Node]]:
    """One list of nodes for every tree, as long as the tree has leaves."""
    remaining = iter(nodes)
    return [[next(remaining) for _ in jax.tree.leaves(tree)] for tree in trees]


def check_same(
    whole: StepGraph,
    pairs: Sequence[tuple[Node, Node]],
    inputs: Mapping[Node, Node],
    differs: str,
    other_numbers: str,
    stack: Sequence[Node] = (),
) -> None:
    """Raise unless two steps compute the same results.

    Args:
      whole: the graph of the step on all leaves.
      pairs: its results, and those of the other step.
      inputs: from its inputs to those of the other step.
      differs, other_numbers: why a leaf waits if an operation, or a number, is another.
      stack: the inputs of the whole step that belong to a stack, if the other step is
        on one of its layers.

    Raises:
      WaitsForWholeGradient: saying what differs.
    """
    waiting = [(*pair, not stack) for pair in reversed(pairs)]
    compared = set()
    while waiting:
        triple = a, b, is_shared = waiting.pop()
        if triple in compared:
            continue
        compared.add(triple)
        # A schedule or a count, whatever it is made of, is the same for all layers.
        is_shared |= not a.aval.shape and not whole.depends_on(a, stack)
        if is_shared and a.aval.shape != b.aval.shape:
            raise WaitsForWholeGradient(other_numbers)
        is_input = _is_input(a) or _is_input(b)
        if _operation(a) != _operation(b) or (is_input and inputs.get(a) is not b):
            raise WaitsForWholeGradient(differs)
        if a.call is None or b.call is None:
            if not is_input and not _same_constant(a.constant, b.constant):
                raise WaitsForWholeGradient(other_numbers)
            if not is_shared and a.aval.shape and a not in stack:
                raise WaitsForWholeGradient(
                    f"its update takes another array, {list(a.aval.shape)}"
                )
            continue
        if not is_shared:
            _check_layers(a.call, stack[0].aval.shape[0])
        operands = zip(a.call.inputs, b.call.inputs, strict=True)
        waiting += ((*pair, is_shared) for pair in operands)


def _is_input(node: Node) -> bool:
    return node.call is None and node.constant is None


def _operation(node: Node):
    """What makes a value, to be compared; None for an input or a constant."""
    if node.call is None:
        return None
    call = node.call
    return call.primitive, len(call.inputs), call.outputs.index(node)


def _same_constant(a, b) -> bool:
    """Whether two constants are equal in every bit."""
    if a is b:
        return True
    if jax.typeof(a) != jax.typeof(b) or isinstance(a, Tracer):
        return False
    if jnp.issubdtype(jax.typeof(a).dtype, jax.dtypes.extended):
        return False
    # By bytes, so that NaN is equal to itself.
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _check_layers(call: Call, depth: int) -> None:
    """Raise unless a call makes layers of the same layers of its operands."""
    inputs = [list(x.aval.shape) for x in call.inputs]
    is_spread = call.primitive is p.broadcast_in_dim_p and inputs[0] == []
    if not is_spread and not _keeps_layers(call, depth):
        raise WaitsForWholeGradient(
            f"its update takes {call.primitive} of {inputs} to "
            f"{list(call.outputs[0].aval.shape)}, which is of several layers"
        )


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
