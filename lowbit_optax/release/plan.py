"""The plan of when the backward pass updates each parameter.

The loss is divided into stretches of calls. When the backward pass reaches the
beginning of a stretch, the gradients of all parameters that this stretch is the first
to read are complete, and the parameters are updated:

    stretch 1        stretch 2         stretch 3
    x @ w1, tanh  |  x @ w2, tanh  |   x @ w3, tanh, mean
  <- update w1   <- update w2     <-  update w3       <- cotangent of the loss

All other parameters are updated last, in an empty stretch at the front of the list. A
scan is a stretch of its own if its loop can update the parameters that it loops over.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.graph import Call, Node
from lowbit_optax._jaxprs.program import LossProgram, ScanCall
from lowbit_optax._numerics.random_bits import COUNTERS
from lowbit_optax._step.stepper import check_state, stepper_of
from lowbit_optax.loss_scaling.transformation import LossScaled, LossScaleState
from lowbit_optax.release.parts import Part, Parts
from lowbit_optax.release.traced_loss import ParamLeaf, TracedLoss

MAX_WAITING = 2**22
"""Leaves are collected into a group until they have this number of elements."""

MIN_LAYER_SIZE = 4096
"""A leaf with fewer elements is updated after the backward pass. A stack whose layers
have fewer elements is updated as a whole instead of in the loop of its scan."""

_PRODUCTS = {p.conv_general_dilated_p.name, p.dot_general_p.name}
_OPAQUE = {
    x.name for x in (p.cond_p, p.custom_vjp_call_p, p.remat_p, p.scan_p, p.while_p)
}


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """Consecutive calls of the loss, and the leaves that are updated with them.

    Args:
      calls: the calls, in order.
      part: the leaves that are updated at the beginning of the stretch, or in its loop.
    """

    calls: Sequence[Call]
    part: Part | None


@dataclasses.dataclass(frozen=True, eq=False)
class ReleasePlan:
    """How the parameters of a traced loss are updated.

    Args:
      stretches: the stretches of the loss. The first one has no calls; its leaves are
        updated last.
      parts: the parts that the optimizer can update separately.
      active: the values of the loss that have cotangents.
      reports: for each path, when the leaf is updated, and why.
    """

    stretches: Sequence[Stretch]
    parts: Parts
    active: set[Node]
    reports: Mapping[str, str]

    @property
    def updates(self) -> list[Part]:
        """The parts, each of which is updated at once; the last one first."""
        return [stretch.part for stretch in self.stretches if stretch.part]


def loss_scaled(tx) -> LossScaled | None:
    """Return the configuration of ``with_loss_scale``; None for any other ``tx``."""
    stepper = stepper_of(tx)
    return stepper if isinstance(stepper, LossScaled) else None


def without_scale(tx, opt_state):
    """Return a transformation and its state without the loss scale around them.

    Raises:
      TypeError: if the state belongs to another transformation.
      ValueError: if a loss scale is inside another transformation.
    """
    scaled = loss_scaled(tx)
    if scaled is not None:
        check_state("with_loss_scale", opt_state, LossScaleState)
        tx, opt_state = scaled.inner, opt_state.inner_state
    is_scale = lambda x: isinstance(x, LossScaleState)
    for path, leaf in jax.tree.leaves_with_path(opt_state, is_leaf=is_scale):
        if is_scale(leaf):
            raise ValueError(
                "release: with_loss_scale must be around the whole optimizer, got one "
                f"inside it, at state{jax.tree_util.keystr(path)}"
            )
    return tx, opt_state


def plan_release(loss: TracedLoss, tx, opt_state) -> ReleasePlan:
    """Decide when each parameter is updated.

    Raises:
      ValueError: if ``tx`` needs the gradients of several leaves at once, and a scan
        runs over one of these leaves.
    """
    program, active = loss.program, _active_values(loss)
    scans = {leaf: _scan_over(program, leaf) for leaf in loss.leaves}
    over = {leaf: x for leaf, x in scans.items() if isinstance(x, ScanCall)}
    parts = Parts(*without_scale(tx, opt_state), loss, over)
    loops: dict[Call, list[ParamLeaf]] = {}
    for leaf in parts.stacks:
        loops.setdefault(over[leaf], []).append(leaf)
    order = _demand_order(program, active)
    active_calls = [x for x in reversed(order) if not active.isdisjoint(x.outputs)]
    first_reader = {node: call for call in active_calls for node in call.inputs}
    late: dict[ParamLeaf, str] = {}
    read_first: dict[Call, list[ParamLeaf]] = {}
    for leaf in (leaf for leaf in loss.leaves if leaf not in parts.stacks):
        if leaf.gradient.size < MIN_LAYER_SIZE:
            late[leaf] = f"it has fewer than {MIN_LAYER_SIZE} elements"
        elif leaf.gradient_value not in first_reader:
            late[leaf] = "the loss does not depend on it"
        else:
            read_first.setdefault(first_reader[leaf.gradient_value], []).append(leaf)
    stretches: list[Stretch] = []
    for calls, waiting in _divided(order, loops, read_first):
        part, loop = parts.part(waiting) if waiting else None, loops.get(calls[0])
        if isinstance(part, str):
            late |= dict.fromkeys(waiting, part)
            part = None
        if loop and part:
            # Leaves that the loop reads but does not update get a stretch before it.
            stretches.append(Stretch([], part))
        stretches.append(Stretch(calls, parts.in_loop(loop) if loop else part))
    found = [x.part for x in stretches if x.part]
    updated = {leaf for part in found for leaf in part.leaves}
    rest = [leaf for leaf in loss.leaves if leaf not in updated]
    taken = {n for part in found for n in part.numbers}
    left = [n for n in range(len(parts.state)) if n not in taken]
    stretches.insert(0, Stretch([], Part(rest, left)))
    reports = _reports(loss.leaves, found, late, scans | parts.reasons)
    return ReleasePlan(stretches, parts, active, reports)


def _reports(leaves, parts: Sequence[Part], late, no_loop) -> dict[str, str]:
    """Return a text for each path: when the leaf is updated.

    Args:
      leaves: the leaves of the parameters.
      parts: the parts that are updated in the backward pass, the last one first.
      late: for some leaves, why they are updated after the backward pass.
      no_loop: for leaves that no loop updates, why not, or "" if no scan reads them.
    """
    updates = [part.leaves for part in reversed(parts) if part.depth is None]
    number = {leaf: n for n, update in enumerate(updates, 1) for leaf in update}

    def report(leaf: ParamLeaf) -> str:
        if leaf in number:
            why = no_loop[leaf] and f"; not in the loop: {no_loop[leaf]}"
            of = f"update {number[leaf]} of {len(updates)}"
            return f"in the backward pass, {of}{why}"
        if leaf in late:
            return f"after the backward pass: {no_loop[leaf] or late[leaf]}"
        return "in the loop"

    return {leaf.name: report(leaf) for leaf in leaves}


def _active_values(loss: TracedLoss) -> set[Node]:
    """Return the values that depend on parameters, and on which the loss depends."""
    program = loss.program
    made = {x.gradient_value for x in loss.leaves if x.gradient_value is not None}
    calls = [x for x in program.calls if x.primitive.name != "stop_gradient"]
    is_inexact = lambda node: jnp.issubdtype(node.aval.dtype, jnp.inexact)
    for call in calls:
        if not made.isdisjoint(call.inputs):
            made.update(x for x in call.outputs if is_inexact(x))
    needed = {program.outputs[0]}
    for call in reversed(calls):
        if not needed.isdisjoint(call.outputs):
            needed.update(call.inputs)
    return made & needed


def _divided(order, loops, read_first) -> list[tuple[list[Call], list[ParamLeaf]]]:
    """Return pairs: a stretch's calls, and the leaves to update at its beginning.

    Leaves are collected until they have half as many elements as the largest leaf, or
    ``MAX_WAITING``. The next stretch then begins at a matrix product, a convolution, or
    a call that contains other operations, such as a scan, because few arrays pass from
    one stretch to the next at these calls.

    Args:
      order: the calls of the loss.
      loops: the scans whose loops update leaves.
      read_first: for each call, the leaves that no earlier call reads.
    """
    size = lambda leaves: [leaf.gradient.size for leaf in leaves]
    largest = max(size(itertools.chain(*read_first.values())), default=0)
    enough = min(MAX_WAITING, largest / 2)
    found: list[tuple[list[Call], list[ParamLeaf]]] = [([], [])]
    for call in reversed(order):
        calls, waiting = found[-1]
        is_full = waiting and sum(size(waiting)) >= enough
        ends = calls and (call in loops or calls[-1] in loops)
        if ends or (is_full and call.primitive.name in _PRODUCTS | _OPAQUE):
            found.append(([], []))
        elif calls and is_opaque(call) != is_opaque(calls[-1]):
            found[-1] = calls, []
            found.append(([], waiting))
        found[-1][0].append(call)
        found[-1][1].extend(read_first.get(call, ()))
    return [(calls[::-1], waiting) for calls, waiting in reversed(found) if calls]


def is_opaque(call: Call) -> bool:
    """Return whether a call contains operations that are not analyzed."""
    return call.primitive.name in _OPAQUE


def _demand_order(program: LossProgram, active: set[Node]) -> list[Call]:
    """Return the calls, reordered so that each parameter is cast when first needed.

    If a loss casts all parameters at its beginning, their gradients are complete only
    at the end of the backward pass. A call moves only if no other call reads its
    operands, so that cotangents are added in the same order as in JAX.
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


