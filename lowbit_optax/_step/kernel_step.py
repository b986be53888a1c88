"""One step by fused kernels: one pass over each leaf that the plan gives one.

Everything else is computed outside, as on the XLA path: scalars, counters, and the
leaves that no kernel takes. Which those are is in
:mod:`lowbit_optax._step.kernel_plan`.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lowbit_optax._jaxprs import elementwise
from lowbit_optax._jaxprs.graph import evaluate
from lowbit_optax._numerics.landing import difference, land
from lowbit_optax._step.kernel_plan import WHEN, Body, LeafPlan, Plan
from lowbit_optax._step.stacks import Layer
from pallas_kernels.bitfields.fields import GROUP
from pallas_kernels.fused_update import (
    LARGEST_OF_MANY,
    Leaf,
    Operand,
    Result,
    fused_update,
    fused_update_many,
)


def run(
    plan: Plan,
    inside,
    stored: Sequence,
    keys: tuple[jax.Array, jax.Array],
    landing,
    finish,
    implementation,
    layer: Layer | None = None,
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
      layer: of which stacks the leaves are, if they are.

    Returns:
      ``(results, residuals, parts, written)``: by leaf the results and residuals, the
      parts of the inner state, and the numbers of those that kernels wrote: they are
      encoded. In the places of :func:`overwritten` there are whole stacks.
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
            in_kernel[i] = _stacked(
                _kernel_leaf(
                    leaf.body,
                    inside.raw_grads[i],
                    inside.leaves[i],
                    inside.residuals[i],
                    moments,
                ),
                layer,
            )
        else:
            results[i], residuals[i] = finish(i, value(plan.updates[i]))
    index = None if layer is None else layer.index
    for i, written in _run_leaves(
        plan, in_kernel, table, implementation, index
    ).items():
        new, *rest = written
        body = plan.leaves[i].body
        if body.has_residual:
            residuals[i] = rest.pop(0)
        moments = _moments_of(body, rest)
        new_state |= zip(plan.leaves[i].slots, moments, strict=True)
        exact = landing is land and body.format is not None
        results[i] = difference(inside.leaves[i], new) if exact else new
    return results, residuals, [new_state[s] for s in range(len(new_state))], in_kernels


def overwritten(plan: Plan, inside, stored: Sequence, layer: Layer) -> set[int]:
    """Ids of the arrays that kernels overwrite in their stacks.

    Args:
      plan, inside, stored, layer: as for :func:`run`.
    """
    found = set()
    for i, leaf in enumerate(plan.leaves):
        if not isinstance(leaf, LeafPlan):
            continue
        alone = _kernel_leaf(
            leaf.body,
            inside.raw_grads[i],
            inside.leaves[i],
            inside.residuals[i],
            [stored[s] for s in leaf.slots],
        )
        if _stacked(alone, layer).stacked:
            found |= {id(alone.operands[n].array) for n in alone.overwritten}
    return found


def _stacked(leaf: Leaf, layer: Layer | None) -> Leaf:
    """The leaf as a layer to be written into its stacks, where these may be."""
    if layer is None:
        return leaf
    arrays = {n: layer.stack_of(leaf.operands[n].array) for n in leaf.overwritten}
    if not arrays or any(x is None for x in arrays.values()):
        return leaf
    operands = [
        dataclasses.replace(operand, array=arrays.get(n, operand.array))
        for n, operand in enumerate(leaf.operands)
    ]
    return dataclasses.replace(leaf, operands=tuple(operands), stacked=True)


def _kernel_leaf(body: Body, grad, param, residual, moments) -> Leaf:
    operands = [Operand(grad), Operand(param)]
    if residual is not None:
        operands.append(Operand(residual, body.format.width or None))
    group = GROUP
    for i, stored in enumerate(moments):
        if i in body.groups:
            format_, _ = body.moments[i]
            group = format_.block_size
            operands.append(Operand(stored.codes, format_.bits))
        else:
            operands.append(Operand(stored))
    scales = [moments[i].scales for i in body.groups]
    operands += [Operand(x, per_group=True) for x in scales]
    results = [
        Result(
            o.array.dtype,
            o.bits,
            None if i == 1 and body.landing is land else i,
            o.per_group,
        )
        for i, o in enumerate(operands)
        if i > 0
    ]
    return Leaf(tuple(operands), tuple(results), param.shape, group=group)


def _moments_of(body: Body, written: list) -> list:
    """The moments as they are stored, from their arrays and then all scales."""
    count = len(body.moments)
    moments, scales = written[:count], written[count:]
    for i, scale in zip(body.groups, scales, strict=True):
        moments[i] = body.moments[i][0].container(moments[i], scale)
    return moments


def _run_leaves(plan: Plan, leaves: dict[int, Leaf], table, implementation, layer):
    """Each leaf's results: large leaves one by one, small ones of a kind together."""
    written, small = {}, {}
    for i, leaf in leaves.items():
        body = plan.leaves[i].body
        alone = leaf.packed or leaf.grouped or leaf.stacked
        if not alone and math.prod(leaf.shape) <= LARGEST_OF_MANY:
            dtypes = tuple(x.dtype for x in leaf.arrays)
            small.setdefault((body, dtypes), []).append(i)
            continue
        # The row is a constant and not a slice of the table: that were one more kernel.
        written[i] = _fused(
            leaf.arrays,
            table,
            np.array([i], np.uint32),
            layer if leaf.stacked else None,
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
def _fused(arrays, table, row, layer, *, body: Body, like: Leaf, implementation):
    """Traced and lowered once for all leaves of one shape and program."""
    leaf = like.with_arrays(arrays)
    return fused_update(
        body,
        leaf.operands,
        leaf.results,
        shape=leaf.shape,
        group=leaf.group,
        scalars=table,
        row=row,
        layer=layer,
        when=WHEN if body.guarded else None,
        implementation=implementation,
    )


@functools.partial(jax.jit, static_argnames=("body", "like", "implementation"))
def _fused_many(arrays, table, rows, *, body: Body, like, implementation):
    leaves = [leaf.with_arrays(a) for leaf, a in zip(like, arrays, strict=True)]
    return fused_update_many(
        body,
        leaves,
        scalars=table,
        rows=rows,
        when=WHEN if body.guarded else None,
        implementation=implementation,
    )


def _table(
    scalars: Sequence[jax.Array], keys: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """A row of uint32 for every leaf: its keys, and the scalars that all share."""
    count = keys[0].shape[0]
    words = [*(k[:, None] for k in keys)]
    if scalars:
        shared = elementwise.encode_scalars(scalars)
        words.append(jnp.broadcast_to(shared, (count, shared.size)))
    return jnp.concatenate(words, axis=1)
