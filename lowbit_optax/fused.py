"""One step by fused kernels: one pass over each leaf whose update is elementwise.

The inner transformation is traced once. From its graph each leaf gets a program
(:mod:`lowbit_optax.leafwise`) that runs inside ``pallas_kernels.fused_update``, between
joining and splitting. Everything else is computed outside, as on the XLA path: scalars,
counters, and the leaves that no kernel takes.

    grad, param, residual, moments --> kernel: join, decode, program, split, encode
    schedule, count, global norm ----> scalars --^
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import add_p

from lowbit_optax import leafwise, trees
from lowbit_optax.float_layouts import is_narrow
from lowbit_optax.formats.base import MomentFormat, WeightFormat
from lowbit_optax.graph import Graph, Node, evaluate
from lowbit_optax.landing import difference, land, stay
from lowbit_optax.leafwise import NotElementwise, Program, Scalars
from lowbit_optax.moments import draws_for_moments
from lowbit_optax.random_bits import RandomBits
from pallas_kernels.fused import (
    LARGEST_OF_MANY,
    Leaf,
    Operand,
    Result,
    fused_update,
    fused_update_many,
)

SMALLEST = 4096
"""Packed leaves with fewer elements are left to XLA."""

# A leaf's row of the table of scalars begins with its two random keys.
_KEYS = 2


@dataclasses.dataclass(frozen=True)
class Body:
    """A leaf's update on rows: static and hashable, so that equal leaves share it.

    Args:
      program: from (gradient, master, moments) to (result, moments), in float32. The
        result is the updated master, or the update where the format sums by itself,
        or where a float32 leaf is not to be stepped.
      format: the leaf's weight format, on unpacked residuals; None for a float32 leaf.
      has_residual: whether a residual follows the parameter.
      moments: of each moment its format and number; None where it is stored as it is.
      landing: ``stay``, or ``land`` to write the parameter that ``update`` lands on.
    """

    program: Program
    format: WeightFormat | None
    has_residual: bool
    moments: tuple[tuple[MomentFormat, int] | None, ...]
    landing: typing.Callable

    def __call__(self, values, scalars, index, multiply_add):
        grad, param, *rest = values
        residual = rest.pop(0) if self.has_residual else None
        moments = [
            x if how is None else how[0].decode(x, x.shape)
            for x, how in zip(rest, self.moments, strict=True)
        ]
        if is_narrow(grad.dtype) or is_narrow(param.dtype):
            grad = grad.astype(jnp.float32)
        master = self.format.seen(param, residual) if self.format else param
        result, *new_moments = self.program.run(
            [grad, master, *moments],
            lambda ref: leafwise.decode_scalar(scalars[_KEYS + ref.number], ref.dtype),
            multiply_add,
        )
        random = RandomBits(scalars[0], scalars[1], index=index)
        if self.format is None:
            new = result
        elif self.format.sums:
            new, residual, _ = self.format.settle(param, result, random, self.landing)
        else:
            new, residual, _ = self.format.advance(
                param, residual, result, random, self.landing
            )
        draws = draws_for_moments(random)
        stored = [
            x if how is None else how[0].encode(x, draws, how[1])
            for x, how in zip(new_moments, self.moments, strict=True)
        ]
        return [new, *([residual] if self.has_residual else []), *stored]


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
      inside: the step's prepared lists, see :class:`lowbit_optax.engine.Inside`.
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
            leaves.append(_leaf_plan(i, inside, nodes, described, scalars, landing))
        except NotElementwise as reason:
            leaves.append(str(reason))
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
    if leaf.size < (SMALLEST if format_ and format_.width else 1) or not leaf.shape:
        raise NotElementwise("")  # left to XLA without complaint
    grad, master, update = nodes.grads[i], nodes.masters[i], nodes.updates[i]
    slots = _slots_of(i, nodes, leaf.shape)
    inputs = [grad, master, *(nodes.state[s] for s in slots)]
    if landing is stay if format_ is None else format_.sums:
        (update,) = scalars.graph.call(add_p, {}, [master, update], [master.aval])
    outputs = [update, *(nodes.new_state[s] for s in slots)]
    for node in outputs:
        if node.aval.shape != leaf.shape:
            raise NotElementwise(f"a result has shape {list(node.aval.shape)}")
    program = leafwise.program_of(outputs, inputs, scalars)
    moments = tuple(
        None if how is None else (how.format, how.number)
        for how in (described[s] for s in slots)
    )
    residual = inside.residuals[i] is not None
    elementwise = format_ and format_.elementwise()
    body = Body(program, elementwise, residual, moments, landing)
    return LeafPlan(body, slots)


def _slots_of(i: int, nodes: _Nodes, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The parts of the state that the leaf's update reads or that are made of it."""
    own = {nodes.grads[i], nodes.masters[i]}
    of_update = leafwise.inputs_of([nodes.updates[i]], shape)
    found = []
    for number, (old, new) in enumerate(zip(nodes.state, nodes.new_state, strict=True)):
        if old.aval.shape != shape or new.aval.shape != shape:
            continue
        if old in of_update or own & leafwise.inputs_of([new], shape):
            found.append(number)
    return tuple(found)


