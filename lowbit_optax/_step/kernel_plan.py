"""Which leaves a fused kernel can update, and what it computes for each.

The inner transformation is traced once. From its graph each leaf gets a program
(:mod:`lowbit_optax._jaxprs.elementwise`), and with its formats that is the body of its
kernel:

    grad, param, residual, moments --> join, decode, program, split, encode
    schedule, count, global norm ----> scalars --^

:mod:`lowbit_optax._step.kernel_step` runs the plan.
"""

import collections
import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import add_p

from lowbit_optax._jaxprs import elementwise
from lowbit_optax._jaxprs.elementwise import NotElementwise, Program, Scalars
from lowbit_optax._jaxprs.graph import Graph, Node
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._numerics.landing import stay
from lowbit_optax._numerics.random_bits import RandomBits
from lowbit_optax._numerics.rounding import to_float32
from lowbit_optax._step import trees
from lowbit_optax._step.moments import draws_for_moments
from lowbit_optax.formats.base import MomentFormat, WeightFormat
from pallas_kernels.fused_update import MAX_ELEMENTS

SMALLEST = 4096
"""Packed leaves with fewer elements are left to XLA."""

KEYS = 2
"""A leaf's row of the table of scalars begins with so many random keys."""

WHEN = KEYS + 1
"""The scalar of a guarded step without which nothing is written."""


@dataclasses.dataclass(frozen=True)
class Body:
    """A leaf's update on rows: static and hashable, so that equal leaves share it.

    With moments in groups it is a :class:`pallas_kernels.fused_update.GroupedBody`.

    Args:
      program: from (gradient, master, moments) to (result, moments), in float32. The
        result is the updated master, or the update where the format sums by itself,
        or where a float32 leaf is not to be stepped.
      format: the leaf's weight format, on unpacked residuals; None for a float32 leaf.
      has_residual: whether a residual follows the parameter.
      moments: of each moment its format and number; None where it is stored as it is.
      landing: ``stay``, or ``land`` to write the parameter that ``update`` lands on.
      guarded: whether the first two scalars are a guard's: the gradient's factor, and
        whether there is a step at all.
    """

    program: Program
    format: WeightFormat | None
    has_residual: bool
    moments: tuple[tuple[MomentFormat, int] | None, ...]
    landing: typing.Callable
    guarded: bool = False

    @property
    def groups(self) -> list[int]:
        """Numbers of the moments that have a scale a group."""
        return [i for i, how in enumerate(self.moments) if _is_grouped(how)]

    @property
    def maxima(self) -> int:
        return len(self.groups)

    def before(self, group_values):
        codecs = (self.moments[i][0].codec for i in self.groups)
        return tuple(
            codec.prepare(to_float32(scale))
            for codec, scale in zip(codecs, group_values, strict=True)
        )

    def statistics(self, values, scalars, index, multiply_add, before):
        del index
        program = self.program.only([i + 1 for i in self.groups])
        _, _, moments = self._run(program, values, scalars, multiply_add, before)
        return [
            self.moments[i][0].codec.statistic(moment)
            for i, moment in zip(self.groups, moments, strict=True)
        ]

    def after(self, maxima):
        codecs = [self.moments[i][0].codec for i in self.groups]
        largest = [c.largest(m) for c, m in zip(codecs, maxima, strict=True)]
        scales = [c.scale_of(x) for c, x in zip(codecs, largest, strict=True)]
        return scales, self.before(scales)

    def __call__(self, values, scalars, index, multiply_add, before=(), after=()):
        param, residual, (result, *moments) = self._run(
            self.program, values, scalars, multiply_add, before
        )
        spare = (
            self.format is not None
            and self.format.residual_random_bits(param.dtype) <= 8
        )
        random = RandomBits(scalars[0], scalars[1], index=index, spare=spare)
        if self.format is None:
            new = result
        elif self.format.stores_sum:
            new, residual, _ = self.format.store(param, result, random, self.landing)
        else:
            new, residual, _ = self.format.advance(
                param, residual, result, random, self.landing
            )
        draws = draws_for_moments(random)
        prepared = dict(zip(self.groups, after, strict=True))
        stored = []
        for i, (x, how) in enumerate(zip(moments, self.moments, strict=True)):
            if how is None:
                stored.append(x)
            elif i in prepared:
                format_, number = how
                stored.append(
                    format_.encode_fields(x, prepared[i], draws, number, multiply_add)
                )
            else:
                stored.append(how[0].encode(x, draws, how[1]))
        return [new, *([residual] if self.has_residual else []), *stored]

    def _run(self, program: Program, values, scalars, multiply_add, before):
        """``(param, residual, the program's outputs)``."""
        grad, param, *rest = values
        residual = rest.pop(0) if self.has_residual else None
        prepared = dict(zip(self.groups, before, strict=True))
        moments = []
        for i, (x, how) in enumerate(zip(rest, self.moments, strict=True)):
            if how is None:
                moments.append(x)
            elif i in prepared:
                codec = how[0].codec
                moments.append(codec.decode_fields(x, prepared[i], multiply_add))
            else:
                moments.append(how[0].decode(x, x.shape))
        if is_narrow(grad.dtype) or is_narrow(param.dtype):
            grad = grad.astype(jnp.float32)
        if self.guarded:
            grad = grad * elementwise.decode_scalar(scalars[KEYS], np.dtype(np.float32))
        master = self.format.inner_weight(param, residual) if self.format else param
        outputs = program.run(
            [grad, master, *moments],
            lambda ref: elementwise.decode_scalar(
                scalars[KEYS + ref.number], ref.dtype
            ),
            multiply_add,
        )
        return param, residual, outputs


