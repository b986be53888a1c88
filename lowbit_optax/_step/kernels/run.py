"""``run_kernels``: runs one step with fused kernels, in one pass over each leaf.

:mod:`lowbit_optax._step.backends` calls :func:`run_kernels` with a planned step. XLA
computes everything outside of the kernels: scalars, counters, and leaves without a
kernel. :mod:`lowbit_optax._step.kernels.plan` decides which leaves have a kernel, and
:mod:`lowbit_optax._step.kernels.launches` decides which leaves share a launch.
"""

import typing

from lowbit_optax._step.kernels.launches import Launches
from lowbit_optax._step.kernels.plan import KernelPlan
from lowbit_optax._step.step import Step, Stepped
from pallas_kernels.platforms import Implementation


def run_kernels(
    plan: KernelPlan,
    step: Step,
    implementation: Implementation | typing.Literal["blocks"],
) -> Stepped:
    """Update leaves with kernels, and all other leaves with XLA.

    Args:
      plan: which leaves kernels update, and how.
      step: the planned step, or its copy for another branch.
      implementation: see :func:`pallas_kernels.fused_update`. With ``"blocks"``, XLA
        updates the leaves of the plan block by block.
    """
    traced, kernels, nodes = plan.traced, plan.kernels, plan.traced.nodes
    written = {part for x in kernels.values() for part in x.parts}
    others = {i: x for i, x in enumerate(nodes.updates) if i not in kernels}
    rest = {i: x for i, x in enumerate(nodes.new_state) if i not in written}
    feedback = {
        i: x for i, x in enumerate(traced.feedback) if x is not None and i in others
    }
    outside = [node for x in kernels.values() for node in x.outside]
    wanted = [*plan.scalars.nodes, *rest.values(), *outside]
    first = step.plan.stored_first & rest.keys()
    if not first:
        wanted += others.values()
    wanted += [x for into in feedback.values() for x in into[1:]]
    # Plans of blocks have no sums.
    sums = plan.sums.values(step, typing.cast(Implementation, implementation))
    values = traced.values(step, wanted, sums)
    parts = {i: values[x] for i, x in rest.items()}
    if first:
        given = [parts.get(i) for i in range(len(nodes.new_state))]
        updates, given = traced.updates_from_stored(step, others, given, first)
        values |= zip(others.values(), updates, strict=True)
        parts |= {i: given[i] for i in first}
    results: list = [None] * len(step.leaves)
    residuals: list = [None] * len(step.leaves)
    for i, node in others.items():
        into = feedback[i].with_values(values) if i in feedback else None
        landed = step.landed(i, values[node], parts, into)
        results[i], residuals[i] = landed.result, landed.residual
    launches = Launches(
        bodies={i: x.body for i, x in kernels.items()},
        step=step,
        scalars=[values[x] for x in plan.scalars.nodes],
        implementation=implementation,
    )
    for i, arrays in launches.run(plan.arrays(step, values)).items():
        leaf = step.leaves[i]
        results[i], residuals[i], moments = kernels[i].body.stored(leaf, arrays)
        parts |= zip(kernels[i].parts, moments, strict=True)
    draws = step.draws if any(step.plan.storage[i] for i in rest) else {}
    stored = [parts[i] for i in range(len(parts))]
    stored = step.plan.encode(stored, draws, written | first)
    if traced.keeps_structure:
        for i in rest:
            stored[i] = step.guard.chosen(stored[i], step.parts[i])
    before = step.state.inner_state
    inner_state = step.plan.tree(traced.state_structure, stored, before)
    return Stepped(results, residuals, inner_state)
