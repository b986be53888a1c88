"""Run a step: the loss, an optional pass that measures gradients, and the updates."""

import typing
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.landing import REPLACE
from lowbit_optax._step.guard import UNGUARDED, Guard, Unguarded
from lowbit_optax.loss_scaling.sizes import Sizes
from lowbit_optax.release.barriers import alone, tied
from lowbit_optax.release.evaluation import Rule, carried, evaluate
from lowbit_optax.release.float_state import as_floats, as_state
from lowbit_optax.release.parts import Part
from lowbit_optax.release.plan import ReleasePlan, loss_scaled, without_scale
from lowbit_optax.release.traced_loss import TracedLoss
from lowbit_optax.release.wrappers import kept
from lowbit_optax.states.host_memory import on_device, placed, placed_like
from lowbit_optax.transformations.step import guarded

ByPath = Mapping[str, typing.Any]


class Measured(typing.NamedTuple):
    """Measurements of the gradients that the backward pass has computed so far.

    Args:
      squares: the sum of the squares of the unscaled gradients.
      finite: 1 if all gradients are finite, 0 otherwise.
      largest: the largest magnitude, if all gradients are finite.
      updated: with ``overflow="layer"``, 1 if at least one update was not skipped.
    """

    squares: typing.Any = 0.0
    finite: typing.Any = 1.0
    largest: typing.Any = 0.0
    updated: typing.Any = 0.0

    def and_of(self, sizes: Sizes) -> "Measured":
        """Return measurements that include the gradients with these sizes."""
        finite = sizes.finite.astype(jnp.float32)
        return self._replace(
            finite=self.finite * finite,
            largest=jnp.maximum(self.largest, sizes.largest),
            updated=jnp.maximum(self.updated, finite),
        )

    @property
    def sizes(self) -> Sizes:
        """Whether all gradients are finite, and how large they are."""
        return Sizes(self.finite > 0, self.largest)


def released_step(
    loss: TracedLoss,
    plan: ReleasePlan,
    tx,
    opt_state,
    max_grad_norm: float | None,
    overflow: str,
    state_memory: str,
) -> tuple:
    """Run a step.

    Args:
      loss, plan: the traced loss, and the plan of its updates.
      tx, opt_state, max_grad_norm, overflow, state_memory: see
        :func:`lowbit_optax.release.value_and_update`.

    Returns:
      ``(value, params, opt_state)``. If ``overflow`` is "layer", a fourth entry is True
      for leaves and layers whose updates were skipped.
    """
    scaled, (inner, inner_state) = loss_scaled(tx), without_scale(tx, opt_state)
    state, treedef = jax.tree.flatten(inner_state)
    on_host = state_memory == "pinned_host"
    state = placed(state, plan.parts.stack_numbers if on_host else ())
    passes = _Passes(loss, plan, state)
    factor, start = None, jnp.ones_like(passes.outputs[0])
    if scaled is not None:
        factor = opt_state.factor
        start *= jnp.asarray(opt_state.scale, start.dtype)
    is_exact = scaled is not None and overflow == "exact"
    measured = Measured()
    if is_exact or max_grad_norm is not None:
        rule = _measuring(factor, max_grad_norm is not None)
        *_, measured = passes.go_back(start, rule)
        # Without this barrier, XLA would compute the gradients once for both passes and
        # keep all of them in memory.
        start, measured = tied((start, measured))
    guard = UNGUARDED
    if factor is not None and is_exact:
        guard = Guard(factor, measured.sizes.finite)
    transform = lambda gradient: gradient
    if max_grad_norm is not None:
        # Clipping uses the norm of the unscaled gradients.
        unscaled, norm = guard.unscaled, jnp.sqrt(measured.squares)
        transform = lambda gradient: _clipped(norm, max_grad_norm, unscaled(gradient))
        if is_exact:
            guard = Guard(jnp.float32(1), measured.sizes.finite)
    decides = guard if overflow == "exact" else None
    rule = _updating(loss, plan, inner, state, decides, factor, transform)
    params, state, finite, found = passes.go_back(start, rule)
    value, params = loss.result(passes.outputs), loss.tree_of(params)
    state = jax.tree.unflatten(treedef, state)
    if scaled is None:
        return value, params, state
    if is_exact:
        return value, params, scaled.after(opt_state, state, measured.sizes)
    skipped = loss.tree_of({name: ~x for name, x in finite.items()})
    return value, params, scaled.after(opt_state, state, found.sizes), skipped


def _measuring(factor: jax.Array | None, squares: bool) -> Rule:
    """Return a rule that measures gradients without updating parameters.

    Args:
      factor: the factor that unscales gradients; None if they are not scaled, and
        therefore not checked for overflows.
      squares: whether to compute the sum of squares, for clipping.
    """

    def square(gradient: jax.Array) -> jax.Array:
        if factor is not None:
            gradient = Guard(factor, jnp.bool_(True)).times(gradient)
        return jnp.sum(jnp.square(gradient.astype(jnp.float32)))

    def rule(part: Part, params, state, gradients: ByPath, measured: Measured):
        del part
        if squares:
            total = sum(map(square, gradients.values()), measured.squares)
            measured = measured._replace(squares=total)
        if factor is not None:
            measured = measured.and_of(Sizes.of(gradients, factor))
        return params, state, measured

    return rule


