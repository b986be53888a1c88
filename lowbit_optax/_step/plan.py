"""``KernelPlan``: the leaves that kernels update, and what each kernel computes.

:mod:`lowbit_optax._step.run` calls :func:`plan_kernels` with a traced inner update
(:mod:`lowbit_optax._step.inner_update`). The graph of the update gives each leaf a
program (:mod:`lowbit_optax._jaxprs.elementwise`), or a reason why it has none. The
program and the formats of the leaf define the body of its kernel
(:mod:`lowbit_optax._step.body`).

Some kernels need :class:`Sums`. A factored second moment is computed from sums over the
rows and over the columns of the squared gradient, which must be known before the leaf's
kernel runs. A kernel of :mod:`pallas_kernels.fused_update.axis_sums` computes both in
one pass over the gradient.

For a large leaf without a kernel, XLA creates float32 arrays of its master and moments,
which are the arrays that this package avoids. :func:`warning_of` describes such leaves.
"""

import collections
import dataclasses
import functools
import math
import typing
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs import elementwise
from lowbit_optax._jaxprs.elementwise import (
    NotElementwise,
    Program,
    ScalarTable,
    arrays_from_outside,
    decode_scalar,
    encode_scalars,
    program_of,
)
from lowbit_optax._jaxprs.graph import Node, calls_between, constant, made_of
from lowbit_optax._step import context, trees
from lowbit_optax._step.body import KEYS, LeafBody, MomentRows, WeightRows
from lowbit_optax._step.error_feedback import Feedback, feedback_of
from lowbit_optax._step.inner_update import InnerUpdate
from lowbit_optax._step.leaf import StoredLeaf
from lowbit_optax._step.step import Step
from lowbit_optax.formats.block_scaled import BlockScaledTensor
from pallas_kernels.fused_update import MAX_ELEMENTS, Leaf, has_tiling, shards
from pallas_kernels.fused_update.api import PARTITIONED, tpu_refusal
from pallas_kernels.fused_update.axis_sums import MOST_ARRAYS, axis_sums
from pallas_kernels.layout import layout_of
from pallas_kernels.platforms import Implementation

MIN_ELEMENTS_ALONE = 2**22
"""A leaf with at least this many elements has its own kernel: the launch costs little
compared with the update, and a kernel for many leaves takes longer to compile."""


@dataclasses.dataclass(frozen=True)
class _Summed:
    """The elementwise function of a gradient whose values are summed."""

    program: Program
    is_guarded: bool

    def __call__(self, grad: jax.Array, scalars: Sequence[jax.Array]) -> jax.Array:
        grad = grad.astype(jnp.float32)
        if self.is_guarded:
            grad = grad * decode_scalar(scalars[0], np.dtype(np.float32))
        return self.program.run([grad], scalars)[0]


class Sums(typing.NamedTuple):
    """The sums to compute before the kernels of a step.

    Args:
      leaves: ``(leaf, function, nodes)`` for each summed function of a gradient: the
        index of the leaf, the elementwise function, and the nodes with the sums over
        the last axis and over the axis before it.
      scalars: the scalars that their functions read.
    """

    leaves: Sequence[tuple[int, Callable, tuple[list[Node], list[Node]]]] = ()
    scalars: Sequence[Node] = ()

    def values(
        self, traced: InnerUpdate, implementation: Implementation
    ) -> dict[Node, jax.Array]:
        """Compute the sums, and return a dict keyed by node."""
        if not self.leaves:
            return {}
        scalars = list(traced.values(self.scalars).values())
        table = encode_scalars(scalars) if scalars else jnp.zeros(1, jnp.uint32)
        values = {}
        for some in self._shared(traced.step):
            function = some[0][1]
            grads = [traced.step.leaves[leaf].grad for leaf, _, _ in some]
            sums = _sums(function, implementation, grads, table)
            for (_, _, nodes), found in zip(some, sums, strict=True):
                for same, x in zip(nodes, found, strict=True):
                    values |= {node: x.reshape(node.aval.shape) for node in same}
        return values

    def _shared(self, step: Step) -> Iterator[list]:
        """Yield the leaves whose gradients share a kernel."""
        group_of = context.current().group_of
        groups: dict[typing.Any, list] = {}
        for each in self.leaves:
            leaf = step.leaves[each[0]]
            is_large = math.prod(leaf.grad.shape) >= MIN_ELEMENTS_ALONE
            alone = each[0] if is_large else None
            key = alone, group_of and group_of(leaf.name), each[1]
            groups.setdefault((*key, jax.typeof(leaf.grad)), []).append(each)
        for group in groups.values():
            for first in range(0, len(group), MOST_ARRAYS):
                yield group[first : first + MOST_ARRAYS]


