"""When each parameter is updated in the backward pass, and why not before."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import optax

from lowbit_optax._jaxprs.graph import Node
from lowbit_optax._jaxprs.program import ScanCall
from lowbit_optax._step import trees
from lowbit_optax.release.layer_analysis import analyse_layers
from lowbit_optax.release.parts import Part, Parts
from lowbit_optax.release.step_graph import StepGraph, WaitsForWholeGradient
from lowbit_optax.release.stretches import (
    MIN_LAYER_SIZE,
    ReleasedScan,
    Stretch,
    active_values,
    divide,
    first_readers,
    scan_over,
    scans_over,
)
from lowbit_optax.release.traced_loss import ParamLeaf, TracedLoss

AFTER = "after the backward pass"

_IN_WORDS = {
    "conv_general_dilated": "convolution",
    "convert_element_type": "cast",
    "dot_general": "matrix product",
    "remat": "jax.checkpoint",
}
"""What users call primitives."""


@dataclasses.dataclass(frozen=True, eq=False)
class ReleasePlan:
    """How the parameters of a traced loss are updated.

    Args:
      stretches: of the loss, and the leaves that are updated after each.
      parts: of each stretch that has such leaves, these as a part of the optimizer.
      last: the leaves that are updated after the backward pass; None if a step on
        these alone would be another one than that on all leaves.
      active: the values of the loss that have cotangents.
      state_stacks: by path of a leaf that is updated in a loop, the numbers of the
        optimizer state's leaves that are stacks of one layer for each of its layers.
      reports: by path, when a leaf is updated, and why.
      whole_step: gives the graph of a step on all leaves.
    """

    stretches: list[Stretch]
    parts: Mapping[Stretch, Part]
    last: Part | None
    active: set[Node]
    state_stacks: Mapping[str, tuple[int, ...]]
    reports: Mapping[str, str]
    whole_step: Callable[[], StepGraph]

    @property
    def stack_numbers(self) -> frozenset[int]:
        """Numbers of the state's leaves that are updated in loops."""
        return frozenset(n for some in self.state_stacks.values() for n in some)

    def of_no_gradient(self) -> frozenset[int]:
        """Numbers of the state's leaves whose new values need no gradient: a count."""
        step = self.whole_step()
        gradients = list(step.gradients.values())
        return frozenset(
            n for n, x in enumerate(step.new_state) if not step.depends_on(x, gradients)
        )


def plan_release(
    loss: TracedLoss, tx: optax.GradientTransformation, opt_state
) -> ReleasePlan:
    """Find when each parameter can be updated.

    Raises:
      ValueError: if ``tx`` needs the gradients of several leaves at once, and one of
        them is scanned over.
    """
    grads, params, state = loss.gradients, loss.params, trees.abstract(opt_state)
    whole_step = functools.cache(lambda: StepGraph(tx, grads, state, params))
    over, reasons = _scans_over_leaves(loss)
    layers = analyse_layers(tx, grads, state, params, list(over), whole_step)
    reasons |= layers.reasons
    scans = _released_scans(loss, over, layers.state_stacks)
    active = active_values(loss)
    others = [leaf for leaf in loss.leaves if leaf.name not in layers.state_stacks]
    early, why_last = _early(others, active)
    stretches = divide(loss, scans, early, active)
    parts, last = {}, None
    if layers.state_stacks or any(stretch.leaves for stretch in stretches):
        finder = _PartFinder(Parts(tx, opt_state, loss), whole_step())
        stretches = [finder.checked(stretch) for stretch in stretches]
        parts, why_last = finder.parts, why_last | finder.reasons
        updated = {leaf.name for each in parts for leaf in each.leaves}
        rest = [leaf.name for leaf in others if leaf.name not in updated]
        last = finder.last(rest, layers.state_stacks)
    reports = _reports(loss, stretches, layers.state_stacks, reasons, why_last, active)
    return ReleasePlan(
        stretches, parts, last, active, layers.state_stacks, reports, whole_step
    )