def _is_grouped(how: tuple[MomentFormat, int] | None) -> bool:
    return how is not None and how[0].container is not None


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """How one leaf goes through a kernel.

    Args:
      body: what the kernel computes.
      slots: numbers of the inner state's parts that are the leaf's moments.
    """

    body: Body
    slots: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a tree of leaves goes through kernels.

    Args:
      graph: the inner update's.
      grads, masters, state: its inputs, by leaf and by part of the state.
      updates, new_state: its outputs, likewise.
      leaves: by leaf, a plan, or the reason why no kernel takes it.
      scalars: the table that the kernels read.
      state_tree: structure of the new inner state.
    """

    grads: list[Node]
    masters: list[Node]
    state: list[Node]
    updates: list[Node]
    new_state: list[Node]
    leaves: list[LeafPlan | str]
    scalars: Scalars
    state_tree: jax.tree_util.PyTreeDef

    @property
    def is_empty(self) -> bool:
        return not any(isinstance(leaf, LeafPlan) for leaf in self.leaves)

    def require(self, names: Sequence[str]) -> None:
        """Raise for the first leaf whose update no kernel can run."""
        for name, leaf in zip(names, self.leaves, strict=True):
            if isinstance(leaf, str) and leaf:
                raise ValueError(
                    f"lowbit: implementation is 'pallas', but no kernel can update "
                    f"params{name}: {leaf}. None takes XLA for such leaves"
                )


def plan(inner, inside, landing, extra_args) -> Plan:
    """Trace an inner update and find which leaves a kernel can take.

    Args:
      inner: the inner transformation.
      inside: the step's prepared lists, see :class:`lowbit_optax._step.engine.Inside`.
      landing: ``stay`` or ``land``.
      extra_args: for ``inner.update``.
    """
    arguments = inside.grad_tree, inside.moments, inside.master_tree
    closed, shapes = jax.make_jaxpr(
        lambda grads, state, masters: inner.update(grads, state, masters, **extra_args),
        return_shape=True,
    )(*arguments)
    graph = Graph(closed)
    grads, state, masters = jax.tree.unflatten(
        jax.tree.structure(arguments), graph.inputs
    )
    updates, new_state = jax.tree.unflatten(jax.tree.structure(shapes), graph.outputs)
    updates = trees.beside(inside.names, inside.treedef, updates, "inner updates")
    state, old_tree = jax.tree.flatten(state)
    new_state, state_tree = jax.tree.flatten(new_state)
    scalars = Scalars(graph)
    for value in inside.guard or ():
        scalars.ref(Node(jax.typeof(value), constant=value))
    nodes = _Nodes(
        inside.treedef.flatten_up_to(grads),
        inside.treedef.flatten_up_to(masters),
        updates,
        # Without its counterpart a part of the state is no leaf's moment.
        *((state, new_state) if old_tree == state_tree else ([], [])),
    )
    described = old_tree.flatten_up_to(inside.plan.describe(inside.moments))
    leaves = []
    for i in range(len(inside.leaves)):
        try:
            if closed.effects:
                raise NotElementwise(f"it has side effects: {closed.effects}")
            leaves.append(_leaf_plan(i, inside, nodes, described, scalars, landing))
        except NotElementwise as reason:
            leaves.append(str(reason))
    leaves = _without_shared_slots(leaves)
    return Plan(
        nodes.grads,
        nodes.masters,
        state,
        updates,
        new_state,
        leaves,
        scalars,
        state_tree,
    )


class _Nodes(typing.NamedTuple):
    """Inputs and outputs of an inner update, by leaf and by part of the state."""

    grads: list[Node]
    masters: list[Node]
    updates: list[Node]
    state: list[Node]
    new_state: list[Node]


def _leaf_plan(i, inside, nodes: _Nodes, described, scalars, landing) -> LeafPlan:
    leaf, format_ = inside.leaves[i], inside.formats[i]
    if not trees.is_float(leaf) or leaf.dtype.itemsize > 4:
        raise NotElementwise(f"it is a leaf of {leaf.dtype}")
    if leaf.size > MAX_ELEMENTS:
        raise NotElementwise(f"it has more than {MAX_ELEMENTS} elements")
    if leaf.size < (SMALLEST if format_ and format_.width else 1) or not leaf.shape:
        raise NotElementwise("")  # left to XLA without complaint
    grad, master, update = nodes.grads[i], nodes.masters[i], nodes.updates[i]
    slots = _slots_of(i, nodes, leaf.shape)
    inputs = [grad, master, *(nodes.state[s] for s in slots)]
    if update.aval.dtype != jnp.float32:
        raise NotElementwise(f"its update is {update.aval.dtype}")
    if landing is stay if format_ is None else format_.stores_sum:
        (update,) = scalars.graph.call(add_p, {}, [master, update], [master.aval])
    outputs = [update, *(nodes.new_state[s] for s in slots)]
    for node in outputs:
        _check_result(node, leaf.shape)
    program = elementwise.program_of(outputs, inputs, scalars)
    moments = tuple(
        None if how is None else (how.format, how.number)
        for how in (described[s] for s in slots)
    )
    groups = {how[0].block_size for how in moments if _is_grouped(how)}
    if len(groups) > 1:
        raise NotElementwise(f"its moments have blocks of {sorted(groups)}")
    residual = inside.residuals[i] is not None
    on_fields = format_ and format_.on_fields()
    guarded = inside.guard is not None
    body = Body(program, on_fields, residual, moments, landing, guarded)
    return LeafPlan(body, slots)


def _check_result(node: Node, shape: tuple[int, ...]) -> None:
    if node.aval.shape != shape:
        raise NotElementwise(f"a result has shape {list(node.aval.shape)}")
    if node.aval.dtype == jnp.bool_ or node.aval.dtype.itemsize > 4:
        raise NotElementwise(f"a moment is {node.aval.dtype}")


def _without_shared_slots(leaves: list[LeafPlan | str]) -> list[LeafPlan | str]:
    """The plans of leaves that share no part of the state with another leaf."""
    counts = collections.Counter(
        slot for leaf in leaves if isinstance(leaf, LeafPlan) for slot in leaf.slots
    )
    return [
        "it shares a moment with another leaf"
        if isinstance(leaf, LeafPlan) and any(counts[s] > 1 for s in leaf.slots)
        else leaf
        for leaf in leaves
    ]


def _slots_of(i: int, nodes: _Nodes, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The parts of the state that the leaf's update reads or that are made of it."""
    own = {nodes.grads[i], nodes.masters[i]}
    of_update = elementwise.inputs_of([nodes.updates[i]], shape)
    found = []
    for number, (old, new) in enumerate(zip(nodes.state, nodes.new_state, strict=True)):
        same = (old.aval.shape, old.aval.dtype) == (new.aval.shape, new.aval.dtype)
        if old.aval.shape != shape or not same:
            continue
        if old in of_update or own & elementwise.inputs_of([new], shape):
            found.append(number)
    return tuple(found)
