"""Which parameters are updated inside a backward loop, and why the others are not."""

import dataclasses
import math
from collections.abc import Mapping

import jax.numpy as jnp
import optax

from lowbit_optax._jaxprs.nodes import Node
from lowbit_optax._jaxprs.program import LossProgram, Scan, ScanCall
from lowbit_optax._step import trees
from lowbit_optax.release.backward import OperandRoles
from lowbit_optax.release.layer_analysis import WaitsForWholeGradient, analyse_layers
from lowbit_optax.release.traced_loss import ParamLeaf, TracedLoss

MIN_LAYER_SIZE = 4096
"""Layers with fewer elements are updated after the loop, all at once."""

MAX_STACK_SIZE = 2**32
"""Larger stacks are updated after the loop: their random bits have longer indices."""


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
          differentiated: the values that depend on parameters that are updated after
            the loops.
        """
        scan, inputs, outputs = self.scan, self.step.inputs, self.step.outputs
        arrays = {value for leaf in self.leaves for value in leaf.array_values}
        gradient_values = [leaf.gradient_value for leaf in self.leaves]
        first_x = scan.constants + scan.carry

        def needs_cotangent(n: int, value: Node) -> bool:
            if value in arrays or value in gradient_values:
                return False
            if not _is_inexact(value.aval):
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
                if n >= scan.carry and program.uses[v] and _is_inexact(v.aval)
            ),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class ReleasePlan:
    """How the parameters of a traced loss are updated.

    Args:
      scans: with the leaves that are updated in their loops.
      state_stacks: by path of such a leaf, the numbers of the optimizer state's leaves
        that are stacks of one layer for each of its layers.
      reasons: by path of the other leaves, why they are updated after the loops.
    """

    scans: list[ReleasedScan]
    state_stacks: Mapping[str, tuple[int, ...]]
    reasons: Mapping[str, str]


def plan_release(
    loss: TracedLoss, tx: optax.GradientTransformation, opt_state
) -> ReleasePlan:
    """Find the parameters that can be updated inside the backward pass.

    Raises:
      ValueError: if ``tx`` needs the gradients of several leaves at once, and one of
        them is scanned over.
    """
    scans, reasons = {}, {}
    for leaf in loss.leaves:
        try:
            scans[leaf.name] = _scan_over(loss.program, leaf)
        except WaitsForWholeGradient as reason:
            reasons[leaf.name] = str(reason)
    found = analyse_layers(
        tx,
        loss.tree_of(lambda leaf: leaf.gradient),
        trees.abstract(opt_state),
        loss.tree_of(lambda leaf: trees.abstract(leaf.value)),
        list(scans),
    )
    released = []
    for step in loss.program.scans:
        leaves = [x for x in loss.leaves if x.name in found.state_stacks]
        leaves = [x for x in leaves if scans[x.name] is step]
        if leaves:
            released.append(ReleasedScan(step, leaves))
    return ReleasePlan(released, found.state_stacks, {**reasons, **found.reasons})


def _scan_over(program: LossProgram, leaf: ParamLeaf) -> ScanCall:
    """The scan over a leaf, if it is the only one and nothing else reads the leaf."""
    is_real = jnp.issubdtype(leaf.gradient.dtype, jnp.floating)
    if leaf.gradient_value is None or not is_real:
        raise WaitsForWholeGradient(f"it is {leaf.value.dtype}")
    values = {*leaf.array_values, leaf.gradient_value}
    over = [step for step in program.scans if values & set(step.scanned)]
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
    if math.prod(leaf.value.shape) > MAX_STACK_SIZE:
        raise WaitsForWholeGradient("it has more than 2^32 elements")
    return over[0]


def _is_inexact(aval) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)