@dataclasses.dataclass(frozen=True)
class LeafKernel:
    """The kernel that updates one leaf.

    Args:
      body: the computation of the kernel.
      parts: indices of the parts of the inner state that are the leaf's moments.
      outside: nodes that XLA computes for the kernel.
    """

    body: LeafBody
    parts: tuple[int, ...]
    outside: tuple[Node, ...] = ()


@dataclasses.dataclass(frozen=True)
class KernelPlan:
    """The kernels for the leaves of a step; by default, there are none.

    Args:
      traced: the inner update.
      kernels: dict from leaf index to kernel.
      reasons: dict from leaf index to the reason why the leaf has no kernel. Leaves
        that are too small for kernels are omitted.
      scalars: the scalars that the kernels read.
      sums: the sums to compute before the kernels of the leaves.
      feedback: dict from leaf index to error feedback, also of other leaves.
    """

    traced: InnerUpdate
    kernels: Mapping[int, LeafKernel] = dataclasses.field(default_factory=dict)
    reasons: Mapping[int, str] = dataclasses.field(default_factory=dict)
    scalars: Sequence[Node] = ()
    sums: Sums = dataclasses.field(default_factory=Sums)
    feedback: Mapping[int, Feedback] = dataclasses.field(default_factory=dict)

    def require(self) -> None:
        """Raise a ValueError for the first leaf that no kernel can update."""
        for number, reason in self.reasons.items():
            name = self.traced.step.leaves[number].name
            raise ValueError(
                "lowbit: implementation='pallas' needs a kernel for each leaf, but no "
                f"kernel can update params{name}: {reason}. implementation=None uses "
                "XLA for such leaves"
            )

    def arrays(self, values: Mapping | None = None) -> dict[int, Leaf]:
        """Return a dict from leaf index to the arrays that its kernel uses.

        ``values`` maps nodes to arrays that XLA computed. If it is None, the leaves
        contain the shapes of these arrays.
        """
        step = self.traced.step
        return {
            i: x.body.arrays(
                step.unscaled_leaf(i) if x.body.is_unscaled else step.leaves[i],
                [step.parts[part] for part in x.parts],
                [n.aval if values is None else values[n] for n in x.outside],
            )
            for i, x in self.kernels.items()
        }

    def why_not(self, *, on_tpus: bool) -> dict[int, str]:
        """Return a dict from leaf index to the reason why XLA updates the leaf."""
        return {**self.reasons, **(self.tpu_refusals if on_tpus else {})}

    def only_blocks(self) -> "KernelPlan":
        """Return a plan with the leaves that XLA updates block by block on a CPU."""
        params = self.traced.step.params
        fits = lambda i: not needs_loop(params[i].shape)
        large = {i: x for i, x in self.kernels.items() if fits(i)}
        return dataclasses.replace(self, kernels=large)

    @functools.cached_property
    def tpu_refusals(self) -> dict[int, str]:
        """Dict from leaf index to the reason why no TPU kernel updates the leaf."""
        columns = KEYS + len(self.scalars)
        found = {
            i: tpu_refusal(self.kernels[i].body, leaf, columns)
            for i, leaf in self.arrays().items()
        }
        return {i: reason for i, reason in found.items() if reason is not None}


def plan_kernels(
    traced: InnerUpdate, *, is_exact: bool = False, for_tpus: bool = False
) -> KernelPlan:
    """Plan a kernel for each leaf of an inner update that a kernel can update.

    Args:
      traced: the inner update.
      is_exact: if True, programs match the reference bit for bit.
      for_tpus: if True, only TPU kernels will run, which support all combinations of
        fields and blocks.
    """
    scalars = ScalarTable(traced.graph, map(constant, traced.step.guard.scalars))
    feedback = feedback_of(traced)
    planner = _Planner(traced, feedback, scalars, is_exact, for_tpus)
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
        reason = "an update reads a moment of another leaf after it is rounded"
        kernels, reasons = {}, reasons | dict.fromkeys(kernels, reason)
    uses = collections.Counter(part for x in kernels.values() for part in x.parts)
    for i, kernel in list(kernels.items()):
        if any(uses[part] > 1 for part in kernel.parts):
            del kernels[i]
            reasons[i] = "it shares a moment with another leaf"
    sums = plan_sums(traced, {i: x.outside for i, x in kernels.items()})
    reasons = dict(sorted(reasons.items()))
    return KernelPlan(traced, kernels, reasons, scalars.nodes, sums, feedback)


