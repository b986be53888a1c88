"""Which leaves a fused kernel can update, and what it computes for each.

The graph of the inner update (:mod:`lowbit_optax._step.inner_update`) gives each leaf a
program (:mod:`lowbit_optax._jaxprs.elementwise`), or the reason why it has none. The
program and the leaf's formats make the body of its kernel
(:mod:`lowbit_optax._step.kernels.body`).
"""

import collections
import dataclasses
import functools
import typing
from collections.abc import Collection, Mapping

import jax.numpy as jnp
from jax import lax

from lowbit_optax._jaxprs import elementwise
from lowbit_optax._jaxprs.elementwise import NotElementwise, Scalars
from lowbit_optax._jaxprs.graph import Node, constant, made_of
from lowbit_optax._jaxprs.outside import arrays_from_outside
from lowbit_optax._step.inner_update import InnerUpdate
from lowbit_optax._step.kernels.body import KEYS, LeafBody
from lowbit_optax._step.kernels.limits import (
    check_fields,
    check_leaf,
    check_result,
    is_small,
    needs_loop,
)
from lowbit_optax._step.kernels.rows import MomentRows, WeightRows
from lowbit_optax._step.step import Step
from pallas_kernels.fused_update import Leaf
from pallas_kernels.fused_update.refusals import tpu_refusal


@dataclasses.dataclass(frozen=True)
class LeafKernel:
    """The kernel that updates one leaf.

    Args:
      body: what the kernel computes.
      parts: numbers of the inner state's parts that are the leaf's moments.
      outside: what its program reads that XLA computes.
    """

    body: LeafBody
    parts: tuple[int, ...]
    outside: tuple[Node, ...] = ()


@dataclasses.dataclass(frozen=True)
class KernelPlan:
    """Which leaves of a step kernels update, and how.

    Args:
      traced: the inner update.
      kernels: by the numbers of their leaves.
      reasons: by the numbers of other leaves, why they have none. Small leaves, which
        kernels are not meant for, are in neither.
      scalars: the table of scalars that the kernels read.
    """

    traced: InnerUpdate
    kernels: dict[int, LeafKernel]
    reasons: dict[int, str]
    scalars: Scalars

    def require(self) -> None:
        """Raise a ValueError for the first leaf that no kernel can update."""
        for number, reason in self.reasons.items():
            name = self.traced.step.leaves[number].name
            raise ValueError(
                f"lowbit: implementation is 'pallas', but no kernel can update "
                f"params{name}: {reason}. implementation=None uses XLA for such leaves"
            )

    def arrays(self, step: Step, values: Mapping | None = None) -> dict[int, Leaf]:
        """What the kernels read and write, by the numbers of the leaves.

        Args:
          step: whose arrays.
          values: by node, what is computed outside; None for what is stored alone.
        """
        return {
            i: x.body.arrays(
                step.leaves[i],
                [step.parts[part] for part in x.parts],
                [] if values is None else [values[node] for node in x.outside],
            )
            for i, x in self.kernels.items()
        }

    def why_not(self, *, on_tpus: bool) -> dict[int, str]:
        """By number, the leaves that XLA updates, and why, as in ``reasons``."""
        return self.reasons | self.tpu_refusals if on_tpus else self.reasons

    @property
    def outside(self) -> list[Node]:
        """What the kernels read that XLA computes."""
        return [node for x in self.kernels.values() for node in x.outside]

    def only_blocks(self) -> "KernelPlan":
        """The plan of the leaves that XLA updates block by block on a CPU.

        A guarded step has none: on CPUs :meth:`.Guard.unscaled` keeps an order of
        operations that blocks would not keep.
        """
        large = {}
        if not self.traced.step.guard.scalars:
            leaves = self.arrays(self.traced.step)
            fits = lambda x: not (x.stacked or needs_loop(x.shape))
            large = {i: self.kernels[i] for i, x in leaves.items() if fits(x)}
        return dataclasses.replace(self, kernels=large)

    @functools.cached_property
    def tpu_refusals(self) -> dict[int, str]:
        """By the numbers of the leaves that no kernel for TPUs updates, why not."""
        columns = KEYS + len(self.scalars.nodes)
        found = {
            i: tpu_refusal(self.kernels[i].body, leaf, columns)
            for i, leaf in self.arrays(self.traced.step).items()
        }
        return {i: reason for i, reason in found.items() if reason is not None}


