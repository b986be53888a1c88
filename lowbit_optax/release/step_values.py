"""The values of an optimizer's step, with equal ids for equal computations.

The id of a value represents its shape, the primitive that computes it, and the ids of
its operands, back to gradients, parameters, state and constants. A second id ignores
shapes, so that a step on one layer can be compared with a step on a stack of layers.
"""

import typing
from collections.abc import Container, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs import elementwise
from lowbit_optax._jaxprs.graph import Call, Graph, Node, calls_between
from lowbit_optax._step import context, trees
from lowbit_optax._step.context import LAYERWISE
from lowbit_optax.transformations.step import step

_REDUCING = frozenset({p.reduce_sum_p, p.reduce_max_p, p.reduce_min_p})
_REARRANGING = _REDUCING | {p.broadcast_in_dim_p, p.reshape_p, p.squeeze_p}

Key = typing.Any
"""The key of a result: the index of a leaf of the state, or the path of a parameter
and the index of one of its arrays."""


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


def step_values(
    tx,
    arguments: tuple,
    state_keys: Sequence[int],
    numbers: dict,
    stacks: Container = (),
) -> dict[Key, Value]:
    """Trace a step, and return its results by key.

    Args:
      tx: the transformation.
      arguments: shapes and dtypes of gradients, state and parameters.
      state_keys: the indices of the state's leaves.
      numbers: a dict from computations to ids, to which new computations are added.
      stacks: paths of parameters, and indices of state, that are stacks of layers.
    """
    closed, (_, new_state) = _traced(tx, *arguments)
    if len(jax.tree.leaves(new_state)) != len(state_keys):
        raise ValueError(
            "release: tx.update must return a state with the structure of its input, "
            "got another structure"
        )
    names, leaves, _ = trees.named_leaves(arguments[2])
    pairs = zip(names, leaves, strict=True)
    arrays = [(name, n) for name, x in pairs for n, _ in enumerate(jax.tree.leaves(x))]
    graph, values = Graph(closed, opaque={LAYERWISE}), _Values(numbers)
    owners = [*names, *state_keys, *(name for name, _ in arrays)]
    keys = [*(("gradient", name) for name in names), *state_keys, *arrays]
    for n, (node, key) in enumerate(zip(graph.inputs, keys, strict=True)):
        is_stack, needs = owners[n] in stacks, frozenset(names[n : n + 1])
        several = not is_stack and not node.is_scalar
        values[node] = Value(values.both(key, key), needs, is_stack, several)
    for call in calls_between(graph.outputs, graph.inputs):
        values.add(call)
    results = map(values.of, graph.outputs)
    return dict(zip([*arrays, *state_keys], results, strict=True))


def _traced(tx, grads, state, params):
    trace = jax.make_jaxpr(
        lambda grads, state, params: step(tx, params, state, grads), return_shape=True
    )
    try:
        with context.changed(is_analysed=True):
            return trace(grads, state, params)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise ValueError(
            "release: tx.update must need only gradients, state and parameters, but "
            f"raised: {error}. Optimizers that read the loss or run a line search, "
            "such as optax.lbfgs, need all gradients at once; call tx.update with them"
        ) from error


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
