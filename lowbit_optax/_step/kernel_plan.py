"""Which leaves a fused kernel can update, and what it computes for each.

From the graph of the inner update (:mod:`lowbit_optax._step.update_graph`) each leaf
gets a program (:mod:`lowbit_optax._jaxprs.elementwise`). The program and the leaf's
formats make the body of its kernel (:mod:`lowbit_optax._step.body`).
:mod:`lowbit_optax._step.kernel_step` runs the plan.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core.primitives import add_p, and_p, not_p

from lowbit_optax._jaxprs import elementwise
from lowbit_optax._jaxprs.elementwise import NotElementwise, Scalars
from lowbit_optax._jaxprs.nodes import Node, params_of
from lowbit_optax._numerics.landing import Landing
from lowbit_optax._step import trees
from lowbit_optax._step.body import KEYS, LeafBody
from lowbit_optax._step.layer_loops import has_layers, needs_loop
from lowbit_optax._step.moments import MomentStorage
from lowbit_optax._step.prepared import PreparedStep
from lowbit_optax._step.update_graph import UpdateGraph
from lowbit_optax.formats.quantized_weights import QuantizedWeights
from pallas_kernels.fused_update import MAX_ELEMENTS, has_tiling
from pallas_kernels.layout import layout_of

MIN_PACKED_SIZE = 4096
"""Packed leaves with fewer elements are left to XLA."""


@dataclasses.dataclass(frozen=True)
class LeafKernel:
    """The kernel that updates one leaf.

    Args:
      body: what the kernel computes.
      slots: indices of the inner state's parts that are the leaf's moments.
    """

    body: LeafBody
    slots: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class KernelPlan:
    """Which leaves of a step kernels update, and how.

    Args:
      traced: the inner update.
      leaves: per leaf, its kernel, or the reason why it has none. The reason is empty
        for leaves that kernels are not meant for, such as scalars.
      scalars: the table of scalars that the kernels read.
    """

    traced: UpdateGraph
    leaves: list[LeafKernel | str]
    scalars: Scalars

    @property
    def is_empty(self) -> bool:
        """Whether no leaf has a kernel."""
        return not self.kernels

    @property
    def kernels(self) -> dict[int, LeafKernel]:
        """The kernels, by index of the leaf."""
        return {i: x for i, x in enumerate(self.leaves) if isinstance(x, LeafKernel)}

    def require(self, names: Sequence[str]) -> None:
        """Raise a ValueError for the first leaf that no kernel can update.

        Leaves whose reason is empty are left to XLA without an error.
        """
        for name, leaf in zip(names, self.leaves, strict=True):
            if isinstance(leaf, str) and leaf:
                raise ValueError(
                    f"lowbit: implementation is 'pallas', but no kernel can update "
                    f"params{name}: {leaf}. implementation=None uses XLA for such "
                    "leaves"
                )


def plan(
    traced: UpdateGraph,
    prepared: PreparedStep,
    landing: Landing,
    *,
    is_exact: bool = False,
    for_tpus: bool = False,
) -> KernelPlan:
    """Find which leaves of an inner update a kernel can update.

    Args:
      traced: the inner update.
      prepared, landing: the step.
      is_exact: whether bodies compute what :class:`.implementations.ByXla` does bit for
        bit. Else they take scalar factors out.
      for_tpus: whether kernels for TPUs alone will run, which take any fields with any
        blocks.
    """
    scalars = Scalars(traced.graph)
    guard = [Node(jax.typeof(x), constant=x) for x in prepared.guard.scalars]
    for node in guard:
        scalars.ref(node)
    planner = _Planner(
        prepared, landing, traced, scalars, guard[1:], is_exact, for_tpus
    )
    effects = traced.effects and f"it has side effects: {traced.effects}"
    leaves = [effects or planner.leaf(i) for i in range(len(prepared.params))]
    return KernelPlan(traced, _without_shared_slots(leaves), scalars)


class _Planner:
    """Plans leaves one by one.

    Args:
      prepared, landing: the step.
      traced: the inner update.
      scalars: the table to which the scalars of a leaf are added.
      proceeds: the scalar that tells whether a guarded step happens, if it is guarded.
      is_exact, for_tpus: as for :func:`plan`.
    """

    def __init__(
        self,
        prepared,
        landing,
        traced: UpdateGraph,
        scalars: Scalars,
        proceeds: list[Node],
        is_exact: bool,
        for_tpus: bool,
    ):
        self._proceeds = proceeds
        self._is_exact, self._for_tpus = is_exact, for_tpus
        self._prepared: PreparedStep = prepared
        self._landing: Landing = landing
        self._traced, self._nodes = traced, traced.nodes
        self._scalars = scalars
        self._storage: list[MomentStorage | None] = prepared.described_moments()

    def leaf(self, i: int) -> LeafKernel | str:
        """A leaf's kernel, or the reason why it has none."""
        try:
            return self._leaf(i)
        except NotElementwise as reason:
            return str(reason)

    def _leaf(self, i: int) -> LeafKernel:
        prepared, nodes = self._prepared, self._nodes
        leaf, format_ = prepared.params[i], prepared.formats[i]
        quantized = None
        if trees.is_quantized(leaf) and isinstance(format_, QuantizedWeights):
            quantized = format_.fields_of(leaf)
        _check_leaf(leaf, quantized is not None or bool(format_ and format_.width))
        grad, master, update = nodes.grads[i], nodes.masters[i], nodes.updates[i]
        slots = self._slots_of(i)
        inputs = [grad, master, *(nodes.state[s] for s in slots)]
        if update.aval.dtype != jnp.float32:
            raise NotElementwise(f"its update is {update.aval.dtype}")
        adds_update = self._landing.is_direct if format_ is None else format_.stores_sum
        result = update
        if adds_update:
            graph, terms = self._scalars.graph, [master, update]
            (result,) = graph.call(add_p, params_of(lax.add), terms, [master.aval])
        outputs = [result, *(nodes.new_state[s] for s in slots)]
        for node in outputs:
            _check_result(node, leaf.shape)
        feedback = self._traced.feedback[i]
        if feedback is not None:
            if feedback.part not in slots:
                raise NotElementwise("its moment for rounding errors is not its own")
            outputs += [feedback.rate, feedback.growth]
        when, still = self._conditions(i, slots)
        program = elementwise.program_of(
            outputs,
            inputs,
            self._scalars,
            # It would save 2% of the instructions of float16 leaves, whose kernels are
            # twice as long, and take 18% more registers.
            takes_factors_out=leaf.dtype != jnp.float16,
            is_exact=self._is_exact,
        )
        body = LeafBody(
            program=program,
            format=format_ and format_.on_fields(),
            quantized=quantized,
            has_residual=prepared.residuals[i] is not None,
            moments=self._moments(slots),
            references=self._references(i, slots),
            landing=self._landing,
            is_guarded=bool(prepared.guard.scalars),
            when=when,
            still=still,
            takes_error=None if feedback is None else slots.index(feedback.part),
        )
        if not self._for_tpus:
            _check_fields(body)
        return LeafKernel(body if self._is_exact else body.with_factors(), slots)

    def _moments(self, slots):
        """The formats and numbers of a leaf's moments."""
        return tuple(
            None if how is None else (how.format, how.number)
            for how in (self._storage[s] for s in slots)
        )

    def _references(self, i: int, slots: tuple[int, ...]) -> tuple[int | None, ...]:
        """By which other moment of the leaf each is divided; () if none is."""
        own = self._relative.get(self._prepared.names[i], [])
        if any((s in slots) != (second in slots) for s, second in own):
            raise NotElementwise(
                "a moment is stored relative to one that its update does not read"
            )
        seconds = {s: slots.index(second) for s, second in own if s in slots}
        return tuple(seconds.get(s) for s in slots) if seconds else ()

    @functools.cached_property
    def _relative(self) -> dict[str, list[tuple[int, int]]]:
        """By leaf, the moments that are divided by others' roots, and these."""
        found: dict[str, list[tuple[int, int]]] = {}
        for number, how in enumerate(self._storage):
            if how is not None and how.reference is not None:
                found.setdefault(how.leaf, []).append((number, how.reference))
        return found

    def _conditions(self, i: int, slots):
        """``when`` and ``still`` of the body of a leaf."""
        proceeds = self._proceeds
        of_parts, graph = self._traced.still_parts, self._scalars.graph
        still = [self._traced.still_leaves[i], *(of_parts[s] for s in slots)]
        if still[0] is not None and len(set(still)) == 1:
            # Then the kernel writes nothing, which costs no instructions.
            aval = still[0].aval
            proceeds = [*proceeds, *graph.call(not_p, {}, [still[0]], [aval])]
            still = []
        if len(proceeds) == 2:
            proceeds = graph.call(and_p, {}, proceeds, [proceeds[0].aval])
        when = [KEYS + self._scalars.ref(x).number for x in proceeds]
        if not any(still):
            still = []
        refs = tuple(x and self._scalars.ref(x) for x in still)
        return when[0] if when else None, refs

    def _slots_of(self, i: int) -> tuple[int, ...]:
        """The parts of the state that are moments of this leaf.

        These have the leaf's shape before and after the update, and either the leaf's
        update reads them or they are computed from its gradient or master.
        """
        nodes, shape = self._nodes, self._prepared.params[i].shape
        own = {nodes.grads[i], nodes.masters[i]}
        of_update = elementwise.inputs_of([nodes.updates[i]], shape)
        return tuple(
            number
            for number, old, inputs in self._state_of_shape.get(shape, ())
            if old in of_update or own & inputs
        )

    @functools.cached_property
    def _state_of_shape(self) -> dict[tuple[int, ...], list]:
        """By shape, the parts of the state that keep shape and dtype.

        Of each its number, the part before the update, and what the part after it is
        computed from.
        """
        found: dict[tuple[int, ...], list] = {}
        for number, (old, new) in enumerate(self._traced.state_pairs):
            shape = old.aval.shape
            if (shape, old.aval.dtype) == (new.aval.shape, new.aval.dtype):
                inputs = elementwise.inputs_of([new], shape)
                found.setdefault(shape, []).append((number, old, inputs))
        return found


