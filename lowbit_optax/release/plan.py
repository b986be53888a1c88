"""When each parameter is updated in the backward pass, and why not before.

The loss is divided into stretches of calls. At the beginning of a stretch the backward
pass has the whole gradients of the parameters that the stretch reads first, and so they
are updated there:

    stretch 1        stretch 2         stretch 3
    x @ w1, tanh  |  x @ w2, tanh  |   x @ w3, tanh, mean
                  <- update w2     <-  update w3       <- cotangent of the loss

A scan is a stretch of its own if its loop can update the parameters that it runs over.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.graph import Call, Node
from lowbit_optax._jaxprs.program import LossProgram, ScanCall
from lowbit_optax._numerics.random_bits import COUNTERS
from lowbit_optax._step.stepper import stepper_of
from lowbit_optax.loss_scaling.transformation import LossScaled, LossScaleState
from lowbit_optax.release.parts import Part, Parts, found_or_waiting
from lowbit_optax.release.step_values import WaitsForWholeGradient
from lowbit_optax.release.traced_loss import ParamLeaf, TracedLoss

MAX_WAITING = 2**22
"""Elements of the gradients that wait for each other, to be used in fewer kernels."""

MIN_LAYER_SIZE = 4096
"""Layers and leaves with fewer elements are updated after the backward pass, all at
once."""

_NO_SCAN = "no scan runs over it"

PRODUCTS = {
    p.conv_general_dilated_p.name: "convolution",
    p.dot_general_p.name: "matrix product",
}
OPAQUE = {
    p.cond_p.name: "cond",
    p.custom_vjp_call_p.name: "custom_vjp",
    p.remat_p.name: "jax.checkpoint",
    "call_hi_primitive": "jax.checkpoint",  # what JAX makes of both from 0.12 on
    p.scan_p.name: "scan",
    p.while_p.name: "while",
}
_WORDS = PRODUCTS | OPAQUE | {p.convert_element_type_p.name: "cast"}
"""What users call primitives."""


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """Consecutive calls.

    Args:
      calls: in order; only one if it is a released scan.
      part: the leaves that are updated where the stretch begins, or in its loop.
      in_loop: whether it is a released scan.
    """

    calls: Sequence[Call]
    part: Part | None = None
    in_loop: bool = False

    @property
    def leaves(self) -> Sequence[ParamLeaf]:
        """The leaves that are updated."""
        return self.part.leaves if self.part else ()


@dataclasses.dataclass(frozen=True, eq=False)
class ReleasePlan:
    """How the parameters of a traced loss are updated.

    Args:
      stretches: of the loss. After a product, or an operation that is not read, one
        array goes on, and no intermediate results of a normalisation: they begin there.
      parts: of the optimizer.
      last: what is updated after the backward pass: the other leaves, or all of them
        if a step on these alone would be another one.
      active: the values of the loss that have cotangents.
      reports: by path, when a leaf is updated, and why.
    """

    stretches: Sequence[Stretch]
    parts: Parts
    last: Part
    active: set[Node]
    reports: Mapping[str, str]

    @property
    def stack_numbers(self) -> frozenset[int]:
        """Numbers of the state's leaves that are updated in loops."""
        stacks = self.parts.state_stacks.values()
        return frozenset().union(*stacks)


def loss_scaled(tx: optax.GradientTransformation) -> LossScaled | None:
    """The configuration of ``with_loss_scale``, if a transformation is made by it."""
    stepper = stepper_of(tx)
    return stepper if isinstance(stepper, LossScaled) else None


def without_scale(tx: optax.GradientTransformation, opt_state):
    """A transformation and its state, taken out of the loss scale around them.

    Raises:
      TypeError: if the state is that of another transformation.
      ValueError: if a loss scale is inside another transformation.
    """
    scaled = loss_scaled(tx)
    if scaled is not None:
        scaled.check_state(opt_state)
        tx, opt_state = scaled.inner, opt_state.inner_state
    is_scale = lambda x: isinstance(x, LossScaleState)
    for path, leaf in jax.tree.leaves_with_path(opt_state, is_leaf=is_scale):
        if is_scale(leaf):
            raise ValueError(
                "release: there is a loss scale inside another transformation, at "
                f"state{jax.tree_util.keystr(path)}; accepted is with_loss_scale "
                "around the whole optimizer"
            )
    return tx, opt_state


