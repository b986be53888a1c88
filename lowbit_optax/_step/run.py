"""``run``: chooses how each leaf of a step is updated, and runs the step.

:meth:`.engine.Lowbit.run` calls :func:`run` with a :class:`.step.Step` and the inner
update. A leaf is updated in one of three ways, chosen before any leaf is joined or
decoded:

    kernels    leaves with a program of elementwise operations, on GPUs and TPUs; on
               GPUs, XLA may compute arrays that the program of a packed leaf reads
    blocks     leaves with such a program, on one CPU: XLA's operations on one block
               after the other
    XLA        all other leaves: operations on whole leaves, which define the results

A step is traced for the platform that JAX will probably lower it for. The ways for
other platforms are traced if the program is lowered for them.
"""

import contextlib
import dataclasses
import typing
from collections.abc import Callable, Collection, Mapping

import jax

from lowbit_optax._jaxprs.graph import Node
from lowbit_optax._numerics import bitmaps
from lowbit_optax._step import context
from lowbit_optax._step.error_feedback import feedback_of, land, parts_for_errors
from lowbit_optax._step.inner_update import InnerUpdate, trace_update
from lowbit_optax._step.launches import Launches
from lowbit_optax._step.plan import (
    KernelPlan,
    perhaps_partitioned,
    plan_kernels,
    warn_once,
    warning_of,
)
from lowbit_optax._step.step import Step
from pallas_kernels.fused_update.shards import has_explicit_axes
from pallas_kernels.lowered import for_one_device
from pallas_kernels.platforms import (
    Implementation,
    chosen_by_platform,
    is_elsewhere,
    is_for_one_cpu,
    is_for_tpus,
    launcher_name,
    platform_of,
    refused_gpu,
    target_gpu,
)

NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""The errors that JAX raises if traced code needs concrete values."""


class Stepped(typing.NamedTuple):
    """The results of a step, with one element per leaf in each list.

    Args:
      results: the new parameters or updates.
      residuals: the new residuals; None for a leaf without one.
      inner_state: the new inner state in its stored form.
      changed: bitmaps of the changed weights; None if they are not wanted.
    """

    results: list
    residuals: list
    inner_state: typing.Any
    changed: list


def run(
    step: Step,
    update: Callable,
    implementation: Implementation,
    warn: bool,
    is_checked: bool = False,
) -> Stepped:
    """Run a step with the given implementation, or with the best one for the platform.

    Args:
      step: the checked arguments.
      update: the inner update, a function of float32 gradients, state and masters.
      implementation: see :data:`pallas_kernels.platforms.Implementation`.
      warn: whether to warn about large leaves that XLA updates on an accelerator.
      is_checked: whether a trace has checked the inner transformation before.
    """
    is_eager = is_elsewhere(jax.tree.leaves(step.params))
    only_xla = implementation == "xla" or context.current().is_analysed
    only_xla = only_xla or (implementation is None and is_eager)
    needs_graph = bool(parts_for_errors(step.plan) or step.plan.stored_first)
    if is_eager and only_xla and not needs_graph:
        # Python code of the update may read concrete values.
        if not is_checked:
            with contextlib.suppress(*NEEDS_VALUES):
                trace_update(update, step)
        results = step.inner_update(update)
        with context.changed(of_wrappers=tuple(jax.tree.leaves(results))):
            return _by_xla(trace_update(lambda *_: results, step))
    traced = trace_update(update, step)
    if only_xla:
        return _by_xla(traced)
    if implementation is None:
        return _by_platform(traced, warn)
    plan = plan_kernels(traced, for_tpus=implementation == "tpu")
    plan.require()
    return _run_plan(plan, implementation)


def _by_platform(traced: InnerUpdate, warn: bool) -> Stepped:
    """Run a step with kernels on CUDA and TPUs, and with XLA on other platforms.

    XLA also runs the step on GPUs that kernels do not support (:func:`.refused_gpu`).
    """
    refusal, mesh = refused_gpu(), _mesh(traced.step)
    if refusal is not None:
        if warn:
            cost = "which needs more time and memory"
            warn_once(f"lowbit: XLA runs the steps, {cost}: {refusal}")
        return _by_xla(traced)
    accelerator = "tpu" if is_for_tpus(mesh) else "cuda"
    branches: dict[str, Callable] = {accelerator: lambda x: _on_accelerator(x, warn)}
    # Three cases cannot use blocks. In a program for several devices, XLA may partition
    # each block and communicate for it. On explicit axes, each array in a block would
    # need a sharding. A layer is written to its stack as a whole.
    step = traced.step
    if step.layer is None and is_for_one_cpu() and _explicit_mesh(step) is None:
        branches["cpu"] = _by_blocks
    expected = None if context.current().group_of else platform_of(mesh)
    return chosen_by_platform(expected, branches, _by_xla, [traced])


def _on_accelerator(traced: InnerUpdate, warn: bool) -> Stepped:
    on_tpus = is_for_tpus(_mesh(traced.step))
    plan = plan_kernels(traced, for_tpus=on_tpus)
    reasons = plan.why_not(on_tpus=on_tpus)
    message = warning_of(plan, reasons)
    if warn and message and (on_tpus or target_gpu() is not None):
        warn_once(message)
    if not set(plan.kernels) - set(reasons):
        return _by_xla(traced)
    perhaps = warning_of(plan, perhaps_partitioned(plan)) if on_tpus and warn else None
    if perhaps is not None:
        # The program warns when it is lowered for several devices.
        same = for_one_device(lambda x: [x], lambda x: [x], perhaps)
        step = dataclasses.replace(traced.step, count=same(traced.step.count)[0])
        plan = plan_kernels(dataclasses.replace(traced, step=step), for_tpus=True)
    # With a named launcher, JAX does not trace kernels for other platforms.
    return _run_plan(plan, "tpu" if on_tpus else launcher_name(None))


def _by_blocks(traced: InnerUpdate) -> Stepped:
    large = plan_kernels(traced, is_exact=True).only_blocks()
    return _run_plan(large, "blocks")


def explained(
    step: Step, update: Callable, implementation: Implementation
) -> dict[str, str]:
    """Return a dict from leaf path to the backend and its reason; see ``explain``."""
    on_tpus = is_for_tpus(_mesh(step))
    texts = dict.fromkeys(step.names, "XLA")
    refusal = refused_gpu()
    if implementation == "xla" or not (on_tpus or target_gpu() is not None):
        return texts
    if refusal is not None:
        return dict.fromkeys(step.names, f"XLA: {refusal}")
    plan = plan_kernels(trace_update(update, step), for_tpus=on_tpus)
    reasons = plan.why_not(on_tpus=on_tpus)
    perhaps = perhaps_partitioned(plan) if on_tpus else {}
    alone = "a kernel in a program for one device, else XLA"
    texts |= {step.names[i]: "a kernel" for i in plan.kernels}
    texts |= {step.names[i]: f"{alone}: {why}" for i, why in perhaps.items()}
    texts |= {step.names[i]: f"XLA: {why}" for i, why in reasons.items()}
    return texts


def _mesh(step: Step):
    """Return the mesh of any leaf whose sharding is known, or None."""
    mesh = _explicit_mesh(step)
    if mesh is not None:
        return mesh
    return next((x.sharding.mesh for x in step.leaves if x.sharding is not None), None)


def _explicit_mesh(step: Step):
    """Return the mesh of the first leaf on explicit axes, or None."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(step.params))
    return next(filter(has_explicit_axes, meshes), None)


def _by_xla(traced: InnerUpdate) -> Stepped:
    """Run a step with array operations of XLA on whole leaves."""
    step, nodes = traced.step, traced.nodes
    updates, new_state = step.inner_update(traced.update)
    results = *step.parts_of_updates(updates), *jax.tree.leaves(new_state)
    known = dict(zip([*nodes.updates, *nodes.new_state], results, strict=True))
    return _run_plan(KernelPlan(traced, feedback=feedback_of(traced)), "xla", known)