def _scan_over(program: LossProgram, leaf: ParamLeaf) -> ScanCall | str:
    """Return the scan over a leaf, or the reason why its loop cannot update the leaf.

    If no scan runs over the leaf, return "".
    """
    values = set(leaf.nodes)
    over = [call for call in program.scans if not values.isdisjoint(call.scanned)]
    size = math.prod(leaf.value.shape[1:])
    if not jnp.issubdtype(leaf.gradient.dtype, jnp.floating):
        return f"its dtype is {leaf.value.dtype}"
    if not over:
        is_changed = _is_scanned(program, values)
        return "it is changed before a scan runs over it" if is_changed else ""
    if len(over) > 1:
        return "several scans run over it"
    if any(program.uses[value] != 1 for value in values):
        users = {user for value in values for user in program.users(value)} - {"scan"}
        others = ", ".join(sorted(users)) or "the scan, in another way"
        return f"besides being scanned over, it is used by {others}"
    if not values <= set(over[0].scanned):
        return "only a part of it is scanned over"
    if size < MIN_LAYER_SIZE:
        return f"its layers have fewer than {MIN_LAYER_SIZE} elements"
    if size > COUNTERS:
        return "its layers have more than 2^32 elements"
    return over[0]


def _is_scanned(program: LossProgram, values: set[Node]) -> bool:
    """Return whether a scan runs over arrays computed from ``values``, like a cast."""
    made = set(values)
    for call in program.calls:
        inputs = [node for node in call.inputs if node.constant is None]
        if inputs and made.issuperset(inputs):
            made.update(call.outputs)
    return any(not made.isdisjoint(call.scanned) for call in program.scans)
