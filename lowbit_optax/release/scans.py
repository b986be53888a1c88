"""The scans over parameters, and which parameters could be updated in their loops."""

import dataclasses
import math

import jax.numpy as jnp

from lowbit_optax._jaxprs.graph import Node
from lowbit_optax._jaxprs.program import LossProgram, Scan, ScanCall
from lowbit_optax._numerics.random_bits import COUNTERS
from lowbit_optax.release.backward import OperandRoles
from lowbit_optax.release.same_layers import WaitsForWholeGradient
from lowbit_optax.release.traced_loss import ParamLeaf

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


def _is_inexact(aval) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)