class _PartFinder:
    """Keeps of each stretch the leaves that can be updated after it.

    Attributes:
      parts: of the stretches whose leaves can.
      reasons: by path of the others, why not.
    """

    def __init__(self, parts: Parts, whole: StepGraph):
        self._all, self._whole = parts, whole
        self.parts: dict[Stretch, Part] = {}
        self.reasons: dict[str, str] = {}

    def checked(self, stretch: Stretch) -> Stretch:
        """The stretch without leaves that must wait."""
        leaves = list(stretch.leaves)
        try:
            part = self._all.part([leaf.name for leaf in leaves])
            self._all.check(part, self._whole)
        except WaitsForWholeGradient as reason:
            self.reasons |= {leaf.name: str(reason) for leaf in leaves}
            return dataclasses.replace(stretch, leaves=[])
        if leaves:
            self.parts[stretch] = part
        return stretch

    def last(self, names: Sequence[str], state_stacks: Mapping) -> Part | None:
        """The part of all leaves that are updated after the backward pass."""
        try:
            part = self._all.part(names)
            self._all.check(part, self._whole, is_last=True)
        except WaitsForWholeGradient:
            return None
        held = [n for each in self.parts.values() for n in each.own]
        held += [n for numbers in state_stacks.values() for n in numbers]
        is_all = len(held) + len(part.numbers) == len(self._whole.state)
        return part if is_all else None


def _scans_over_leaves(
    loss: TracedLoss,
) -> tuple[dict[str, ScanCall], dict[str, str]]:
    """By path, the scan over a leaf, or the reason why its loop cannot update it."""
    scans, reasons = {}, {}
    for leaf in loss.leaves:
        try:
            scans[leaf.name] = scan_over(loss.program, leaf)
        except WaitsForWholeGradient as reason:
            reasons[leaf.name] = str(reason)
    return scans, reasons


def _released_scans(
    loss: TracedLoss, over: Mapping[str, ScanCall], state_stacks: Mapping
) -> list[ReleasedScan]:
    found = []
    for step in loss.program.scans:
        leaves = [x for x in loss.leaves if x.name in state_stacks]
        leaves = [x for x in leaves if over[x.name] is step]
        if leaves:
            found.append(ReleasedScan(step, leaves))
    return found


def _early(
    leaves: Sequence[ParamLeaf], active: set[Node]
) -> tuple[list[ParamLeaf], dict[str, str]]:
    """Those that may be updated within the backward pass; why not, by path."""
    found, reasons = [], {}
    for leaf in leaves:
        if not jnp.issubdtype(leaf.gradient.dtype, jnp.floating):
            reasons[leaf.name] = f"it is {leaf.gradient.dtype}"
        elif math.prod(leaf.gradient.shape) < MIN_LAYER_SIZE:
            reasons[leaf.name] = f"it has fewer than {MIN_LAYER_SIZE} elements"
        elif leaf.gradient_value in active:
            found.append(leaf)
        else:
            reasons[leaf.name] = "the loss does not depend on it"
    return found, reasons


def _reports(loss, stretches, state_stacks, not_in_loop, not_before, active):
    """By path, when a leaf is updated and why."""
    readers = first_readers(
        [call for stretch in stretches for call in stretch.calls], loss.leaves, active
    )
    updates = [stretch for stretch in reversed(stretches) if stretch.leaves]
    found = {name: "in the loop" for name in state_stacks}
    for number, stretch in enumerate(updates, 1):
        when = f"in the backward pass, update {number} of {len(updates)}"
        others = len(stretch.leaves) - 1
        if others:
            when += f", with {others} other{'s' * (others > 1)}"
        for leaf in stretch.leaves:
            reader = readers[leaf.name].primitive.name
            reader = _IN_WORDS.get(reader, reader)
            found[leaf.name] = (
                f"{when}: its gradient is whole once the pass is behind the {reader} "
                "that reads it first"
            )
    for leaf in loss.leaves:
        name = leaf.name
        if scans_over(loss.program, leaf) and name not in state_stacks:
            found[name] = f"{AFTER}: {not_in_loop[name]}"
        elif name not in found:
            found[name] = f"{AFTER}: {not_before.get(name) or not_in_loop[name]}"
    return found