def _updating(
    loss: TracedLoss,
    plan: ReleasePlan,
    tx,
    state: list[jax.Array],
    guard: Guard | Unguarded | None,
    factor,
    transform: Callable[[jax.Array], jax.Array],
) -> Rule:
    """Return a rule that updates parameters.

    Args:
      loss, plan: the traced loss, and the plan of its updates.
      tx, state: the transformation without a loss scale, and the leaves of its state.
      guard: decides whether all updates happen. If None, each update happens if its
        own gradients are finite.
      factor: the factor that unscales gradients, if ``guard`` is None.
      transform: a function that is applied to every gradient before the step.
    """

    def step(part: Part, params, numbered, gradients: ByPath, guard):
        """Return new parameters by path, and new state by index, as in ``numbered``."""
        leaves = *part.leaves, *part.others
        values = {leaf.name: params.get(leaf.name, leaf.value) for leaf in leaves}
        found = {leaf.name: leaf.zero_gradient() for leaf in leaves} | {
            name: transform(gradient) for name, gradient in gradients.items()
        }
        before = (on_device(numbered.get(n, state[n])) for n in part.numbers)
        before = part.structure.unflatten(before)
        new, new_state = guarded(
            tx, loss.tree_of(values), before, loss.tree_of(found), guard, REPLACE, {}
        )
        new_state = kept(before, new_state)
        names = [leaf.name for leaf in loss.leaves]
        new = dict(zip(names, loss.treedef.flatten_up_to(new), strict=True))
        by_number = dict(zip(part.numbers, jax.tree.leaves(new_state), strict=True))
        return {x: new[x] for x in part.names}, {n: by_number[n] for n in numbered}

    def rule(part: Part, params, state, gradients: ByPath, measured: Measured):
        numbered, finite = state
        if guard is None and gradients:
            sizes = Sizes.of(gradients, factor)
            measured, finite = measured.and_of(sizes), sizes.finite
        own = Guard(factor, finite) if guard is None else guard
        take = lambda params, numbered: step(part, params, numbered, gradients, own)
        params, new = alone(take, params, jax.tree.map(on_device, numbered))
        if guard is None and part is plan.stretches[0].part:
            # State that needs no gradient, such as a count of steps, advances if at
            # least one update happened.
            gradients = {x: jnp.where(finite, g, 0) for x, g in gradients.items()}
            counts = {n: numbered[n] for n in plan.parts.counts}
            any_update = Guard(factor, measured.updated > 0)
            new |= step(part, params, counts, gradients, any_update)[1]
        return params, (jax.tree.map(placed_like, new, numbered), finite), measured

    return rule


class _Passes:
    """Runs the forward pass of a loss once, and its backward pass several times.

    Args:
      loss, plan: the traced loss, and the plan of its updates.
      state: the leaves of the optimizer's state.

    Attributes:
      outputs: the outputs of the loss's program.
    """

    def __init__(self, loss: TracedLoss, plan: ReleasePlan, state: list[jax.Array]):
        self._parts = [stretch.part for stretch in plan.stretches if stretch.part]
        self._nothing = Measured(*map(jnp.float32, Measured()))
        in_loops = plan.parts.stacks
        arrays = {
            leaf.name: leaf.arguments[-1]
            for leaf in loss.leaves
            if leaf.gradient_value is not None
            and not (leaf.is_quantized and leaf in in_loops)
        }

        def before(part: Part):
            finite = jnp.ones(() if part.depth is None else part.depth, bool)
            return carried(part), ({n: state[n] for n in part.exclusive}, finite)

        def function(arrays, states, token):
            rule = lambda *args: self._rule(*args)
            outputs, token = evaluate(loss, plan, rule, arrays, states, token)
            return (outputs[0], token), outputs

        states = [as_floats(before(part)) for part in self._parts]
        primals = arrays, states, self._nothing
        _, self._pull, self.outputs = jax.vjp(function, *primals, has_aux=True)

    def go_back(self, start: jax.Array, rule: Rule):
        """Run the backward pass with a rule.

        Args:
          start: the cotangent of the loss.
          rule: the rule of this pass; see :mod:`lowbit_optax.release.evaluation`.

        Returns:
          ``(params, state, finite, measured)``: the parameters by path, the leaves of
          the state, whether gradients are finite by path, and the measurements.
        """
        self._rule = rule
        params, states, measured = self._pull((start, self._nothing))
        state, finite = {}, {}
        for part, floats in zip(self._parts, states, strict=True):
            values, (numbered, is_finite) = as_state(floats)
            params |= values
            state |= numbered
            finite |= dict.fromkeys(part.names, is_finite)
        return params, [state[n] for n in sorted(state)], finite, measured


def _clipped(norm: jax.Array, max_norm: float, grad: jax.Array) -> jax.Array:
    """Clip a gradient like ``optax.clip_by_global_norm``, given the global norm."""
    clipped = grad.astype(jnp.float32) / norm * jnp.float32(max_norm)
    return jnp.where(norm < jnp.float32(max_norm), grad, clipped.astype(grad.dtype))
