"""A loss as stretches of calls, after each of which leaves can be updated.

The backward pass goes through the calls in reverse. The gradient of a leaf is whole
once it is past the first call that reads the leaf. There a stretch begins:

    stretch 1        stretch 2         stretch 3
    x @ w1, tanh  |  x @ w2, tanh  |   x @ w3, tanh, mean
                  <- update w2     <-  update w3       <- cotangent of the loss
"""

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.graph import Call, Node
from lowbit_optax._jaxprs.program import LossProgram
from lowbit_optax.release.scans import ReleasedScan
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


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """Consecutive calls.

    Args:
      calls: in order; only one if it is a released scan.
      leaves: the parameters that are updated once the backward pass is past it.
      released: the scan, if it is one in whose loop parameters are updated.
    """

    calls: list[Call]
    leaves: list[ParamLeaf]
    released: ReleasedScan | None = None


def active_values(loss: TracedLoss) -> set[Node]:
    """The values that have a cotangent: made of parameters, and the loss needs them."""
    program = loss.program
    made = {x.gradient_value for x in loss.leaves if x.gradient_value is not None}
    for call in program.calls:
        if not _stops(call) and not made.isdisjoint(call.inputs):
            made.update(x for x in call.outputs if _is_inexact(x))
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
    scans: Sequence[ReleasedScan],
    leaves: Sequence[ParamLeaf],
    active: set[Node],
) -> list[Stretch]:
    """Divide a loss into stretches.

    Args:
      loss: traced.
      scans: those in whose loops parameters are updated, each a stretch of its own.
      leaves: other parameters that may be updated within the backward pass. Small ones
        wait for others, until half the size of the largest is there.
      active: from :func:`active_values`.
    """
    order = demand_order(loss.program, active)
    released: dict[Call, ReleasedScan] = {each.step: each for each in scans}
    read_by: dict[Call, list[ParamLeaf]] = {}
    readers = first_readers(order, leaves, active)
    for leaf in leaves:
        if leaf.name in readers:
            read_by.setdefault(readers[leaf.name], []).append(leaf)
    most = min(MAX_WAITING, max(map(_size, leaves), default=0) / 2)
    found: list[Stretch] = []
    calls: list[Call] = []
    waiting: list[ParamLeaf] = []
    is_full = False

    def close():
        if calls:
            found.append(Stretch(calls[::-1], waiting[:]))
        calls.clear()
        waiting.clear()

    for call in reversed(order):
        if call in released:
            close()
            is_full = False
            found.append(Stretch([call], read_by.get(call, []), released[call]))
            continue
        if is_full and call.primitive in _HEAVY:
            close()
            is_full = False
        calls.append(call)
        waiting += read_by.get(call, ())
        is_full |= bool(waiting) and sum(map(_size, waiting)) >= most
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

    held: set[Call] = set()
    order: list[Call] = []

    def release(call: Call) -> None:
        held.discard(call)
        for node in call.inputs:
            if node.call in held:
                release(node.call)
        order.append(call)

    for call in program.calls:
        if moves(call):
            held.add(call)
        else:
            release(call)
    for call in program.calls:
        if call in held:
            release(call)
    return order


def _stops(call: Call) -> bool:
    return call.primitive.name == "stop_gradient"


def _is_inexact(node: Node) -> bool:
    return jnp.issubdtype(node.aval.dtype, jnp.inexact)


def _size(leaf: ParamLeaf) -> int:
    return math.prod(leaf.gradient.shape)