def _reads_what_is_stored_first(
    traced: InnerUpdate,
    scalars: ScalarTable,
    kernels: Mapping[int, LeafKernel],
    others: Collection[int],
) -> bool:
    """Return whether anything except a leaf's own kernel reads its rounded moments.

    Such a plan cannot run, because XLA computes scalars and other inputs of kernels
    before the kernels round the moments.
    """
    first = traced.nodes_stored_first
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
    """Plans the kernels of leaves.

    Args:
      traced: the inner update.
      feedback: dict from leaf index to error feedback.
      scalars: the table to which the scalars of a leaf are added.
      is_exact, for_tpus: see :func:`plan_kernels`.
    """

    traced: InnerUpdate
    feedback: Mapping[int, Feedback]
    scalars: ScalarTable
    is_exact: bool
    for_tpus: bool

    def leaf(self, i: int, weight: WeightRows) -> LeafKernel:
        """Return the kernel of a leaf, or raise NotElementwise."""
        traced, step, nodes = self.traced, self.traced.step, self.traced.nodes
        leaf, update = step.leaves[i], nodes.updates[i]
        if traced.closed.effects:
            raise NotElementwise(
                f"the inner update has side effects: {traced.closed.effects}"
            )
        check_leaf(leaf)
        if update.aval.dtype != jnp.float32:
            raise NotElementwise(f"its update is {update.aval.dtype}")
        adds = step.landing.is_direct if leaf.format is None else leaf.format.stores_sum
        add = functools.partial(traced.graph.apply, lax.add)
        result = add(nodes.masters[i], update) if adds else update
        parts = self._parts_of(i)
        moments = tuple(map(self._moment, parts))
        inputs = [nodes.grads[i], nodes.masters[i], *(nodes.state[s] for s in parts)]
        new_moments = [nodes.new_state[s] for s in parts]
        for node in result, *new_moments:
            check_result(node, nodes.masters[i].aval.shape)
        feedback, takes_error = self.feedback.get(i), None
        if feedback is not None:
            if feedback.part not in parts:
                raise NotElementwise(
                    "the moment for its rounding errors does not belong to it"
                )
            takes_error = 1 + parts.index(feedback.part)
        outputs = [result, *new_moments, *(feedback[1:] if feedback else ())]
        outside: tuple[Node, ...] = ()
        # Kernels for leaves without words and blocks cannot repeat rows and columns.
        has_words = weight.is_packed or any(x.has_scales for x in moments)
        if has_words and not self.is_exact:
            outside = self._outside(i, parts, inputs, outputs)
        inputs += outside
        program_of = functools.partial(
            elementwise.program_of, scalars=self.scalars, is_exact=self.is_exact
        )
        from_stored = None
        if any(s in traced.nodes_stored_first for s in parts):
            from_stored = program_of([result], [*new_moments, *inputs])
            outputs[0] = nodes.masters[i]
        body = LeafBody(
            program=program_of(outputs, inputs),
            weight=weight,
            moments=moments,
            landing=step.landing.of(leaf.param, leaf.grad),
            is_guarded=bool(step.guard.scalars),
            is_unscaled=bool(step.guard.scalars) and self.is_exact,
            takes_error=takes_error,
            from_stored=from_stored,
            marks_changes=self._marks_changes(leaf.param, moments),
        )
        if not self.for_tpus:
            check_fields(body.arrays(leaf, [step.parts[s] for s in parts]))
        return LeafKernel(body, parts, outside)

    def _marks_changes(self, param, moments: Sequence[MomentRows]) -> bool:
        """Return whether a kernel writes the bitmap of a leaf's changed weights."""
        step = self.traced.step
        if step.on_changes is None or self.for_tpus or self.is_exact:
            return False
        # A kernel that skips a step writes nothing, not even a bitmap of zeros.
        if step.guard.proceed is not None or step.layer is not None:
            return False
        if trees.is_quantized(param) or not param.ndim or needs_loop(param.shape):
            return False
        # A byte contains 8 rows, like a block. Other shards may have fewer rows.
        has_blocks = any(x.has_scales for x in moments)
        return has_blocks or not any(jax.typeof(param).sharding.spec)

    def _outside(
        self, i: int, parts: tuple[int, ...], own: list[Node], outputs: list[Node]
    ) -> tuple[Node, ...]:
        """Return the arrays that XLA computes for the program of a leaf."""
        outside = tuple(arrays_from_outside(outputs, own))
        shape = own[0].aval.shape
        if self.for_tpus and any(x.aval.shape == shape for x in outside):
            # For Muon, these arrays need 8 more temporary bytes than XLA's update.
            return ()
        if outside and any(s in self.traced.nodes_stored_first for s in parts):
            raise NotElementwise(
                "it needs arrays from XLA, but its update is computed from rounded "
                "moments"
            )
        if outside and needs_loop(self.traced.step.leaves[i].param.shape):
            raise NotElementwise(
                "it has too many elements for a kernel that reads arrays from XLA"
            )
        return outside

    def _moment(self, part: int) -> MomentRows:
        """Return how a moment of a leaf is stored."""
        storage = self.traced.step.plan.storage[part]
        return MomentRows(storage.format, storage.number) if storage else MomentRows()

    def _parts_of(self, i: int) -> tuple[int, ...]:
        """Return the indices of the parts of the state that are moments of a leaf.

        They have the shape of the leaf before and after the update. Either the leaf's
        update reads them, or they are computed from its gradient or master.
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
        """The parts of the state that keep their shape and dtype, keyed by shape.

        Each entry is ``(index, old part, inputs of the new part)``.
        """
        found: dict[tuple[int, ...], list] = {}
        if not self.traced.keeps_structure:
            return found
        nodes = self.traced.nodes
        pairs = zip(nodes.state, nodes.new_state, strict=True)
        for number, (old, new) in enumerate(pairs):
            shape = old.aval.shape
            if (shape, old.aval.dtype) == (new.aval.shape, new.aval.dtype):
                inputs = elementwise.inputs_of([new], shape)
                found.setdefault(shape, []).append((number, old, inputs))
        return found


MIN_PACKED_SIZE = 4096
"""XLA updates packed leaves with fewer elements."""


_LEAST_OF_LAYER = 2**16
"""For smaller layers, a loop over kernels takes longer than XLA's update."""


