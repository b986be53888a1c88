"""One step by fused kernels: one pass over each leaf that has a kernel.

Everything else is computed outside the kernels, as on the XLA path: scalars, counters,
and leaves without a kernel. :mod:`lowbit_optax._step.kernel_plan` decides which leaves
have one.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from lowbit_optax._jaxprs import scalar_words
from lowbit_optax._jaxprs.graph import evaluate
from lowbit_optax._numerics.landing import Landing
from lowbit_optax._numerics.random_bits import take_in
from lowbit_optax._step.body import KEYS, LeafBody
from lowbit_optax._step.error_feedback import fed
from lowbit_optax._step.guard import neutral_updates
from lowbit_optax._step.kernel_launches import Launches, block_by_block
from lowbit_optax._step.kernel_plan import KernelPlan, LeafKernel
from lowbit_optax._step.layer import Layer
from lowbit_optax._step.layer_loops import needs_loop
from lowbit_optax._step.norms import sums_of_gradients
from lowbit_optax._step.prepared import PreparedStep
from lowbit_optax._step.shards import axes_of_shards, number_of_shard
from lowbit_optax._step.stacks import first_elements
from lowbit_optax._step.unchanged import unless_still
from lowbit_optax.formats.quantized_weights import result_of
from pallas_kernels.fused_update import Leaf, Operand, Result, blocked
from pallas_kernels.fused_update.launchers import tpu_launcher
from pallas_kernels.platforms import Implementation


def run(
    plan: KernelPlan,
    prepared: PreparedStep,
    landing: Landing,
    layer: Layer | None,
    implementation: Implementation,
    *,
    by_blocks: bool = False,
) -> tuple[list, list, list, frozenset[int], dict]:
    """Run one step according to a plan.

    Args:
      plan, prepared, landing: of the step.
      layer: the layer that the leaves are, if kernels can write into its stacks.
      implementation: as in :func:`pallas_kernels.fused_update`.
      by_blocks: whether XLA updates the leaves block by block, in place of kernels.

    Returns:
      ``(results, residuals, parts, written, still)``: the result and residual of each
      leaf, the parts of the inner state, the indices of the parts that kernels have
      written, which are encoded already, and by the indices of others whether they stay
      as they are stored, where a condition says so. The arrays that :func:`overwritten`
      names are replaced by whole stacks.
    """
    kernels, nodes = plan.kernels, plan.traced.nodes
    written = frozenset(slot for x in kernels.values() for slot in x.slots)
    outside = [n for i, n in enumerate(nodes.updates) if i not in kernels]
    kept = {s: n for s, n in enumerate(nodes.new_state) if s not in written}
    of_leaves, of_parts = plan.traced.still_leaves, plan.traced.still_parts
    conditions = [x for x in (*of_leaves, *(of_parts[s] for s in kept)) if x]
    feedback = {
        i: x
        for i, x in enumerate(plan.traced.feedback)
        if x is not None and i not in kernels
    }
    for of_errors in feedback.values():
        outside += [of_errors.rate, of_errors.growth]
    others = [*outside, *kept.values(), *conditions]
    value = _evaluated(plan, prepared, others, implementation)
    still = [x and value(x) for x in of_leaves]
    scalars = [value(n) for n in plan.scalars.nodes]
    parts = {s: value(node) for s, node in kept.items()}
    results: list = [None] * len(plan.leaves)
    residuals: list = [None] * len(plan.leaves)
    for i, node in enumerate(nodes.updates):
        if i not in kernels:
            landed = prepared.land(i, value(node), landing, still[i])
            results[i], residuals[i], error = landed
            if i in feedback:
                part, *rates = feedback[i]
                parts[part] = fed(parts[part], error, *map(value, rates))
    leaves = _kernel_leaves(plan, prepared, layer)
    bodies = {i: kernel.body for i, kernel in kernels.items()}
    plain = scalar_words.plain_scalars(scalars)
    if by_blocks:
        launched = block_by_block(bodies, leaves, prepared.keys, plain)
    else:
        firsts = first_elements(prepared.names, prepared.params)
        axes = {i: axes_of_shards(prepared.params[i]) for i in kernels}
        tables = {x: _table(scalars, prepared.keys, x) for x in {*axes.values()}}
        launches = Launches(bodies, axes, tables, plain, firsts, layer, implementation)
        launched = launches.results(leaves)
    for i, arrays in launched.items():
        param, body = prepared.params[i], kernels[i].body
        new, *rest = arrays
        if body.has_residual:
            residuals[i] = rest.pop(0)
        moments, scales = rest[: len(body.moments)], rest[len(body.moments) :]
        if body.quantized is not None:
            new = dataclasses.replace(param, codes_v2=new, scales_v2=scales.pop(0))
            results[i] = result_of(param, new, landing)
        else:
            results[i] = landing.result(param, new) if body.format else new
        if not landing.is_direct:
            unchanged = neutral_updates(results[i])
            results[i] = unless_still(still[i], results[i], unchanged)
        stored = _moments_of(body, moments, scales)
        parts |= zip(kernels[i].slots, stored, strict=True)
    parts = [parts[s] for s in range(len(parts))]
    still_parts = {s: value(of_parts[s]) for s in kept if of_parts[s]}
    return results, residuals, parts, written, still_parts


def by_blocks_on_cpus(plan: KernelPlan, prepared: PreparedStep) -> KernelPlan | None:
    """The part of a plan that is for leaves which XLA updates block by block on CPUs.

    None if there are none, and where the order of operations matters that
    :meth:`.Guard.unscaled` keeps on CPUs.
    """
    if prepared.guard.scalars:
        return None
    large = [
        i
        for i, leaf in _kernel_leaves(plan, prepared, None).items()
        if blocked.accepts(leaf) and not needs_loop(leaf.shape)
    ]
    leaves = [x if i in large else "" for i, x in enumerate(plan.leaves)]
    return dataclasses.replace(plan, leaves=leaves) if large else None


def has_tpu_kernels(plan: KernelPlan, prepared: PreparedStep) -> bool:
    """Whether a kernel for TPUs takes any of the leaves."""
    leaves = _kernel_leaves(plan, prepared, None)
    columns = KEYS + len(plan.scalars.nodes)
    return any(
        tpu_launcher().accepts(plan.kernels[i].body, leaf, columns)
        for i, leaf in leaves.items()
    )


def overwritten(
    plan: KernelPlan, prepared: PreparedStep, layer: Layer | None
) -> list[jax.Array]:
    """The layers that kernels overwrite in their stacks, to be compared by identity.

    Args:
      plan, prepared, layer: as for :func:`run`.
    """
    alone = _kernel_leaves(plan, prepared, None)
    in_stacks = _kernel_leaves(plan, prepared, layer)
    return [
        alone[i].operands[n].array
        for i, leaf in in_stacks.items()
        if leaf.stacked
        for n in alone[i].overwritten
    ]


def _evaluated(
    plan: KernelPlan,
    prepared: PreparedStep,
    others: list,
    implementation: Implementation,
):
    """A function that gives the value of a scalar of the plan or of another node."""
    nodes, wanted = plan.traced.nodes, [*plan.scalars.nodes, *others]
    known = sums_of_gradients(wanted, nodes.grads, prepared, implementation)
    known |= zip(nodes.grads, prepared.grads, strict=True)
    known |= zip(nodes.masters, prepared.masters, strict=True)
    known |= zip(nodes.state, jax.tree.leaves(prepared.inner_state), strict=True)
    evaluate(wanted, known)
    return lambda node: known[node] if node in known else jnp.asarray(node.constant)


def _kernel_leaves(
    plan: KernelPlan, prepared: PreparedStep, layer: Layer | None
) -> dict[int, Leaf]:
    """The arrays that the kernels read and write, by index of the leaf."""
    stored = prepared.stored_parts()
    return {
        i: _stacked(_kernel_leaf(i, kernel, prepared, stored), layer)
        for i, kernel in plan.kernels.items()
    }


def _stacked(leaf: Leaf, layer: Layer | None) -> Leaf:
    """The leaf as a layer that is written into its stacks, if they can be written."""
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


def _kernel_leaf(i: int, kernel: LeafKernel, prepared: PreparedStep, stored) -> Leaf:
    body, param, residual = kernel.body, prepared.params[i], prepared.residuals[i]
    operands = [Operand(prepared.given_grads[i])]
    quantized = body.quantized is not None
    operands.append(Operand(param.codes, param.bits) if quantized else Operand(param))
    if residual is not None:
        width = body.format.width if body.format else 0
        operands.append(Operand(residual, width or None))
    moments = [stored[s] for s in kernel.slots]
    for number, moment in enumerate(moments):
        if number in body.scaled:
            format_ = body.moment_format(number)
            operands.append(Operand(moment.codes, format_.bits))
        else:
            operands.append(Operand(moment))
    of_param = {1, len(operands)} if quantized else {1}
    scales = [param.scales] if quantized else []
    scales += [moments[n].scales for n in body.scaled]
    operands += [
        Operand(x, block_size=size)
        for x, size in zip(scales, body.block_sizes, strict=True)
    ]
    # Every operand but the gradient has a result that overwrites it. If updates are
    # returned, the old parameter is still needed, and its result gets its own array.
    kept = frozenset() if body.landing.is_direct else of_param
    results = [
        Result(
            o.array.dtype,
            o.bits,
            None if n in kept else n,
            o.block_size,
        )
        for n, o in enumerate(operands)
        if n > 0
    ]
    return Leaf(tuple(operands), tuple(results), param.shape)


def _moments_of(body: LeafBody, moments: list, scales: list) -> list:
    """The stored moments, from their arrays and scales."""
    for i, scale in zip(body.scaled, scales, strict=True):
        moments[i] = body.moment_format(i).container(moments[i], scale)
    return moments


def _table(
    scalars: Sequence[jax.Array],
    keys: tuple[jax.Array, jax.Array],
    axes: tuple[str, ...],
) -> jax.Array:
    """A uint32 table with a row per leaf: its keys, and the scalars that all share.

    Args:
      scalars: that all share.
      keys: of whole leaves.
      axes: of the user's ``jax.shard_map`` over which the shards differ.
    """
    if axes:
        keys = take_in(*keys, number_of_shard(axes))
    count = keys[0].shape[0]
    words = [*(k[:, None] for k in keys)]
    if scalars:
        shared = scalar_words.encode_scalars(scalars)
        words.append(jnp.broadcast_to(shared, (count, shared.size)))
    return jnp.concatenate(words, axis=1)
