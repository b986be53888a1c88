"""A step: the loss, a pass that measures gradients if need be, and one that updates."""

import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp

from lowbit_optax._step.guard import Guard
from lowbit_optax.loss_scaling.guarded import Sizes
from lowbit_optax.release.gates import (
    AllOrNothing,
    Gate,
    Measure,
    Measured,
    Open,
    PartByPart,
    loss_scaled,
    without_scale,
)
from lowbit_optax.release.host_memory import placed
from lowbit_optax.release.ordering import tied
from lowbit_optax.release.parts import Optimizer
from lowbit_optax.release.passes import MeasuringPass, UpdatesPass
from lowbit_optax.release.plan import ReleasePlan
from lowbit_optax.release.reverse import Reverse, run_forward
from lowbit_optax.release.traced_loss import TracedLoss


def released_step(
    loss: TracedLoss,
    plan: ReleasePlan,
    tx,
    opt_state,
    max_grad_norm: float | None,
    overflow: str,
    state_memory: str,
) -> tuple:
    """The value, the parameters and the state after a step.

    Args:
      loss, plan: of the optimizer without its loss scale.
      tx, opt_state, max_grad_norm, overflow, state_memory: of
        :func:`lowbit_optax.release.value_and_update`.

    Returns:
      ``(value, params, opt_state)``, and what was skipped if ``overflow`` is "layer".
    """
    scaled, (inner, inner_state) = loss_scaled(tx), without_scale(tx, opt_state)
    state, treedef = jax.tree.flatten(inner_state)
    on_host = state_memory == "pinned_host"
    state = placed(state, plan.stack_numbers if on_host else ())
    computed = run_forward(loss.program, plan.stretches, plan.active, _arguments(loss))
    value, *_ = computed.outputs
    factor, start = None, jnp.ones_like(value)
    if scaled is not None:
        factor = jnp.float32(1) / opt_state.scale
        start = opt_state.scale.astype(value.dtype)
    is_exact = scaled is not None and overflow == "exact"
    measure = Measure(inner, max_grad_norm is not None, is_exact, factor)
    start, measured = _measured(computed, start, measure)
    gate, transform_gradient = _treatment(inner, measured, factor, max_grad_norm)
    optimizer = Optimizer(inner, state, treedef, plan.state_stacks, transform_gradient)
    updates = UpdatesPass(loss, optimizer, plan.parts, gate)
    left = computed.go_back(start, updates)
    of_no_gradient = plan.of_no_gradient() if isinstance(gate, PartByPart) else ()
    params, state = updates.finished(plan.last, left, of_no_gradient)
    state = jax.tree.unflatten(treedef, state)
    params = loss.tree_of(params)
    value = loss.result(computed.outputs)
    if scaled is None:
        return value, params, state
    if isinstance(measured.sizes, Sizes):
        return value, params, scaled.after(opt_state, state, measured.sizes)
    skipped = loss.tree_of({name: ~x.finite for name, x in updates.found.items()})
    state = scaled.after(opt_state, state, updates.sizes())
    return value, params, state, skipped


def _measured(
    computed: Reverse, start: jax.Array, measure: Measure
) -> tuple[jax.Array, Measured]:
    """What a backward pass finds, and the cotangent with which the next one begins."""
    if not measure:
        return start, measure.of_none()
    measuring = MeasuringPass(measure)
    rest = computed.go_back(start, measuring)
    measured = measure.added(measuring.measured, rest.values())
    # Else XLA would see that both passes compute the same gradients, and keep them.
    return tied((start, measured))


def _treatment(
    tx, measured: Measured, factor: jax.Array | None, max_grad_norm: float | None
) -> tuple[Gate, Callable[[jax.Array], jax.Array]]:
    """Which updates happen, and what is done to their gradients before."""
    guard = None
    if factor is not None and isinstance(measured.sizes, Sizes):
        guard = Guard(factor, measured.sizes.finite)
    clip: typing.Any = lambda grad: grad
    if max_grad_norm is not None:
        clip = functools.partial(_clipped, jnp.sqrt(measured.squares), max_grad_norm)
    if factor is None:
        return Open(), clip
    if guard is None:
        return PartByPart(tx, factor), clip
    if max_grad_norm is None:
        return AllOrNothing(guard), clip
    # The norm is that of the unscaled gradients.
    unscaled = Guard(jnp.float32(1), guard.proceed)
    return AllOrNothing(unscaled), lambda grad: clip(guard.unscaled(grad))


def _clipped(norm: jax.Array, max_norm: float, grad: jax.Array) -> jax.Array:
    """``optax.clip_by_global_norm`` of one gradient, by the norm of all of them."""
    clipped = grad.astype(jnp.float32) / norm * jnp.float32(max_norm)
    return jnp.where(norm < jnp.float32(max_norm), grad, clipped.astype(grad.dtype))


def _arguments(loss: TracedLoss) -> list:
    """Of the loss's program."""
    found = []
    for leaf in loss.leaves:
        arrays = dict(zip(leaf.array_values, leaf.arrays, strict=True))
        if leaf.is_quantized:
            assert leaf.gradient_value is not None
            arrays[leaf.gradient_value] = leaf.zero_gradient()
        found += [arrays[value] for value in leaf.input_values]
    return [*found, *loss.other_arguments]
