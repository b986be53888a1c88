"""The values of an optimizer's step, numbered so that equal computations are equal.

A value's number stands for its shape, the primitive that computes it, and the numbers
of its operands, down to gradients, parameters, state and constants. A second number
leaves out shapes, to compare a step on one layer with the step on a stack of layers.
"""

import typing
from collections.abc import Container, Iterable, Sequence

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


class Value(typing.NamedTuple):
    """What is known of one value of a step.

    Args:
      numbers: one is equal for equal computations of equal shape, the other for equal
        computations of any shape.
      needs: paths of the parameters whose gradients it depends on.
      in_stacks: whether it depends on stacks of layers.
      several: empty if each layer of the value is computed from the same layer of
        stacks and from scalars that depend on none; else what combines several layers.
    """

    numbers: tuple[int, int]
    needs: frozenset[str]
    in_stacks: bool
    several: str


class StepValues:
    """The results of a step.

    Args:
      tx: the transformation.
      grads, state, params: shapes and dtypes of the step's arguments.
      state_keys: names for the state's leaves, in their order.
      numbers: of the values known so far; new ones are added.
      stacks: paths of parameters and keys of state that are stacks of layers.

    Attributes:
      params: by path, the values of the new arrays.
      state: by key, the values of the new state's leaves.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        grads: optax.Updates,
        state: optax.OptState,
        params: optax.Params,
        state_keys: Sequence,
        numbers: dict,
        stacks: Container = (),
    ):
        trace = jax.make_jaxpr(
            lambda grads, state, params: step(tx, params, state, grads),
            return_shape=True,
        )
        try:
            with context.analysis():
                closed, (_, new_state) = trace(grads, state, params)
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise ValueError(
                f"release: the optimizer needs more than gradients: {error}. The loss "
                "and a line search (optax.lbfgs) need the whole backward pass; call "
                "tx.update with all gradients, without a release"
            ) from error
        if len(jax.tree.leaves(new_state)) != len(state_keys):
            raise ValueError(
                "release: the optimizer's update returns a state of another structure"
            )
        names, leaves, _ = trees.named_leaves(params)
        arrays = [
            (name, n)
            for name, leaf in zip(names, leaves, strict=True)
            for n, _ in enumerate(jax.tree.leaves(leaf))
        ]
        graph, self._numbers = Graph(closed, opaque={LAYERWISE}), numbers
        self._values: dict[Node, Value] = {}
        keys = [
            *(("gradient", name) for name in names),
            *(("state", key) for key in state_keys),
            *(("params", *key) for key in arrays),
        ]
        for key, node in zip(keys, graph.inputs, strict=True):
            is_stack = key[1] in stacks
            several = "" if is_stack else _another(node)
            needs = frozenset([key[1]] if key[0] == "gradient" else ())
            self._values[node] = Value(self._both(key, key), needs, is_stack, several)
        for call in calls_between(graph.outputs, graph.inputs):
            self._add(call)
        results = [self._value(node) for node in graph.outputs]
        self.params: dict[str, list[Value]] = {name: [] for name in names}
        for (name, _), value in zip(arrays, results, strict=False):
            self.params[name].append(value)
        self.state = dict(zip(state_keys, results[len(arrays) :], strict=True))

    def results_of(self, name: str, keys: Iterable) -> list[Value]:
        """A parameter's new arrays, and these leaves of the new state."""
        return [*self.params[name], *(self.state[key] for key in keys)]

    def _both(self, key, other) -> tuple[int, int]:
        number = self._numbers.setdefault(key, len(self._numbers))
        return number, self._numbers.setdefault(other, len(self._numbers))

    def _value(self, node: Node) -> Value:
        if node.constant is None:
            return self._values[node]
        constant = node.constant
        is_key = jnp.issubdtype(node.aval.dtype, jax.dtypes.extended)
        if isinstance(constant, Tracer) or is_key:
            key: tuple = ("array", id(constant))
        else:
            array = np.asarray(constant)
            key = ("constant", str(array.dtype), array.shape, array.tobytes())
        return Value(self._both(key, key), frozenset(), False, _another(node))

    def _add(self, call: Call) -> None:
        operands = [self._value(node) for node in call.inputs]
        needs = frozenset().union(*(x.needs for x in operands))
        in_stacks = any(x.in_stacks for x in operands)
        several = next((x.several for x in operands if x.several), "")
        is_spread = call.primitive is p.broadcast_in_dim_p and _is_scalar(call.inputs)
        nodes = *call.inputs, *call.outputs
        if not (several or _is_scalar(nodes) or is_spread or _keeps_layers(call)):
            several = (
                f"its update takes {call.primitive} of "
                f"{[list(x.aval.shape) for x in call.inputs]} to "
                f"{list(call.outputs[0].aval.shape)}, which is of several layers"
            )
        for n, node in enumerate(call.outputs):
            why = several if in_stacks or node.aval.shape else ""
            numbers = self._both(
                (call.primitive, n, node.aval.shape, *(x.numbers[0] for x in operands)),
                (call.primitive, n, None, *(x.numbers[1] for x in operands)),
            )
            self._values[node] = Value(numbers, needs, in_stacks, why)


def _another(node: Node) -> str:
    shape = list(node.aval.shape)
    return f"its update takes another array, {shape}" if shape else ""


def _is_scalar(nodes: Iterable[Node]) -> bool:
    return all(node.is_scalar for node in nodes)


def _keeps_layers(call: Call) -> bool:
    """Whether a layer of a call's results is made of the same layer of its inputs."""
    primitive, params = call.primitive, call.params
    if primitive is p.jit_p:
        return params["name"] == LAYERWISE
    result = call.outputs[0].aval.shape
    stacks = [x.aval.shape for x in call.inputs if x.aval.shape]
    if not result or not stacks or any(s[0] != result[0] for s in stacks):
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