def _check_leaf(leaf, is_packed: bool) -> None:
    if trees.is_quantized(leaf) and leaf.layout != layout_of(leaf.shape):
        raise NotElementwise("it is a QuantizedTensor whose rows are another axis")
    if not trees.is_float(leaf) or leaf.dtype.itemsize > 4:
        raise NotElementwise(f"it is a leaf of {leaf.dtype}")
    if needs_loop(leaf.shape) and not has_layers(leaf):
        raise NotElementwise(
            f"it has more than {MAX_ELEMENTS} elements, and no layers along its first "
            "axis to update one by one"
        )
    if leaf.size < (MIN_PACKED_SIZE if is_packed else 1) or not leaf.shape:
        raise NotElementwise("")  # no reason: left to XLA without an error


def _check_fields(body: LeafBody) -> None:
    """Raise unless a GPU's kernel can walk over words and blocks together."""
    packed, sizes = sorted(set(body.packed)), sorted(set(body.block_sizes))
    if not has_tiling(packed, sizes):
        raise NotElementwise(
            f"its fields of {packed} bits and blocks of {sizes} do not fit together"
        )


def _check_result(node: Node, shape: tuple[int, ...]) -> None:
    if node.aval.shape != shape:
        raise NotElementwise(f"a result has shape {list(node.aval.shape)}")
    if node.aval.dtype == jnp.bool_ or node.aval.dtype.itemsize > 4:
        raise NotElementwise(f"a moment is {node.aval.dtype}")


def _without_shared_slots(leaves: list[LeafKernel | str]) -> list[LeafKernel | str]:
    """The plan of each leaf, without kernels that share a moment with another leaf."""
    counts = collections.Counter(
        slot for leaf in leaves if isinstance(leaf, LeafKernel) for slot in leaf.slots
    )
    return [
        "it shares a moment with another leaf"
        if isinstance(leaf, LeafKernel) and any(counts[s] > 1 for s in leaf.slots)
        else leaf
        for leaf in leaves
    ]