def plan_kernels(
    traced: InnerUpdate, *, is_exact: bool = False, for_tpus: bool = False
) -> KernelPlan:
    """Find which leaves of an inner update a kernel can update.

    Args:
      traced: the inner update.
      is_exact: whether bodies compute what the reference does bit for bit.
      for_tpus: whether kernels for TPUs alone will run, which take any fields with any
        blocks.
    """
    scalars = Scalars(traced.graph)
    for scalar in traced.step.guard.scalars:
        scalars.ref(constant(scalar))
    planner = _Planner(traced, scalars, is_exact, for_tpus)
    kernels: dict[int, LeafKernel] = {}
    reasons: dict[int, str] = {}
    for i, leaf in enumerate(traced.step.leaves):
        weight = WeightRows.of(leaf)
        if is_small(leaf.param, weight):
            continue
        try:
            kernels[i] = planner.leaf(i, weight)
        except NotElementwise as reason:
            reasons[i] = str(reason)
    if _reads_what_is_stored_first(traced, scalars, kernels, reasons):
        reason = "another leaf's update reads a moment that is stored first"
        kernels, reasons = {}, reasons | dict.fromkeys(kernels, reason)
    uses = collections.Counter(part for x in kernels.values() for part in x.parts)
    for i, kernel in list(kernels.items()):
        if any(uses[part] > 1 for part in kernel.parts):
            del kernels[i]
            reasons[i] = "it shares a moment with another leaf"
    return KernelPlan(traced, kernels, dict(sorted(reasons.items())), scalars)


