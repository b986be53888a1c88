"""Whether the update of a stack does to each of its layers what that of a layer does.

Two graphs of the same step are compared: in one the parameter is a stack, in the other
one of its layers. They must consist of the same operations, and every operation on the
stack must compute a layer of its result from the same layers of its inputs.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs import elementwise
from lowbit_optax._jaxprs.graph import Call, Node
from lowbit_optax._step.context import LAYERWISE
from lowbit_optax.release.step_graph import StepGraph


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