def run(
    plan: Plan,
    inside,
    stored: Sequence,
    keys: tuple[jax.Array, jax.Array],
    landing,
    finish,
    implementation,
):
    """One step by a plan.

    Args:
      plan: from :func:`plan`.
      inside: as there.
      stored: the inner state's parts as they are stored.
      keys: the leaves' random keys.
      landing: as in the plan.
      finish: ``(number, update) -> (result, residual)`` of a leaf without a kernel.
      implementation: of ``fused_update``.

    Returns:
      ``(results, residuals, parts, written)``: by leaf the results and residuals, the
      parts of the inner state, and the numbers of those that kernels wrote: they are
      encoded.
    """
    known = dict(zip(plan.grads, inside.grads, strict=True))
    known |= zip(plan.masters, inside.masters, strict=True)
    known |= zip(plan.state, jax.tree.leaves(inside.moments), strict=True)
    in_kernels = {
        slot
        for leaf in plan.leaves
        if isinstance(leaf, LeafPlan)
        for slot in leaf.slots
    }
    outside = [
        n
        for i, n in enumerate(plan.updates)
        if not isinstance(plan.leaves[i], LeafPlan)
    ]
    kept = [n for s, n in enumerate(plan.new_state) if s not in in_kernels]
    evaluate([*plan.scalars.nodes, *outside, *kept], known)
    value = lambda node: known[node] if node in known else jnp.asarray(node.constant)
    table = _table([value(n) for n in plan.scalars.nodes], keys)
    new_state = {
        s: value(n) for s, n in enumerate(plan.new_state) if s not in in_kernels
    }
    results, residuals = [None] * len(plan.leaves), [None] * len(plan.leaves)
    in_kernel: dict[int, Leaf] = {}
    for i, leaf in enumerate(plan.leaves):
        if isinstance(leaf, LeafPlan):
            moments = [stored[s] for s in leaf.slots]
            in_kernel[i] = _kernel_leaf(
                leaf.body,
                inside.raw_grads[i],
                inside.leaves[i],
                inside.residuals[i],
                moments,
            )
        else:
            results[i], residuals[i] = finish(i, value(plan.updates[i]))
    for i, written in _run_leaves(plan, in_kernel, table, implementation).items():
        new, *rest = written
        body = plan.leaves[i].body
        if body.has_residual:
            residuals[i] = rest.pop(0)
        new_state |= zip(plan.leaves[i].slots, rest, strict=True)
        exact = landing is land and body.format is not None
        results[i] = difference(inside.leaves[i], new) if exact else new
    return results, residuals, [new_state[s] for s in range(len(new_state))], in_kernels


def _kernel_leaf(body: Body, grad, param, residual, moments) -> Leaf:
    operands = [Operand(grad), Operand(param)]
    if residual is not None:
        operands.append(Operand(residual, body.format.width or None))
    operands += [Operand(x) for x in moments]
    results = [
        Result(o.array.dtype, o.bits, None if i == 1 and body.landing is land else i)
        for i, o in enumerate(operands)
        if i > 0
    ]
    return Leaf(tuple(operands), tuple(results), param.shape)


def _run_leaves(plan: Plan, leaves: dict[int, Leaf], table, implementation):
    """Each leaf's results: large leaves one by one, small ones of a kind together."""
    written, small = {}, {}
    for i, leaf in leaves.items():
        body = plan.leaves[i].body
        if not leaf.packed and math.prod(leaf.shape) <= LARGEST_OF_MANY:
            dtypes = tuple(x.dtype for x in leaf.arrays)
            small.setdefault((body, dtypes), []).append(i)
            continue
        # The row is a constant and not a slice of the table: that were one more kernel.
        written[i] = _fused(
            leaf.arrays,
            table,
            np.array([i], np.uint32),
            body=body,
            like=_abstract(leaf),
            implementation=implementation,
        )
    for (body, _), numbers in small.items():
        many = _fused_many(
            [leaves[i].arrays for i in numbers],
            table,
            np.array(numbers, np.uint32),
            body=body,
            like=tuple(_abstract(leaves[i]) for i in numbers),
            implementation=implementation,
        )
        written |= zip(numbers, many, strict=True)
    return written


def _abstract(leaf: Leaf) -> Leaf:
    """The leaf without its arrays, static and hashable."""
    return leaf.with_arrays([None] * len(leaf.operands))


@functools.partial(jax.jit, static_argnames=("body", "like", "implementation"))
def _fused(arrays, table, row, *, body: Body, like: Leaf, implementation):
    """Traced and lowered once for all leaves of one shape and program."""
    leaf = like.with_arrays(arrays)
    return fused_update(
        body,
        leaf.operands,
        leaf.results,
        shape=leaf.shape,
        scalars=table,
        row=row,
        implementation=implementation,
    )


@functools.partial(jax.jit, static_argnames=("body", "like", "implementation"))
def _fused_many(arrays, table, rows, *, body: Body, like, implementation):
    leaves = [leaf.with_arrays(a) for leaf, a in zip(like, arrays, strict=True)]
    return fused_update_many(
        body, leaves, scalars=table, rows=rows, implementation=implementation
    )


def _table(
    scalars: Sequence[jax.Array], keys: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """A row of uint32 for every leaf: its keys, and the scalars that all share."""
    count = keys[0].shape[0]
    words = [*(k[:, None] for k in keys)]
    if scalars:
        shared = leafwise.encode_scalars(scalars)
        words.append(jnp.broadcast_to(shared, (count, shared.size)))
    return jnp.concatenate(words, axis=1)