def _run_plan(
    plan: KernelPlan,
    implementation: Implementation | typing.Literal["blocks"],
    known: Mapping[Node, jax.Array] | None = None,
) -> Stepped:
    """Update leaves with kernels, and all other leaves with XLA.

    Args:
      plan: which leaves kernels update, and how.
      implementation: see :func:`pallas_kernels.fused_update`. With ``"blocks"``, XLA
        updates the leaves of the plan block by block.
      known: dict from nodes to values that are already known.
    """
    traced, step, kernels = plan.traced, plan.traced.step, plan.kernels
    if known is None:
        if not kernels:
            return _by_xla(traced)
        # Plans of blocks have no sums.
        known = plan.sums.values(traced, typing.cast(Implementation, implementation))
    others = {i: x for i, x in enumerate(traced.nodes.updates) if i not in kernels}
    written = {part for x in kernels.values() for part in x.parts}
    values, parts, stored = _outside(plan, others, written, known)
    results: list = [None] * len(step.leaves)
    residuals: list = [None] * len(step.leaves)
    changed: list = [None] * len(step.leaves)
    for i, node in others.items():
        landed = land(step, i, values[node], parts, plan.feedback.get(i), values)
        results[i], residuals[i] = landed.result, landed.residual
    for i, new in _by_kernels(plan, implementation, values).items():
        results[i], residuals[i], moments, changed[i] = new
        parts |= zip(kernels[i].parts, moments, strict=True)
    changed = _marks(step, results, changed)
    new_state = _new_state(traced, parts, written, stored)
    return Stepped(results, residuals, new_state, changed)


def _marks(step: Step, results: list, changed: list) -> list:
    """Return bitmaps of the changed weights of all leaves, if they are wanted."""
    if step.on_changes is None:
        return changed
    return [
        jax.tree.map(bitmaps.of_changes, leaf.param, new) if mark is None else mark
        for leaf, new, mark in zip(step.leaves, results, changed, strict=True)
    ]


def _outside(
    plan: KernelPlan,
    others: Mapping[int, Node],
    written: Collection[int],
    known: Mapping[Node, jax.Array],
) -> tuple[dict, dict, frozenset[int]]:
    """Compute with XLA what kernels read and do not compute.

    Args:
      plan, known: see :func:`_run_plan`.
      others: dict from leaf index to update, for leaves without a kernel.
      written: indices of the parts of the state that kernels write.

    Returns:
      ``(values, parts, stored)``: a dict of values by node, a dict of the other parts
      of the new state by index, and the indices of those that are already stored.
    """
    traced, nodes = plan.traced, plan.traced.nodes
    rest = {i: x for i, x in enumerate(nodes.new_state) if i not in written}
    first = traced.step.plan.stored_first & rest.keys()
    feedback = [x for i, x in plan.feedback.items() if i in others]
    wanted = [*plan.scalars, *rest.values()]
    wanted += [node for x in plan.kernels.values() for node in x.outside]
    wanted += [node for x in feedback for node in x[1:]]
    if not first:
        wanted += others.values()
    values = traced.values(wanted, known)
    parts = {i: values[x] for i, x in rest.items()}
    if first:
        given = [parts.get(i) for i in range(len(nodes.new_state))]
        updates, given = traced.updates_from_stored(others, given, first)
        values |= zip(others.values(), updates, strict=True)
        parts |= {i: given[i] for i in first}
    return values, parts, first


def _new_state(
    traced: InnerUpdate,
    parts: Mapping[int, typing.Any],
    written: Collection[int],
    stored: Collection[int],
):
    """Return the new inner state in its stored form.

    Args:
      traced: the inner update.
      parts: its new parts by index.
      written: indices of parts that kernels have stored, unless the guard skips them.
      stored: indices of other parts that are already stored.
    """
    step, plan = traced.step, traced.step.plan
    rest = [i for i in parts if i not in written]
    draws = step.draws if any(plan.storage[i] for i in rest) else {}
    done = [parts[i] for i in range(len(parts))]
    done = plan.encode(done, draws, {*written, *stored})
    if traced.keeps_structure:
        for i in rest:
            done[i] = step.guard.chosen(done[i], step.parts[i])
    before = step.state.inner_state
    inner_state = plan.tree(traced.state_structure, done, before)
    return (
        inner_state
        if traced.keeps_structure
        else step.guard.chosen(inner_state, before)
    )


def _by_kernels(plan: KernelPlan, implementation, values: Mapping) -> dict[int, tuple]:
    """Return the results of ``LeafBody.stored`` for each leaf with a kernel."""
    if not plan.kernels:
        return {}
    step, bodies = plan.traced.step, {i: x.body for i, x in plan.kernels.items()}
    scalars = [values[x] for x in plan.scalars]
    launches = Launches(bodies, step, scalars, implementation)
    written = launches.run(plan.arrays(values)).items()
    return {i: bodies[i].stored(step.leaves[i], arrays) for i, arrays in written}