def needs_loop(shape: tuple[int, ...]) -> bool:
    """Return whether a leaf has more elements than a kernel can count."""
    return math.prod(shape) > MAX_ELEMENTS


def has_layers(leaf: StoredLeaf) -> bool:
    """Return whether a leaf can be updated layer by layer along its first axis.

    Each word and block must be inside one layer, and no known sharding may distribute
    the layers over devices.
    """
    shape = leaf.param.shape
    if len(shape) < 3 or not _LEAST_OF_LAYER <= math.prod(shape[1:]) <= MAX_ELEMENTS:
        return False
    if layout_of(shape).axis != layout_of(shape[1:]).axis:
        return False
    specs = [jax.typeof(x).sharding.spec for x in jax.tree.leaves(leaf.param)]
    if leaf.sharding is not None:
        specs.append(leaf.sharding.spec)
    return all(not spec or spec[0] is None for spec in specs)


def is_small(leaf, weight: WeightRows) -> bool:
    """Return whether a parameter is a scalar or too small for a kernel."""
    fewest = MIN_PACKED_SIZE if weight.is_packed else 1
    return not leaf.shape or math.prod(leaf.shape) < fewest


def check_leaf(stored: StoredLeaf) -> None:
    """Raise NotElementwise unless a kernel supports a parameter."""
    leaf = stored.param
    if isinstance(leaf, BlockScaledTensor):
        raise NotElementwise("kernels do not support block-scaled float8")
    if trees.is_quantized(leaf) and leaf.layout != layout_of(leaf.shape):
        raise NotElementwise(
            "it is a QuantizedTensor with rows along an axis that kernels do not "
            "support"
        )
    if not trees.is_float(leaf) or leaf.dtype.itemsize > 4:
        raise NotElementwise(f"kernels do not support {leaf.dtype}")
    if needs_loop(leaf.shape) and not has_layers(stored):
        raise NotElementwise(
            f"it has more than {MAX_ELEMENTS} elements, and no layers along its first "
            "axis to update one by one"
        )


def check_fields(arrays: Leaf) -> None:
    """Raise NotElementwise unless a GPU kernel supports these words and blocks."""
    packed, sizes = list(arrays.packed), list(arrays.block_sizes)
    if not has_tiling(packed, sizes):
        raise NotElementwise(
            f"its fields of {packed} bits and blocks of {sizes} do not fit together"
        )