def plan_release(
    loss: TracedLoss, tx: optax.GradientTransformation, opt_state
) -> ReleasePlan:
    """Find when each parameter can be updated.

    Raises:
      ValueError: if ``tx`` needs the gradients of several leaves at once, and one of
        them is scanned over.
    """
    over, reasons = found_or_waiting(
        lambda leaf: _scan_over(loss.program, leaf), loss.leaves
    )
    parts = Parts(*without_scale(tx, opt_state), loss, over)
    reasons |= parts.reasons
    loops: dict[Call, list[ParamLeaf]] = {}
    for leaf in parts.state_stacks:
        loops.setdefault(over[leaf], []).append(leaf)
    active = _active_values(loss)
    others = [leaf for leaf in loss.leaves if leaf not in parts.state_stacks]
    early, why_last = found_or_waiting(lambda leaf: _early(leaf, active), others)
    order = _demand_order(loss.program, active)
    readers = _first_readers(order, list(early), active)
    stretches: list[Stretch] = []
    for calls, waiting in _divided(order, loops, readers):
        part, loop = None, loops.get(calls[0])
        try:
            part = parts.part(waiting) if waiting else None
        except WaitsForWholeGradient as reason:
            why_last |= dict.fromkeys(waiting, str(reason))
        if loop:
            # Leaves that a loop reads, but that it does not update, are updated before.
            stretches += [Stretch([], part)] if part else []
            stretches.append(Stretch(calls, parts.in_loop(loop), True))
        else:
            stretches.append(Stretch(calls, part))
    last = _last(loss, stretches, parts)
    late = why_last | {x: why for x, why in reasons.items() if why != _NO_SCAN}
    reports = _reports(stretches, readers)
    reports |= {x: f"after the backward pass: {why}" for x, why in late.items()}
    names = {leaf.name: reports[leaf] for leaf in loss.leaves}
    return ReleasePlan(stretches, parts, last, active, names)


def _early(leaf: ParamLeaf, active: set[Node]) -> ParamLeaf:
    """The leaf, if it may be updated within the backward pass."""
    if not jnp.issubdtype(leaf.gradient.dtype, jnp.floating):
        raise WaitsForWholeGradient(f"it is {leaf.gradient.dtype}")
    if leaf.size < MIN_LAYER_SIZE:
        raise WaitsForWholeGradient(f"it has fewer than {MIN_LAYER_SIZE} elements")
    if leaf.gradient_value not in active:
        raise WaitsForWholeGradient("the loss does not depend on it")
    return leaf


def _last(loss: TracedLoss, stretches: Sequence[Stretch], parts: Parts) -> Part:
    """The part that is updated after the backward pass."""
    found = [each.part for each in stretches if each.part]
    updated = {leaf for part in found for leaf in part.leaves}
    if not updated:
        return parts.whole
    try:
        part = parts.part([x for x in loss.leaves if x not in updated], is_last=True)
    except WaitsForWholeGradient:
        return parts.whole
    count = sum(len(each.exclusive) for each in found) + len(part.numbers)
    return part if count == len(parts.whole.numbers) else parts.whole


def _reports(stretches: Sequence[Stretch], readers: Mapping[ParamLeaf, Call]):
    """When a leaf is updated before the end, and why."""
    updates = [x.part for x in reversed(stretches) if x.part and not x.in_loop]
    loops = [x.part.leaves for x in stretches if x.part and x.in_loop]
    found = {leaf: "in the loop" for leaves in loops for leaf in leaves}
    for number, part in enumerate(updates, 1):
        others = len(part.leaves) - 1
        beside = f", with {others} other{'s' * (others > 1)}" if others else ""
        for leaf in part.leaves:
            name = readers[leaf].primitive.name
            found[leaf] = (
                f"in the backward pass, update {number} of {len(updates)}{beside}: its "
                "gradient is whole once the pass is behind the "
                f"{_WORDS.get(name, name)} that reads it first"
            )
    return found


def _active_values(loss: TracedLoss) -> set[Node]:
    """The values that have a cotangent: made of parameters, and the loss needs them."""
    program = loss.program
    made = {x.gradient_value for x in loss.leaves if x.gradient_value is not None}
    calls = [x for x in program.calls if x.primitive.name != "stop_gradient"]
    for call in calls:
        if not made.isdisjoint(call.inputs):
            made.update(x for x in call.outputs if is_inexact(x))
    needed = {program.outputs[0]}
    for call in reversed(calls):
        if not needed.isdisjoint(call.outputs):
            needed.update(call.inputs)
    return made & needed


