"""The two implementations of a prepared step: XLA operations and fused kernels.

Both return the same :class:`Advanced`. While a step is traced it may be unknown on
which platform it will run. Then both become branches of one program.
"""

import dataclasses
import functools
import typing
import warnings
from collections.abc import Callable, Sequence

import jax
import optax

from lowbit_optax._numerics.landing import Landing
from lowbit_optax._step import context, kernel_plan, kernel_step
from lowbit_optax._step.choices import Choices
from lowbit_optax._step.error_feedback import Feedback, fed
from lowbit_optax._step.kernel_plan import KernelPlan
from lowbit_optax._step.layer import Layer
from lowbit_optax._step.prepared import Landed, PreparedStep
from lowbit_optax._step.stacks import stacks_to_write
from lowbit_optax._step.unchanged import unless_still
from lowbit_optax._step.update_graph import UpdateGraph, trace_update
from pallas_kernels import platforms
from pallas_kernels.platforms import (
    Implementation,
    chooses_tpu_kernels,
    is_elsewhere,
    is_for_one_cpu,
    refused_gpu,
)

_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class Advanced(typing.NamedTuple):
    """The results of a step.

    Args:
      results: per leaf, the new parameter, or the update where updates are asked for.
      residuals: per leaf, the new residual; None where there is none.
      inner_state: the inner state as it is stored.
    """

    results: list
    residuals: list
    inner_state: typing.Any


def advance(
    config: Choices, prepared: PreparedStep, landing: Landing, extra_args: dict
) -> Advanced:
    """Run a step with the implementation that the configuration asks for.

    If it asks for none: with kernels on CUDA and with XLA elsewhere, chosen when the
    program is lowered for its platform. For GPUs that have no kernels
    (:func:`.platforms.refused_gpu`) with XLA, which is said once. On TPUs with kernels
    if :func:`.platforms.chooses_tpu_kernels` and they take any leaf.

    Args:
      config: of the transformation.
      prepared: the step.
      landing: how a new parameter takes the old one's place.
      extra_args: for the inner transformation.

    Raises:
      ValueError: if kernels are asked for and cannot update a leaf, naming it.
    """
    inner = optax.with_extra_args_support(config.inner)
    update = functools.partial(inner.update, **extra_args)
    chosen = config.implementation
    elsewhere = chosen is None and is_elsewhere(jax.tree.leaves(prepared.params))
    only_xla = chosen == "xla" or elsewhere or context.current().is_analysed
    if not only_xla:
        # Under jit it is traced once, for the plan and for XLA.
        update = jax.jit(update)
    try:
        traced = trace_update(update, prepared)
    except _NEEDS_VALUES:
        # Not jitted, XLA can run a transformation that looks at values; no kernel can.
        if not only_xla or any(part is not None for part in prepared.error_parts()):
            raise
        traced = None
    by_xla = ByXla(prepared, landing, update, traced)
    if only_xla or traced is None:
        return by_xla.run()
    refusal = refused_gpu() if chosen is None else None
    if refusal is not None:
        _warn_once(refusal)
        return by_xla.run()
    on_tpus = chosen is None and chooses_tpu_kernels()
    for_tpus = on_tpus or chosen == "tpu"
    plan = kernel_plan.plan(traced, prepared, landing, for_tpus=for_tpus)
    if chosen is not None:
        plan.require(prepared.names)
    if plan.is_empty:
        return by_xla.run()
    if on_tpus and not kernel_step.has_tpu_kernels(plan, prepared):
        return by_xla.run()
    by_kernels = ByKernels(prepared, landing, plan, stacks_to_write())
    if chosen is not None:
        return by_kernels.out_of_stacks(by_kernels.run(chosen))
    # Any other choice would trace kernels for other platforms as well.
    name = "tpu" if on_tpus else platforms.default_launcher()
    branch = {"tpu" if on_tpus else "cuda": lambda: by_kernels.run(name)}
    by_blocks = _by_blocks(traced, prepared, landing)
    if by_blocks is not None:
        branch["cpu"] = by_blocks.run_by_blocks
    return by_kernels.out_of_stacks(
        jax.lax.platform_dependent(
            default=lambda: by_kernels.into_stacks(by_xla.run()), **branch
        )
    )


@functools.cache
def _warn_once(refusal: str) -> None:
    warnings.warn(
        f"lowbit: XLA runs the steps, which takes more time and memory: {refusal}",
        stacklevel=2,
    )


def _by_blocks(
    traced: UpdateGraph, prepared: PreparedStep, landing: Landing
) -> "ByKernels | None":
    """How CPUs update large leaves; None where they do as :class:`ByXla`.

    In a program for many devices XLA may have to partition it, and would communicate
    for every block. A layer goes into its stack as a whole.
    """
    if context.current().layer is not None or not is_for_one_cpu():
        return None
    exact = kernel_plan.plan(traced, prepared, landing, is_exact=True)
    large = kernel_step.by_blocks_on_cpus(exact, prepared)
    return large and ByKernels(prepared, landing, large, None)