def _reads_what_is_stored_first(
    traced: InnerUpdate,
    scalars: Scalars,
    kernels: Mapping[int, LeafKernel],
    others: Collection[int],
) -> bool:
    """Whether a program other than a leaf's own kernel needs its rounded moments.

    XLA computes scalars, and what kernels read besides, before kernels run.
    """
    first = traced.stored_first
    if not first:
        return False
    before = [*scalars.nodes, *(node for x in kernels.values() for node in x.outside)]
    written = {first[s] for x in kernels.values() for s in x.parts if s in first}
    updates = made_of([traced.nodes.updates[i] for i in others])
    return not (
        set(first.values()).isdisjoint(made_of(before)) and written.isdisjoint(updates)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Planner:
    """Plans leaves one by one.

    Args:
      traced: the inner update.
      scalars: the table to which the scalars of a leaf are added.
      is_exact, for_tpus: as for :func:`plan_kernels`.
    """

    traced: InnerUpdate
    scalars: Scalars
    is_exact: bool
    for_tpus: bool

    def leaf(self, i: int, weight: WeightRows) -> LeafKernel:
        """The kernel of a leaf; NotElementwise is raised if it has none."""
        step, nodes, graph = self.traced.step, self.traced.nodes, self.traced.graph
        leaf, update = step.leaves[i], nodes.updates[i]
        if self.traced.closed.effects:
            raise NotElementwise(f"it has side effects: {self.traced.closed.effects}")
        check_leaf(leaf)
        if update.aval.dtype != jnp.float32:
            raise NotElementwise(f"its update is {update.aval.dtype}")
        adds = step.landing.is_direct if leaf.format is None else leaf.format.stores_sum
        result = graph.apply(lax.add, nodes.masters[i], update) if adds else update
        rows = self._rows_of(i, result)
        # Kernels of leaves that are not packed cannot repeat rows and columns.
        if weight.is_packed and not (self.is_exact or self.for_tpus):
            rows = self._with_outside(i, rows)
        return self._kernel(i, weight, rows)

    def _rows_of(self, i: int, result: Node) -> "_Rows":
        """The results of a leaf from its own rows: gradient, master and moments."""
        nodes, feedback = self.traced.nodes, self.traced.feedback[i]
        parts = self._parts_of(i)
        own = [nodes.grads[i], nodes.masters[i], *(nodes.state[s] for s in parts)]
        outputs = [result, *(nodes.new_state[s] for s in parts)]
        for node in outputs:
            check_result(node, nodes.masters[i].aval.shape)
        if feedback is not None:
            if feedback.part not in parts:
                raise NotElementwise("its moment for rounding errors is not its own")
            outputs += feedback[1:]
        return _Rows(parts, own, outputs)

    def _with_outside(self, i: int, rows: "_Rows") -> "_Rows":
        """The same results, also from arrays that XLA computes, if there are any."""
        outside = tuple(arrays_from_outside(rows.outputs, rows.inputs))
        if outside and any(s in self.traced.stored_first for s in rows.parts):
            raise NotElementwise("its moments are stored before its update is computed")
        if outside and needs_loop(self.traced.step.leaves[i].param.shape):
            raise NotElementwise("it has too many elements for arrays from outside")
        return rows._replace(inputs=[*rows.inputs, *outside], outside=outside)

    def _kernel(self, i: int, weight: WeightRows, rows: "_Rows") -> LeafKernel:
        """The kernel of a leaf whose results are elementwise in these rows."""
        step, parts = self.traced.step, rows.parts
        leaf, feedback = step.leaves[i], self.traced.feedback[i]
        program_of = functools.partial(
            elementwise.program_of,
            scalars=self.scalars,
            is_exact=self.is_exact,
        )
        outputs, from_stored = rows.outputs, None
        if any(s in self.traced.stored_first for s in parts):
            moments = [self.traced.nodes.new_state[s] for s in parts]
            from_stored = program_of(outputs[:1], [*moments, *rows.inputs])
            outputs = [rows.inputs[1], *outputs[1:]]
        program = program_of(outputs, rows.inputs)
        moments = tuple(self._moments(i, parts))
        is_even = any(x.has_scales and x.codec.rounds_evenly for x in moments)
        body = LeafBody(
            program=program,
            weight=weight,
            moments=moments,
            landing=step.landing.of(leaf.param, leaf.grad),
            is_guarded=bool(step.guard.scalars),
            phase=self.scalars.ref(self.phase) if is_even else None,
            takes_error=None if feedback is None else 1 + parts.index(feedback.part),
            from_stored=from_stored,
        )
        if not self.for_tpus:
            check_fields(body.arrays(leaf, [step.parts[s] for s in parts]))
        return LeafKernel(body, parts, rows.outside)

    @functools.cached_property
    def phase(self) -> Node:
        """The phase of the step, one node for all leaves."""
        return constant(self.traced.step.phase)

    def _moments(self, i: int, parts: tuple[int, ...]):
        """The moments of a leaf's body."""
        relative = self._relative.get(self.traced.step.leaves[i].name, {})
        if any((x in parts) != (second in parts) for x, second in relative.items()):
            raise NotElementwise(
                "a moment is stored relative to one that its update does not read"
            )
        for part in parts:
            storage, second = self.traced.step.plan.storage[part], relative.get(part)
            yield MomentRows(
                format=None if storage is None else storage.format,
                number=0 if storage is None else storage.number,
                relative_to=None if second is None else 1 + parts.index(second),
            )

    @functools.cached_property
    def _relative(self) -> dict[str, dict[int, int]]:
        """By leaf, the moments that are divided by roots, and of which moments."""
        found: dict[str, dict[int, int]] = {}
        for number, storage in enumerate(self.traced.step.plan.storage):
            if storage is not None and storage.reference is not None:
                found.setdefault(storage.leaf, {})[number] = storage.reference
        return found

    def _parts_of(self, i: int) -> tuple[int, ...]:
        """The parts of the state that are moments of a leaf.

        They have its shape before and after the update. Either its update reads them,
        or they are computed from its gradient or master.
        """
        nodes, shape = self.traced.nodes, self.traced.step.leaves[i].param.shape
        leaf = {nodes.grads[i], nodes.masters[i]}
        of_update = elementwise.inputs_of([nodes.updates[i]], shape)
        return tuple(
            number
            for number, old, inputs in self._state_of_shape.get(shape, ())
            if old in of_update or leaf & inputs
        )

    @functools.cached_property
    def _state_of_shape(self) -> dict[tuple[int, ...], list]:
        """By shape, the parts of the state that keep shape and dtype.

        For each its number, the old part, and the inputs of the new one.
        """
        found: dict[tuple[int, ...], list] = {}
        for number, (old, new) in enumerate(self.traced.state_pairs):
            shape = old.aval.shape
            if (shape, old.aval.dtype) == (new.aval.shape, new.aval.dtype):
                inputs = elementwise.inputs_of([new], shape)
                found.setdefault(shape, []).append((number, old, inputs))
        return found


class _Rows(typing.NamedTuple):
    """What the program of a leaf reads and computes.

    Args:
      parts: of the state, the leaf's moments.
      inputs: gradient, master, moments, and what is computed outside.
      outputs: the result, the moments, and what feedback needs.
      outside: what is computed outside.
    """

    parts: tuple[int, ...]
    inputs: list[Node]
    outputs: list[Node]
    outside: tuple[Node, ...] = ()