def _first_readers(
    calls: Sequence[Call], leaves: Sequence[ParamLeaf], active: set[Node]
) -> dict[ParamLeaf, Call]:
    """The first of the calls through which each leaf gets a cotangent."""
    found: dict[Node, Call] = {}
    for call in calls:
        if not active.isdisjoint(call.outputs):
            for value in call.inputs:
                found.setdefault(value, call)
    return {x: found[x.gradient_value] for x in leaves if x.gradient_value in found}


def _divided(
    order: Sequence[Call],
    loops: Mapping[Call, Sequence[ParamLeaf]],
    readers: Mapping[ParamLeaf, Call],
) -> list[tuple[list[Call], list[ParamLeaf]]]:
    """The calls of each stretch, and the leaves that are updated where it begins.

    Small leaves wait for others, until half the size of the largest is there.
    """
    read_by: dict[Call, list[ParamLeaf]] = {}
    for leaf, call in readers.items():
        read_by.setdefault(call, []).append(leaf)
    enough = min(MAX_WAITING, max((leaf.size for leaf in readers), default=0) / 2)
    found: list[tuple[list[Call], list[ParamLeaf]]] = [([], [])]
    for call in reversed(order):
        calls, waiting = found[-1]
        is_full = waiting and sum(leaf.size for leaf in waiting) >= enough
        is_end = call in loops or (calls and calls[-1] in loops)
        if is_end or (is_full and call.primitive.name in PRODUCTS | OPAQUE):
            found.append(([], []))
        found[-1][0].append(call)
        found[-1][1].extend(read_by.get(call, ()))
    return [(calls[::-1], waiting) for calls, waiting in reversed(found) if calls]


def _demand_order(program: LossProgram, active: set[Node]) -> list[Call]:
    """The calls in an order in which parameters are cast when they are first needed.

    A cast of all parameters at the beginning of a loss would make the gradients of all
    wait for its end. A call moves only if it is the only one that reads its operands,
    so that cotangents are summed in the order in which JAX sums them.
    """

    def moves(call: Call) -> bool:
        read = [node for node in call.inputs if node.constant is None]
        if not (read and call.outputs):
            return False
        return program.of_parameters.issuperset((*read, *call.outputs)) and all(
            node not in active or program.uses[node] == 1 for node in read
        )

    needed: dict[Node, float] = {}
    place: dict[Call, float] = {}
    for call in reversed(program.calls):
        reads = [needed.get(node, math.inf) for node in call.outputs]
        place[call] = min(reads) if moves(call) else call.number
        for node in call.inputs:
            needed[node] = min(place[call], needed.get(node, math.inf))
    return sorted(program.calls, key=lambda call: (place[call], call.number))


def _scan_over(program: LossProgram, leaf: ParamLeaf) -> ScanCall:
    """The scan over a leaf, if it is the only one and nothing else reads the leaf.

    Raises:
      WaitsForWholeGradient: if it is not.
    """
    values = {*leaf.array_values, leaf.gradient_value}
    over = [call for call in program.scans if not values.isdisjoint(call.scanned)]
    reason = _why_not_in(over, program, leaf, values)
    if reason:
        raise WaitsForWholeGradient(reason)
    return over[0]


def _why_not_in(over: list[ScanCall], program: LossProgram, leaf, values) -> str:
    size = math.prod(leaf.value.shape[1:])
    if not jnp.issubdtype(leaf.gradient.dtype, jnp.floating):
        return f"it is {leaf.value.dtype}"
    if not over and _is_scanned(program, values):
        return "it is changed before a scan runs over it"
    if not over:
        return _NO_SCAN
    if len(over) > 1:
        return "several scans run over it"
    if any(program.uses[value] != 1 for value in values):
        users = {user for value in values for user in program.users(value)} - {"scan"}
        others = ", ".join(sorted(users)) or "the scan, in another way"
        return f"besides a scan it is used by {others}"
    if not values <= set(over[0].scanned):
        return "only a part of it is scanned over"
    if size < MIN_LAYER_SIZE:
        return f"its layers have fewer than {MIN_LAYER_SIZE} elements"
    return "its layers have more than 2^32 elements" if size > COUNTERS else ""


def _is_scanned(program: LossProgram, values: set[Node]) -> bool:
    """Whether a scan runs over what is made of these values alone, such as a cast."""
    made = set(values)
    for call in program.calls:
        inputs = [node for node in call.inputs if node.constant is None]
        if inputs and made.issuperset(inputs):
            made.update(call.outputs)
    return any(not made.isdisjoint(call.scanned) for call in program.scans)


def is_inexact(node: Node) -> bool:
    """Whether it has a derivative: it is real or complex."""
    return jnp.issubdtype(node.aval.dtype, jnp.inexact)