def check_result(node: Node, shape: tuple[int, ...]) -> None:
    """Raise NotElementwise unless a kernel can write a result of this shape."""
    if node.aval.shape != shape:
        raise NotElementwise(f"a result has shape {list(node.aval.shape)}")
    if node.aval.dtype == jnp.bool_ or node.aval.dtype.itemsize > 4:
        raise NotElementwise(f"a moment has the dtype {node.aval.dtype}")


def plan_sums(traced: InnerUpdate, outside: Mapping[int, Sequence[Node]]) -> Sums:
    """Find the sums that the kernels of leaves need.

    Args:
      traced: the inner update.
      outside: the nodes that the kernel of each leaf needs, by index of the leaf.
    """
    guard = traced.step.guard.scalars
    scalars = ScalarTable(traced.graph, map(constant, guard))
    leaves = [
        (i, _Summed(program, bool(guard)), nodes)
        for i, needed in outside.items()
        for program, nodes in _summed(traced.nodes.grads[i], needed, scalars).items()
        if all(nodes)
    ]
    return Sums(leaves, scalars.nodes)


def _summed(
    grad: Node, needed: Sequence[Node], scalars: ScalarTable
) -> dict[Program, tuple[list[Node], list[Node]]]:
    """Return the functions of a gradient that are summed over one of the last two axes.

    The result maps a function to the sums over the last axis, and over the axis before.
    """
    found: dict[Program, tuple[list[Node], list[Node]]] = {}
    rank = len(grad.aval.shape)
    axes = {(rank - 1,): 0, (rank - 2,): 1}
    for call in calls_between(needed, [grad]):
        place = axes.get(tuple(call.params.get("axes", ())))
        if call.primitive is not p.reduce_sum_p or place is None:
            continue
        if call.inputs[0].aval.shape != grad.aval.shape:
            continue
        try:
            program = program_of(call.inputs, [grad], scalars)
        except NotElementwise:
            continue
        found.setdefault(program, ([], []))[place].append(call.outputs[0])
    return found


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sums(function: Callable, implementation: Implementation, grads, table) -> list:
    """Compute sums. Traced once for equal shapes and functions."""
    return axis_sums(function, grads, table, implementation)


_LARGE = 2**18
"""Leaves with fewer elements are not worth a warning."""


def warning_of(plan: KernelPlan, reasons: Mapping[int, str]) -> str | None:
    """Return a warning about large leaves that XLA updates, or None if there are none.

    ``reasons`` maps leaf indices to reasons. Leaves without packed or quantized arrays
    do not count, because XLA updates them in one pass.
    """
    step, sizes, float32_bytes = plan.traced.step, {}, 0
    for number in sorted(reasons):
        leaf = step.leaves[number]
        moments = step.plan.quantized[leaf.name]
        is_packed = leaf.format is not None and bool(leaf.format.width)
        is_in_few_bits = bool(moments) or is_packed or trees.is_quantized(leaf.param)
        size = math.prod(leaf.param.shape)
        if is_in_few_bits and size >= _LARGE:
            sizes[number] = size
            # The master and the quantized moments in float32.
            float32_bytes += 4 * size * (1 + len(moments))
    if not sizes:
        return None
    largest = max(sizes, key=sizes.__getitem__)
    param = step.leaves[largest].param
    described = trees.describe(param)
    if trees.is_quantized(param):
        described = f"a {type(param).__name__} of shape {list(param.shape)}"
    others = f" and {len(sizes) - 1} more leaves" if len(sizes) > 1 else ""
    return (
        f"lowbit: no kernel updates params{step.leaves[largest].name}, "
        f"{described}{others}: {reasons[largest]}. XLA computes float32 arrays of "
        "their masters and moments, which takes several times as long as a kernel and "
        f"needs about {float32_bytes / 2**20:.0f} MiB of temporary memory on all "
        "devices together. lowbit_optax.explain(tx, params) lists such leaves. To "
        "disable this warning, pass warn=False"
    )


def perhaps_partitioned(plan: KernelPlan) -> dict[int, str]:
    """Return the leaves that XLA updates in programs for several devices.

    The result maps leaf indices to reasons. Under plain ``jax.jit``, the number of
    devices is known only during lowering.
    """
    return {
        i: PARTITIONED
        for i, leaf in plan.arrays().items()
        if i not in plan.tpu_refusals and shards.is_partitioned(leaf) is None
    }


@functools.cache
def warn_once(message: str) -> None:
    """Warn, unless this process has already issued the same warning."""
    warnings.warn(message, stacklevel=2)
