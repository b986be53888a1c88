"""A loss as stretches of calls, after each of which leaves can be updated.

The backward pass goes through the calls in reverse. The gradient of a leaf is whole
once it is past the first call that reads the leaf. There a stretch begins:

    stretch 1        stretch 2         stretch 3
    x @ w1, tanh  |  x @ w2, tanh  |   x @ w3, tanh, mean
                  <- update w2     <-  update w3       <- cotangent of the loss

A scan is a stretch of its own if its loop can update the parameters that it runs over.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.graph import Call, Node
from lowbit_optax._jaxprs.program import LossProgram, ScanCall
from lowbit_optax._numerics.random_bits import COUNTERS
from lowbit_optax.release.parts import Part
from lowbit_optax.release.step_graph import WaitsForWholeGradient
from lowbit_optax.release.traced_loss import ParamLeaf, TracedLoss

_HEAVY = frozenset(
    {
        p.conv_general_dilated_p, p.custom_vjp_call_p, p.dot_general_p, p.remat_p,
        p.scan_p, p.while_p,
    }
)  # fmt: skip
"""A stretch begins after one of these, where one array goes on and no intermediate
results of a normalisation, from which little would have to be kept."""

MAX_WAITING = 2**22
"""Elements of the gradients that wait for each other, to be used in fewer kernels."""

MIN_LAYER_SIZE = 4096
"""Layers and leaves with fewer elements are updated after the backward pass, all at
once."""

NO_SCAN = "no scan runs over it"


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """Consecutive calls.

    Args:
      calls: in order; only one if it is a released scan.
      leaves: the parameters that are updated once the backward pass is past it.
      in_loop: the parameters that are updated in its backward loop; none unless it is a
        released scan.
      part: the leaves as a part of the optimizer, once one has been found.
    """

    calls: Sequence[Call]
    leaves: Sequence[ParamLeaf]
    in_loop: Sequence[ParamLeaf] = ()
    part: Part | None = None

    def with_part(self, part: Part | None) -> "Stretch":
        """With its leaves as a part of the optimizer; without leaves if it has none."""
        leaves = self.leaves if part is not None else ()
        return dataclasses.replace(self, leaves=leaves, part=part)

    @property
    def scan_call(self) -> ScanCall:
        """The released scan."""
        (call,) = self.calls
        assert isinstance(call, ScanCall)
        return call


def active_values(loss: TracedLoss) -> set[Node]:
    """The values that have a cotangent: made of parameters, and the loss needs them."""
    program = loss.program
    made = {x.gradient_value for x in loss.leaves if x.gradient_value is not None}
    for call in program.calls:
        if not _stops(call) and not made.isdisjoint(call.inputs):
            made.update(x for x in call.outputs if is_inexact(x))
    needed = {program.outputs[0]}
    for call in reversed(program.calls):
        if not _stops(call) and not needed.isdisjoint(call.outputs):
            needed.update(call.inputs)
    return made & needed


def is_active(call: Call, active: set[Node]) -> bool:
    """Whether cotangents go through a call, from its outputs to its inputs."""
    return not _stops(call) and not active.isdisjoint(call.outputs)


def first_readers(
    calls: Sequence[Call], leaves: Sequence[ParamLeaf], active: set[Node]
) -> dict[str, Call]:
    """By path of a leaf, the first of the calls through which it gets a cotangent."""
    found: dict[Node, Call] = {}
    for call in calls:
        if is_active(call, active):
            for value in call.inputs:
                found.setdefault(value, call)
    return {
        leaf.name: found[leaf.gradient_value]
        for leaf in leaves
        if leaf.gradient_value in found
    }


def divide(
    loss: TracedLoss,
    in_loops: Mapping[Call, Sequence[ParamLeaf]],
    leaves: Sequence[ParamLeaf],
    active: set[Node],
) -> list[Stretch]:
    """Divide a loss into stretches.

    Args:
      loss: traced.
      in_loops: by scan, the parameters that are updated in its loop. Each of these
        scans is a stretch of its own.
      leaves: other parameters that may be updated within the backward pass. Small ones
        wait for others, until half the size of the largest is there.
      active: from :func:`active_values`.
    """
    order = demand_order(loss.program, active)
    read_by: dict[Call, list[ParamLeaf]] = {}
    readers = first_readers(order, leaves, active)
    for leaf in leaves:
        if leaf.name in readers:
            read_by.setdefault(readers[leaf.name], []).append(leaf)
    enough = min(MAX_WAITING, max((leaf.size for leaf in leaves), default=0) / 2)
    found: list[Stretch] = []
    calls: list[Call] = []
    waiting: list[ParamLeaf] = []

    def close():
        if calls:
            found.append(Stretch(calls[::-1], waiting[:]))
        calls.clear()
        waiting.clear()

    for call in reversed(order):
        if call in in_loops:
            close()
            found.append(Stretch([call], read_by.get(call, []), in_loops[call]))
            continue
        is_full = bool(waiting) and sum(leaf.size for leaf in waiting) >= enough
        if is_full and call.primitive in _HEAVY:
            close()
        calls.append(call)
        waiting += read_by.get(call, ())
    close()
    return found[::-1]


def demand_order(program: LossProgram, active: set[Node]) -> list[Call]:
    """The calls in an order in which parameters are cast when they are first needed.

    A cast of all parameters at the beginning of a loss would make the gradients of all
    wait for its end. A call moves only if it is the only one that reads its operands,
    so that cotangents are summed in the order in which JAX sums them.
    """

    def moves(call: Call) -> bool:
        return all(
            node.constant is not None
            or (
                node in program.of_parameters
                and (node not in active or program.uses[node] == 1)
            )
            for node in call.inputs
        ) and all(node in program.of_parameters for node in call.outputs)

    delayed: set[Call] = set()
    order: list[Call] = []

    def append(call: Call) -> None:
        delayed.discard(call)
        for node in call.inputs:
            if node.call in delayed:
                append(node.call)
        order.append(call)

    for call in program.calls:
        if moves(call):
            delayed.add(call)
        else:
            append(call)
    for call in program.calls:
        if call in delayed:
            append(call)
    return order


def scan_over(program: LossProgram, leaf: ParamLeaf) -> ScanCall:
    """The scan over a leaf, if it is the only one and nothing else reads the leaf.

    Raises:
      WaitsForWholeGradient: if it is not.
    """
    is_real = jnp.issubdtype(leaf.gradient.dtype, jnp.floating)
    if leaf.gradient_value is None or not is_real:
        raise WaitsForWholeGradient(f"it is {leaf.value.dtype}")
    values = {*leaf.array_values, leaf.gradient_value}
    over = [call for call in program.scans if not values.isdisjoint(call.scanned)]
    if not over and _is_scanned(program, values):
        raise WaitsForWholeGradient("it is changed before a scan runs over it")
    if not over:
        raise WaitsForWholeGradient(NO_SCAN)
    if len(over) > 1:
        raise WaitsForWholeGradient("several scans run over it")
    if any(program.uses[value] != 1 for value in values):
        users = {user for value in values for user in program.users(value)}
        others = ", ".join(sorted(users - {"scan"})) or "the scan, in another way"
        raise WaitsForWholeGradient(f"besides a scan it is used by {others}")
    if not values <= set(over[0].scanned):
        raise WaitsForWholeGradient("only a part of it is scanned over")
    layer_size = math.prod(leaf.value.shape[1:])
    if layer_size < MIN_LAYER_SIZE:
        raise WaitsForWholeGradient(
            f"its layers have fewer than {MIN_LAYER_SIZE} elements"
        )
    if layer_size > COUNTERS:
        raise WaitsForWholeGradient("its layers have more than 2^32 elements")
    return over[0]


def _is_scanned(program: LossProgram, values: set[Node]) -> bool:
    """Whether a scan runs over what is made of these values alone, such as a cast."""
    made = set(values)
    for call in program.calls:
        inputs = [node for node in call.inputs if node.constant is None]
        if inputs and made.issuperset(inputs):
            made.update(call.outputs)
    return any(not made.isdisjoint(call.scanned) for call in program.scans)


def _stops(call: Call) -> bool:
    return call.primitive.name == "stop_gradient"


def is_inexact(node: Node) -> bool:
    """Whether it has a derivative: it is real or complex."""
    return jnp.issubdtype(node.aval.dtype, jnp.inexact)