def with_errors(
    inner_state, landed: Sequence[Landed], feedback: Sequence[Feedback | None]
):
    """The new inner state, with what storing the leaves has lost.

    Args:
      inner_state: with float32 moments.
      landed, feedback: per leaf.
    """
    if all(x is None for x in feedback):
        return inner_state
    parts, treedef = jax.tree.flatten(inner_state)
    for leaf, of in zip(landed, feedback, strict=True):
        if of is not None:
            parts[of.part] = fed(parts[of.part], leaf.error, of.rate, of.growth)
    return treedef.unflatten(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class ByXla:
    """Array operations on whole leaves: the reference that defines the results.

    Args:
      prepared, landing: the step.
      inner_update: from gradients, inner state and masters to updates and state.
      traced: the inner update; None if it cannot be traced. Then what a skipped step
        leaves alone is not known, and is encoded anew.
    """

    prepared: PreparedStep
    landing: Landing
    inner_update: Callable
    traced: UpdateGraph | None

    def run(self) -> Advanced:
        """Run the step."""
        prepared = self.prepared
        updates, inner_state = prepared.inner_update(self.inner_update)
        still_leaves, still_parts = [None] * len(updates), []
        if self.traced is not None:
            still_leaves, still_parts = self.traced.still_values(prepared)
        landed = [
            prepared.land(number, update, self.landing, still)
            for number, (update, still) in enumerate(
                zip(updates, still_leaves, strict=True)
            )
        ]
        if self.traced is not None:
            feedback = self.traced.feedback_values(prepared)
            inner_state = with_errors(inner_state, landed, feedback)
        stored = prepared.moment_plan.encode(inner_state, prepared.moment_draws)
        if any(x is not None for x in still_parts):
            stored = self._unless_still(still_parts, stored)
        stored = prepared.guard.chosen(stored, prepared.stored_inner_state)
        return Advanced(
            [x.result for x in landed], [x.residual for x in landed], stored
        )

    def _unless_still(self, still_parts: list, stored):
        """The stored inner state with the parts that stay as they were stored."""
        prepared = self.prepared
        plan, structure = prepared.moment_plan, jax.tree.structure(prepared.inner_state)
        new = structure.flatten_up_to(plan.from_parallel_trees(stored))
        kept = map(unless_still, still_parts, new, prepared.stored_parts())
        return plan.to_parallel_trees(structure.unflatten(kept))


@dataclasses.dataclass(frozen=True, eq=False)
class ByKernels:
    """One pass over each leaf that has a kernel; the other leaves as :class:`ByXla`.

    Args:
      prepared, landing: the step.
      plan: which leaves kernels update, and how.
      layer: the layer that the leaves are, if kernels can write into its stacks.
    """

    prepared: PreparedStep
    landing: Landing
    plan: KernelPlan
    layer: Layer | None

    def run(self, implementation: Implementation) -> Advanced:
        """Run the step by this implementation of :func:`pallas_kernels.fused_update`.

        Where kernels write a layer into its stack, the result holds the whole stack.
        """
        return self._run(implementation)

    def run_by_blocks(self) -> Advanced:
        """Run the step by XLA, the planned leaves block by block."""
        return self._run("xla", by_blocks=True)

    def _run(
        self, implementation: Implementation, *, by_blocks: bool = False
    ) -> Advanced:
        prepared = self.prepared
        results, residuals, parts, written, still = kernel_step.run(
            self.plan,
            prepared,
            self.landing,
            self.layer,
            implementation,
            by_blocks=by_blocks,
        )
        stored, traced = prepared.stored_parts(), self.plan.traced
        encoded = prepared.moment_plan.encode_parts(
            parts, prepared.moment_draws, written
        )
        encoded = [
            new
            if i in written
            else prepared.guard.chosen(unless_still(still.get(i), new, old), old)
            for i, (new, old) in enumerate(zip(encoded, stored, strict=True))
        ]
        inner_state = prepared.moment_plan.to_parallel_trees(
            traced.state_tree.unflatten(encoded)
        )
        return Advanced(results, residuals, inner_state)

    def into_stacks(self, advanced: Advanced) -> Advanced:
        """The result of :class:`ByXla` with whole stacks where :meth:`run` has them."""
        if self.layer is None:
            return advanced
        return self.layer.into_stacks(self._overwritten, self._old, advanced)

    def out_of_stacks(self, advanced: Advanced) -> Advanced:
        """The result of :meth:`run`, with single layers in place of whole stacks."""
        if self.layer is None:
            return advanced
        return self.layer.out_of_stacks(self._overwritten, self._old, advanced)

    @functools.cached_property
    def _overwritten(self):
        return kernel_step.overwritten(self.plan, self.prepared, self.layer)

    @property
    def _old(self) -> Advanced:
        prepared = self.prepared
        return Advanced(
            prepared.params, prepared.residuals, prepared.stored_inner_state
        )
