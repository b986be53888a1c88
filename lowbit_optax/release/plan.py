"""Which parameters are updated inside a backward loop, and why the others are not."""

import dataclasses
import math
from collections.abc import Mapping

import jax.numpy as jnp
import optax

from lowbit_optax._jaxprs.nodes import Node
from lowbit_optax._jaxprs.program import LossProgram, ScanCall
from lowbit_optax._step import trees
from lowbit_optax.release import layer_analysis
from lowbit_optax.release.backward import Roles
from lowbit_optax.release.layer_analysis import Whole
from lowbit_optax.release.traced_loss import Leaf, Traced

SMALLEST = 4096
"""Layers with fewer elements are updated after the loop, all at once."""

LARGEST = 2**32
"""Stacks with more elements are too: random numbers in them have longer indices."""


@dataclasses.dataclass(frozen=True, eq=False)
class Released:
    """A scan in whose backward loop parameters are updated.

    Args:
      step: the scan.
      leaves: of the parameters, its own.
    """

    step: ScanCall
    leaves: list[Leaf]

    def operand(self, value: Node) -> int:
        """The number of a value among the scan's operands."""
        return self.step.inputs.index(value)

    def roles(self, program: LossProgram, made: set[Node]) -> Roles:
        """What its operands and results are.

        Args:
          program: that the scan is in.
          made: the values that are made of parameters that it does not update.
        """
        scan, inputs, outputs = self.step.scan, self.step.inputs, self.step.outputs
        parts = {value for leaf in self.leaves for value in leaf.parts}
        slots = [leaf.slot for leaf in self.leaves]
        first_x = scan.constants + scan.carry

        def is_wanted(n: int, value: Node) -> bool:
            if value in parts or value in slots or not _is_inexact(value.aval):
                return False
            # The carry is made of parameters from the second layer on.
            return scan.constants <= n < first_x or value in made

        return Roles(
            released=tuple(n for n, v in enumerate(inputs) if v in parts),
            slots=tuple(map(self.operand, slots)),
            virtual=tuple(self.operand(v) for v in slots if v not in parts),
            wanted=tuple(n for n, v in enumerate(inputs) if is_wanted(n, v)),
            read=tuple(
                n
                for n, v in enumerate(outputs)
                if n >= scan.carry and program.uses[v] and _is_inexact(v.aval)
            ),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """How a traced loss's parameters are updated.

    Args:
      scans: with the leaves that are updated in their loops.
      slots: by name of such a leaf, the numbers of the state's leaves that have a layer
        for each of its layers.
      reasons: by name of the others, why they are updated after the loops.
    """

    scans: list[Released]
    slots: Mapping[str, tuple[int, ...]]
    reasons: Mapping[str, str]


def plan(traced: Traced, tx: optax.GradientTransformation, opt_state) -> Plan:
    """Find the parameters that can be updated inside the backward pass.

    Raises:
      ValueError: if ``tx`` needs the gradients of several leaves at once, and one of
        them is scanned over.
    """
    scans, reasons = {}, {}
    for leaf in traced.leaves:
        try:
            scans[leaf.name] = _scan_over(traced.program, leaf)
        except Whole as reason:
            reasons[leaf.name] = str(reason)
    found = layer_analysis.analyse(
        tx,
        traced.tree(lambda leaf: leaf.gradient),
        trees.abstract(opt_state),
        traced.tree(lambda leaf: trees.abstract(leaf.value)),
        list(scans),
    )
    released = []
    for step in traced.program.scans:
        leaves = [x for x in traced.leaves if x.name in found.slots]
        leaves = [x for x in leaves if scans[x.name] is step]
        if leaves:
            released.append(Released(step, leaves))
    return Plan(released, found.slots, reasons | found.reasons)


def _scan_over(program: LossProgram, leaf: Leaf) -> ScanCall:
    """The only scan over a leaf, and the only thing that reads it."""
    if leaf.slot is None or not jnp.issubdtype(leaf.gradient.dtype, jnp.floating):
        raise Whole(f"it is {leaf.value.dtype}")
    values = {*leaf.parts, leaf.slot}
    over = [step for step in program.scans if values & set(step.scanned)]
    if not over:
        raise Whole("no scan runs over it")
    if len(over) > 1:
        raise Whole("several scans run over it")
    if any(program.uses[value] != 1 for value in values):
        users = {user for value in values for user in program.users(value)}
        others = ", ".join(sorted(users - {"scan"})) or "the scan, in another way"
        raise Whole(f"besides a scan it is used by {others}")
    if not values <= set(over[0].scanned):
        raise Whole("only a part of it is scanned over")
    if math.prod(leaf.value.shape[1:]) < SMALLEST:
        raise Whole(f"its layers have fewer than {SMALLEST} elements")
    if math.prod(leaf.value.shape) > LARGEST:
        raise Whole("it has more than 2^32 elements")
    return over[0]


def _is_inexact(aval) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)
