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
from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.graph import Call, Node
from lowbit_optax._jaxprs.program import LossProgram, Scan, ScanCall
from lowbit_optax._numerics.random_bits import COUNTERS
from lowbit_optax.release.backward import OperandRoles
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


@dataclasses.dataclass(frozen=True, eq=False)
class ReleasedScan:
    """A scan in whose backward loop parameters are updated.

    Args:
      step: the scan, in the loss's program.
      leaves: the parameters that are updated.
    """

    step: ScanCall
    leaves: list[ParamLeaf]

    @property
    def scan(self) -> Scan:
        """The scan over the layers."""
        assert self.step.scan is not None
        return self.step.scan

    def operand(self, value: Node | None) -> int:
        """The number among the scan's operands of a value of the program."""
        assert value is not None, "a released leaf has a gradient"
        return self.step.inputs.index(value)

    def roles(self, program: LossProgram, differentiated: set[Node]) -> OperandRoles:
        """What the scan's operands and results are in the backward pass.

        Args:
          program: the loss.
          differentiated: the values that have cotangents.
        """
        scan, inputs, outputs = self.scan, self.step.inputs, self.step.outputs
        arrays = {value for leaf in self.leaves for value in leaf.array_values}
        gradient_values = [leaf.gradient_value for leaf in self.leaves]
        first_x = scan.constants + scan.carry

        def needs_cotangent(n: int, value: Node) -> bool:
            if value in arrays or value in gradient_values:
                return False
            if not _is_inexact(value):
                return False
            # From the second layer on, the carry depends on the released parameters.
            return scan.constants <= n < first_x or value in differentiated

        return OperandRoles(
            released=tuple(n for n, v in enumerate(inputs) if v in arrays),
            gradients=tuple(map(self.operand, gradient_values)),
            unread=tuple(self.operand(v) for v in gradient_values if v not in arrays),
            cotangents=tuple(n for n, v in enumerate(inputs) if needs_cotangent(n, v)),
            used_ys=tuple(
                n
                for n, v in enumerate(outputs)
                if n >= scan.carry and program.uses[v] and _is_inexact(v)
            ),
        )


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


def scan_over(program: LossProgram, leaf: ParamLeaf) -> ScanCall:
    """The scan over a leaf, if it is the only one and nothing else reads the leaf.

    Raises:
      WaitsForWholeGradient: if it is not.
    """
    is_real = jnp.issubdtype(leaf.gradient.dtype, jnp.floating)
    if leaf.gradient_value is None or not is_real:
        raise WaitsForWholeGradient(f"it is {leaf.value.dtype}")
    values = {*leaf.array_values, leaf.gradient_value}
    over = [step for step in program.scans if values & set(step.scanned)]
    if not over and scans_over(program, leaf):
        raise WaitsForWholeGradient("it is changed before a scan runs over it")
    if not over:
        raise WaitsForWholeGradient("no scan runs over it")
    if len(over) > 1:
        raise WaitsForWholeGradient("several scans run over it")
    if any(program.uses[value] != 1 for value in values):
        users = {user for value in values for user in program.users(value)}
        others = ", ".join(sorted(users - {"scan"})) or "the scan, in another way"
        raise WaitsForWholeGradient(f"besides a scan it is used by {others}")
    if not values <= set(over[0].scanned):
        raise WaitsForWholeGradient("only a part of it is scanned over")
    if math.prod(leaf.value.shape[1:]) < MIN_LAYER_SIZE:
        raise WaitsForWholeGradient(
            f"its layers have fewer than {MIN_LAYER_SIZE} elements"
        )
    if math.prod(leaf.value.shape[1:]) > COUNTERS:
        raise WaitsForWholeGradient("its layers have more than 2^32 elements")
    return over[0]


def scans_over(program: LossProgram, leaf: ParamLeaf) -> list[ScanCall]:
    """The scans over a leaf, or over what is made of it alone, such as a cast."""
    made = {*leaf.array_values, leaf.gradient_value}
    for call in program.calls:
        inputs = [node for node in call.inputs if node.constant is None]
        if inputs and made.issuperset(inputs):
            made.update(call.outputs)
    return [step for step in program.scans if made & set(step.scanned)]


def _stops(call: Call) -> bool:
    return call.primitive.name == "stop_gradient"


def _is_inexact(node: Node) -> bool:
    return jnp.issubdtype(node.aval.dtype, jnp.inexact)


def _size(leaf: ParamLeaf) -> int:
    return math.prod(leaf.gradient.shape)
