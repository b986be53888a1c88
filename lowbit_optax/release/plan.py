"""When each parameter is updated in the backward pass, and why not before."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.graph import Call, Node
from lowbit_optax._step.stepper import stepper_of
from lowbit_optax.loss_scaling.transformation import LossScaled, LossScaleState
from lowbit_optax.release.parts import (
    Part,
    Parts,
    StateStacks,
    found_or_waiting,
)
from lowbit_optax.release.step_graph import WaitsForWholeGradient
from lowbit_optax.release.stretches import (
    MIN_LAYER_SIZE,
    NO_SCAN,
    Stretch,
    active_values,
    divide,
    first_readers,
    scan_over,
)
from lowbit_optax.release.traced_loss import ParamLeaf, TracedLoss

AFTER = "after the backward pass"

_IN_WORDS = {
    p.conv_general_dilated_p: "convolution",
    p.convert_element_type_p: "cast",
    p.dot_general_p: "matrix product",
    p.remat_p: "jax.checkpoint",
}
"""What users call primitives."""


@dataclasses.dataclass(frozen=True, eq=False)
class ReleasePlan:
    """How the parameters of a traced loss are updated.

    Args:
      stretches: of the loss, and the leaves that are updated after each.
      parts: of the optimizer.
      last: what is updated after the backward pass: the other leaves, or all of them
        if a step on these alone would be another one.
      active: the values of the loss that have cotangents.
      state_stacks: of the leaves that are updated in loops.
      reports: by path, when a leaf is updated, and why.
    """

    stretches: Sequence[Stretch]
    parts: Parts
    last: Part
    active: set[Node]
    state_stacks: StateStacks
    reports: Mapping[str, str]

    @property
    def stack_numbers(self) -> frozenset[int]:
        """Numbers of the state's leaves that are updated in loops."""
        return frozenset(n for some in self.state_stacks.values() for n in some)

    def of_no_gradient(self) -> frozenset[int]:
        """Numbers of the state's leaves whose new values need no gradient: a count."""
        step = self.parts.whole_step
        gradients = list(step.gradients.values())
        return frozenset(
            n for n, x in enumerate(step.new_state) if not step.depends_on(x, gradients)
        )


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
    parts = Parts(*without_scale(tx, opt_state), loss)
    leaves = {leaf.name: leaf for leaf in loss.leaves}
    over, reasons = found_or_waiting(
        lambda name: scan_over(loss.program, leaves[name]), leaves
    )
    state_stacks, why_not = parts.updated_by_layer(over)
    reasons |= why_not
    in_loops: dict[Call, list[ParamLeaf]] = {}
    for name in state_stacks:
        in_loops.setdefault(over[name], []).append(leaves[name])
    active = active_values(loss)
    early, why_last = found_or_waiting(
        lambda name: _early(leaves[name], active),
        [name for name in leaves if name not in state_stacks],
    )
    stretches = divide(loss, in_loops, list(early.values()), active)
    found, waiting = found_or_waiting(
        lambda stretch: parts.part(stretch.leaves),
        [stretch for stretch in stretches if stretch.leaves],
    )
    for stretch, reason in waiting.items():
        why_last |= {leaf.name: reason for leaf in stretch.leaves}
    stretches = [each.with_part(found.get(each)) for each in stretches]
    last = parts.whole
    if state_stacks or found or waiting:
        last = _last(loss, stretches, state_stacks, parts)
    reports = _reports(loss, stretches, state_stacks, reasons, why_last, active)
    return ReleasePlan(stretches, parts, last, active, state_stacks, reports)


def _early(leaf: ParamLeaf, active: set[Node]) -> ParamLeaf:
    """The leaf, if it may be updated within the backward pass."""
    if not jnp.issubdtype(leaf.gradient.dtype, jnp.floating):
        raise WaitsForWholeGradient(f"it is {leaf.gradient.dtype}")
    if leaf.size < MIN_LAYER_SIZE:
        raise WaitsForWholeGradient(f"it has fewer than {MIN_LAYER_SIZE} elements")
    if leaf.gradient_value not in active:
        raise WaitsForWholeGradient("the loss does not depend on it")
    return leaf


def _last(
    loss: TracedLoss,
    stretches: Sequence[Stretch],
    state_stacks: StateStacks,
    parts: Parts,
) -> Part:
    """The part that is updated after the backward pass."""
    updated = {leaf.name for stretch in stretches for leaf in stretch.leaves}
    updated |= state_stacks.keys()
    try:
        rest = [leaf for leaf in loss.leaves if leaf.name not in updated]
        part = parts.part(rest, is_last=True)
    except WaitsForWholeGradient:
        return parts.whole
    numbers = [n for each in stretches if each.part for n in each.part.exclusive]
    numbers += [n for each in state_stacks.values() for n in each]
    is_all = len(numbers) + len(part.numbers) == len(parts.whole.numbers)
    return part if is_all else parts.whole


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
            primitive = readers[leaf.name].primitive
            reader = _IN_WORDS.get(primitive, primitive.name)
            found[leaf.name] = (
                f"{when}: its gradient is whole once the pass is behind the {reader} "
                "that reads it first"
            )
    for name, reason in not_in_loop.items():
        if reason != NO_SCAN:
            found[name] = f"{AFTER}: {reason}"
        elif name not in found:
            found[name] = f"{AFTER}: {not_before[name]}"
    return {leaf.name: found[leaf.name] for leaf in loss.leaves}
