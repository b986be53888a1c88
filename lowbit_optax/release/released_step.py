"""Run a step: the loss, an optional pass that measures gradients, and the updates."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.landing import REPLACE
from lowbit_optax._step import context, trees
from lowbit_optax._step.guard import UNGUARDED, Guard
from lowbit_optax.loss_scaling.sizes import Sizes
from lowbit_optax.release.evaluation import Rule, carried, evaluate
from lowbit_optax.release.float_state import as_floats, as_state
from lowbit_optax.release.parts import Part
from lowbit_optax.release.plan import ReleasePlan, loss_scaled, without_scale
from lowbit_optax.release.traced_loss import TracedLoss
from lowbit_optax.release.wrappers import alone, kept, tied
from lowbit_optax.states.host_memory import on_device, placed, placed_like
from lowbit_optax.transformations.step import guarded


def released_step(
    loss: TracedLoss, plan: ReleasePlan, tx, opt_state, max_grad_norm, state_memory
) -> tuple:
    """Run a step, and return ``(value, params, opt_state)``.

    Args:
      loss, plan: the traced loss, and the plan of its updates.
      tx, opt_state, max_grad_norm, state_memory: see
        :func:`lowbit_optax.release.value_and_update`.
    """
    scaled, (inner, inner_state) = loss_scaled(tx), without_scale(tx, opt_state)
    state, treedef = jax.tree.flatten(inner_state)
    on_host = state_memory == "pinned_host"
    state = placed(state, plan.parts.stack_numbers if on_host else ())
    outputs, go_back = _differentiated(loss, plan, state)
    start, factor = jnp.ones_like(outputs[0]), None
    if scaled is not None:
        factor = opt_state.factor
        start *= jnp.asarray(opt_state.scale, start.dtype)
    guard, transform, sizes = UNGUARDED, lambda gradient: gradient, None
    if scaled is not None or max_grad_norm is not None:
        *_, found = go_back(start, _measuring(factor, max_grad_norm is not None))
        # Without this barrier, XLA would compute the gradients once for both passes and
        # keep all of them in memory.
        start, (squares, finite, largest) = tied((start, found))
        sizes = Sizes(finite > 0, largest)
        guard = UNGUARDED if factor is None else Guard(factor, sizes.finite)
        if max_grad_norm is not None:
            # Clipping uses the norm of the unscaled gradients.
            unscaled, norm = guard.unscaled, jnp.sqrt(squares)
            transform = lambda grad: _clipped(norm, max_grad_norm, unscaled(grad))
            if factor is not None:
                guard = Guard(jnp.float32(1), sizes.finite)
    rule = _updating(loss, plan, inner, treedef.unflatten(state), guard, transform)
    params, state, _ = go_back(start, rule)
    state = treedef.unflatten(state)
    if scaled is not None and sizes is not None:
        state = scaled.after(opt_state, state, sizes)
    return loss.result.unflatten(outputs), loss.tree_of(params), state


def _measuring(factor: jax.Array | None, squares: bool) -> Rule:
    """Return a rule that measures gradients without updating parameters.

    Its tokens are the sum of the squares of the unscaled gradients so far; 1 if all are
    finite, or 0; and their largest magnitude if all are finite.

    Args:
      factor: the factor that unscales gradients; None if they are not scaled, and
        therefore not checked for overflows.
      squares: whether to compute the sum of squares, for clipping.
    """

    def square(gradient: jax.Array) -> jax.Array:
        if factor is not None:
            gradient = Guard(factor, jnp.bool_(True)).times(gradient)
        return jnp.sum(jnp.square(gradient.astype(jnp.float32)))

    def rule(part: Part, params, state, gradients, found: tuple):
        del part
        total, finite, largest = found
        if squares:
            total = sum(map(square, gradients.values()), total)
        if factor is not None:
            sizes = Sizes.of(gradients, factor)
            finite *= sizes.finite.astype(jnp.float32)
            largest = jnp.maximum(largest, sizes.largest)
        return params, state, (total, finite, largest)

    return rule


def _updating(
    loss: TracedLoss, plan: ReleasePlan, tx, opt_state, guard, transform: Callable
) -> Rule:
    """Return a rule that updates parameters.

    The rule runs the step on all leaves, with zeros instead of the gradients of other
    parts, and uses the results of its own part. JAX drops the other operations when it
    lowers the program.

    Args:
      loss, plan: the traced loss, and the plan of its updates.
      tx, opt_state: the transformation without a loss scale, and its state.
      guard: decides whether all updates happen.
      transform: a function that is applied to every gradient before the step.
    """
    state, structure = jax.tree.flatten(opt_state)
    values = {leaf.name: leaf.value for leaf in loss.leaves}
    zeros = {leaf.name: transform(leaf.zero_gradient()) for leaf in loss.leaves}
    groups = {leaf.name: part for part in plan.updates for leaf in part.leaves}

    def step(params, state, gradients):
        """Return new parameters by path, and the new leaves of the state."""
        before = structure.unflatten(map(on_device, state))
        arguments = loss.tree_of(params), before, loss.tree_of(gradients)
        with context.changed(group_of=groups.get):
            new, after = guarded(tx, *arguments, guard, REPLACE, {})
        return trees.by_path(new), jax.tree.leaves(kept(before, after))

    # In a loop, the step depends on the loop's layer, and is traced for each loop.
    traced_once = jax.jit(step, inline=True)

    def rule(part: Part, params, numbered, gradients, token):
        run = traced_once if part.depth is None else step
        gradients = {name: transform(x) for name, x in gradients.items()}

        def of_part(params, numbered):
            every = [numbered.get(n, x) for n, x in enumerate(state)]
            new, after = run(values | params, every, zeros | gradients)
            return {name: new[name] for name in params}, {n: after[n] for n in numbered}

        params, new = alone(of_part, params, jax.tree.map(on_device, numbered))
        return params, jax.tree.map(placed_like, new, numbered), token

    return rule


def _differentiated(loss: TracedLoss, plan: ReleasePlan, state) -> tuple:
    """Run the forward pass of a loss once.

    Args:
      loss, plan: the traced loss, and the plan of its updates.
      state: the leaves of the optimizer's state.

    Returns:
      The outputs of the loss's program, and a function that runs the backward pass with
      a rule of :mod:`lowbit_optax.release.evaluation`. It may be called several times.
      From the cotangent of the loss and a rule, it returns the parameters by path, the
      leaves of the state, and the measurements.
    """
    nothing = tuple(map(jnp.float32, (0, 1, 0)))
    arrays = {
        leaf.name: leaf.arguments[-1]
        for leaf in loss.leaves
        if leaf.gradient_value is not None
        and not (leaf.is_quantized and leaf in plan.parts.stacks)
    }
    rules: list[Rule] = []

    def function(arrays, states, token):
        rule = lambda *args: rules[-1](*args)
        outputs, token = evaluate(loss, plan, rule, arrays, states, token)
        return (outputs[0], token), outputs

    before = [(carried(x), {n: state[n] for n in x.numbers}) for x in plan.updates]
    primals = arrays, list(map(as_floats, before)), nothing
    _, pull, outputs = jax.vjp(function, *primals, has_aux=True)

    def go_back(start: jax.Array, rule: Rule) -> tuple:
        rules.append(rule)
        params, states, measured = pull((start, nothing))
        state = {}
        for floats in states:
            values, numbered = as_state(floats)
            params |= values
            state |= numbered
        return params, [state[n] for n in sorted(state)], measured

    return outputs, go_back


def _clipped(norm: jax.Array, max_norm: float, grad: jax.Array) -> jax.Array:
    """Clip a gradient like ``optax.clip_by_global_norm``, given the global norm."""
    clipped = grad.astype(jnp.float32) / norm * jnp.float32(max_norm)
    return jnp.where(norm < jnp.float32(max_norm), grad, clipped.astype(grad.dtype))
