"""A step: the loss, a pass that measures gradients if need be, and one that updates."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowbit_optax._numerics.landing import REPLACE
from lowbit_optax._step import context
from lowbit_optax._step.guard import UNGUARDED, Guard, Unguarded
from lowbit_optax._step.layers import Layer
from lowbit_optax.loss_scaling.guarded import Sizes, guarded, implementation_of
from lowbit_optax.release.evaluation import evaluate
from lowbit_optax.release.float_state import as_floats, as_state
from lowbit_optax.release.host_memory import beside, on_device, placed
from lowbit_optax.release.parts import Part
from lowbit_optax.release.plan import ReleasePlan, Stretch, loss_scaled, without_scale
from lowbit_optax.release.traced_loss import TracedLoss
from lowbit_optax.release.wrappers import alone, tied

Values = dict[str, typing.Any]


class Measured(typing.NamedTuple):
    """What is known of some gradients.

    Args:
      squares: float32, the sum of the squares of the unscaled gradients.
      sizes: whether they are finite, and the largest.
    """

    squares: jax.Array
    sizes: Sizes


_ZERO: typing.Any = np.float32(0)
_TRUE: typing.Any = np.bool_(True)
_NOTHING = Measured(_ZERO, Sizes(_TRUE, _ZERO))
"""Of no gradients."""


@dataclasses.dataclass(frozen=True, eq=False)
class Measure:
    """A backward pass that measures gradients, and updates nothing.

    Args:
      tx: the optimizer, whose implementation reduces many gradients.
      factor: which unscales gradients; None if they are not scaled.
      squares: whether the sum of squares is wanted, for clipping.
      sizes: whether the sizes are, for overflows.
    """

    tx: optax.GradientTransformation
    factor: jax.Array | None
    squares: bool
    sizes: bool

    def __call__(self, stretch: Stretch, old, gradients: Values, index):
        """What is known of a stretch's gradients, in place of what was before."""
        del stretch, index
        params, (state, _) = old
        return params, (state, self.of(gradients.values()))

    def of(self, gradients: Iterable[jax.Array]) -> Measured:
        """What is known of some gradients."""
        gradients, (squares, sizes) = list(gradients), _NOTHING
        if self.squares:
            squares = sum(map(self._sum_of_squares, gradients), squares)
        if self.sizes and self.factor is not None:
            sizes = Sizes.of(gradients, self.factor, implementation_of(self.tx))
        return Measured(squares, sizes)

    def _sum_of_squares(self, gradient: jax.Array) -> jax.Array:
        if self.factor is not None:
            gradient = Guard(self.factor, jnp.bool_(True)).times(gradient)
        return jnp.sum(jnp.square(gradient.astype(jnp.float32)))


@dataclasses.dataclass(frozen=True, eq=False)
class Updates:
    """A backward pass that updates parameters.

    Args:
      tx: the transformation, without a loss scale.
      state: the leaves of its state.
      loss: whose parameters are updated.
      plan: when.
      guard: decides whether each update happens; None if its own gradients decide.
      factor: which unscales gradients, if their sizes decide.
      transform: what is done to every gradient before the step.
    """

    tx: optax.GradientTransformation
    state: list[jax.Array]
    loss: TracedLoss
    plan: ReleasePlan
    guard: Guard | Unguarded | None
    factor: typing.Any
    transform: Callable[[jax.Array], jax.Array]

    def __call__(self, stretch: Stretch, old, gradients: Values, index):
        """New values of the parameters of a stretch, or of one layer of them."""
        (params, (state, nothing)), part = old, stretch.part
        assert part is not None
        guard, found = self.gate(gradients, nothing)
        update = lambda params, state: self.step(part, params, state, gradients, guard)
        if index is None:
            params, new = update(params, state)
        else:
            count = len(jax.tree.leaves(part.leaves[0].value)[0])
            layer = Layer(index, count, frozenset(part.names))
            on_chip = jax.tree.map(on_device, state)
            with context.one_layer(layer):
                params, new = alone(index, update, params, on_chip)
        return params, (jax.tree.map(beside, new, state), found)

    def gate(self, gradients: Values, nothing: Measured):
        """The guard of an update, and what is known of its gradients if they decide."""
        if self.guard is not None:
            return self.guard, nothing
        sizes = Sizes.of(gradients, self.factor, implementation_of(self.tx))
        return Guard(self.factor, sizes.finite), Measured(nothing.squares, sizes)

    def step(
        self,
        part: Part,
        params: Values,
        state: Mapping[int, jax.Array],
        gradients: Values,
        guard: Guard | Unguarded,
    ) -> tuple[Values, dict[int, jax.Array]]:
        """A step on some of the leaves.

        Args:
          part: the leaves.
          params, state: values in place of those before the step, such as one layer.
          gradients: by path; zeros where there is none.
          guard: whether the step happens.

        Returns:
          New parameters by path, and those of the state's leaves that were given.
        """
        leaves = *part.leaves, *part.beside
        values = {leaf.name: params.get(leaf.name, leaf.value) for leaf in leaves}
        found = {leaf.name: leaf.zero_gradient() for leaf in leaves} | {
            name: self.transform(gradient) for name, gradient in gradients.items()
        }
        before = (state.get(n, self.state[n]) for n in part.numbers)
        new, new_state = guarded(
            self.tx,
            self.loss.tree_of(values),
            part.structure.unflatten(map(on_device, before)),
            self.loss.tree_of(found),
            guard,
            REPLACE,
            {},
        )
        names = [leaf.name for leaf in self.loss.leaves]
        new = dict(zip(names, self.loss.treedef.flatten_up_to(new), strict=True))
        by_number = dict(zip(part.numbers, jax.tree.leaves(new_state), strict=True))
        return {x: new[x] for x in part.names}, {n: by_number[n] for n in state}

    def finished(self, found: list[tuple], gradients: Values):
        """All new parameters by path, the new state's leaves, and sizes by path.

        Args:
          found: of each stretch that was updated, its part and the new values.
          gradients: of the other leaves, by path. If the optimizer can step on all
            leaves only, other gradients are zeros, and what it makes of them is
            dropped.
        """
        params: Values = {}
        state: dict[int, jax.Array] = {}
        sizes: dict[str, Sizes] = {}
        for part, (new, (numbered, measured)) in found:
            params |= new
            state |= numbered
            sizes |= dict.fromkeys(part.names, measured.sizes)
        last = self.plan.last
        if any(name not in params for name in set(self.loss.names) - set(last.names)):
            last = self.plan.parts.whole  # no gradient has reached some of the others
        guard, measured = self.gate(gradients, _NOTHING)
        before = {n: self.state[n] for n in last.numbers}
        last_params, last_state = self.step(last, {}, before, gradients, guard)
        if self.guard is None:
            last_state |= self._counts(last, gradients, measured.sizes, sizes)
            sizes = dict.fromkeys(last_params, measured.sizes) | sizes
        new = last_state | state
        return last_params | params, [new[n] for n in range(len(self.state))], sizes

    def _counts(self, last: Part, gradients: Values, found: Sizes, sizes):
        """State that needs no gradient, such as a count.

        It goes on if any update happens. Of this step only these numbers are computed.
        """
        checked = [each.finite for each in sizes.values()]
        checked += [found.finite] if gradients else []
        proceed = jnp.any(jnp.stack([jnp.any(x) for x in checked]))
        finite = {n: jnp.where(found.finite, x, 0) for n, x in gradients.items()}
        needs_none = self.plan.parts.needs_no_gradient
        before = {n: self.state[n] for n in last.numbers if needs_none(n)}
        guard = Guard(self.factor, proceed)
        return self.step(last, {}, before, finite, guard)[1]


def released_step(
    loss: TracedLoss,
    plan: ReleasePlan,
    tx: optax.GradientTransformation,
    opt_state,
    max_grad_norm: float | None,
    overflow: str,
    state_memory: str,
) -> tuple:
    """The value, the parameters and the state after a step.

    Args:
      loss, plan: of the optimizer.
      tx, opt_state, max_grad_norm, overflow, state_memory: of
        :func:`lowbit_optax.release.value_and_update`.

    Returns:
      ``(value, params, opt_state)``, and what was skipped if ``overflow`` is "layer".
    """
    scaled, (inner, inner_state) = loss_scaled(tx), without_scale(tx, opt_state)
    state, treedef = jax.tree.flatten(inner_state)
    on_host = state_memory == "pinned_host"
    state = placed(state, plan.stack_numbers if on_host else ())
    passes = _Passes(loss, plan, state)
    factor, start = None, jnp.ones_like(passes.outputs[0])
    if scaled is not None:
        factor = jnp.float32(1) / opt_state.scale
        start = opt_state.scale.astype(start.dtype)
    by_layer = overflow == "layer"
    is_exact = scaled is not None and not by_layer
    measure = Measure(inner, factor, max_grad_norm is not None, is_exact)
    measured = _NOTHING
    if measure.squares or measure.sizes:
        found, gradients = passes.go_back(start, measure)
        each = [measure.of(gradients.values()), *(x for _, (_, (_, x)) in found)]
        measured = Measured(
            sum((jnp.sum(x.squares) for x in each), jnp.float32(0)),
            Sizes.of_all(x.sizes for x in each),
        )
        # Else XLA would see that both passes compute the same gradients, and keep them.
        start, measured = tied((start, measured))
    guard, transform = _treatment(measured, factor if is_exact else None, max_grad_norm)
    decides = None if by_layer and scaled is not None else guard
    updates = Updates(inner, state, loss, plan, decides, factor, transform)
    params, state, sizes = updates.finished(*passes.go_back(start, updates))
    value, params = loss.result(passes.outputs), loss.tree_of(params)
    state = jax.tree.unflatten(treedef, state)
    if scaled is None:
        return value, params, state
    if is_exact:
        return value, params, scaled.after(opt_state, state, measured.sizes)
    skipped = loss.tree_of({name: ~x.finite for name, x in sizes.items()})
    state = scaled.after(opt_state, state, Sizes.of_all(sizes.values()))
    return value, params, state, skipped


class _Passes:
    """A loss that is computed once, and differentiated as often as needed.

    Args:
      loss, plan: of the optimizer.
      state: the leaves of the optimizer's state.

    Attributes:
      outputs: of the loss's program.
    """

    def __init__(self, loss: TracedLoss, plan: ReleasePlan, state: list[jax.Array]):
        self._updated = [stretch for stretch in plan.stretches if stretch.part]
        in_loops = plan.parts.state_stacks
        arrays = {
            leaf.name: leaf.arguments[-1]
            for leaf in loss.leaves
            if leaf.gradient_value is not None
            and not (leaf.is_quantized and leaf in in_loops)
        }
        states = [as_floats(_before(stretch, state)) for stretch in self._updated]

        def function(arrays, states):
            outputs = evaluate(loss, plan, self._apply, arrays, states)
            return outputs[0], outputs

        _, self._pull, self.outputs = jax.vjp(function, arrays, states, has_aux=True)

    def _apply(self, stretch: Stretch, old, gradients: Values, index):
        self._reached.add(stretch)
        return self._rule(stretch, old, gradients, index)

    def go_back(self, start: jax.Array, rule) -> tuple[list[tuple], Values]:
        """What a rule returned, of each stretch that a gradient has reached.

        Args:
          start: the cotangent of the loss.
          rule: of this pass; see :mod:`lowbit_optax.release.evaluation`.

        Returns:
          Pairs of a part and ``(params, (state, measured))``, and gradients of other
          parameters by path.
        """
        self._rule, self._reached = rule, set()
        arrays, states = self._pull(start)
        found = []
        for stretch, floats in zip(self._updated, states, strict=True):
            if stretch in self._reached:
                quantized, rest = as_state(floats)
                names = [leaf.name for leaf in stretch.leaves]
                plain = {x: arrays.pop(x) for x in names if x not in quantized}
                found.append((stretch.part, (plain | quantized, rest)))
        updated = {leaf.name for each in self._updated for leaf in each.leaves}
        return found, {n: x for n, x in arrays.items() if n not in updated}


def _before(stretch: Stretch, state: list[jax.Array]):
    """A stretch's quantised parameters, their state, and room for what is measured."""
    part, nothing = stretch.part, _NOTHING
    assert part is not None
    if stretch.in_loop:
        count = len(jax.tree.leaves(part.leaves[0].value)[0])
        nothing = jax.tree.map(lambda x: jnp.broadcast_to(x, count), nothing)
    quantized = {leaf.name: leaf.value for leaf in part.leaves if leaf.is_quantized}
    return quantized, ({n: state[n] for n in part.exclusive}, nothing)


def _treatment(
    measured: Measured, factor: jax.Array | None, max_grad_norm: float | None
) -> tuple[Guard | Unguarded, Callable[[jax.Array], jax.Array]]:
    """The guard of all updates, and what is done to their gradients before.

    Args:
      measured: in all gradients.
      factor: which unscales them; None if none of them can make an update fail.
      max_grad_norm: what they are clipped to.
    """
    guard = UNGUARDED
    if factor is not None:
        guard = Guard(factor, measured.sizes.finite)
    if max_grad_norm is None:
        return guard, lambda grad: grad
    clip = functools.partial(_clipped, jnp.sqrt(measured.squares), max_grad_norm)
    if factor is None:
        return guard, clip
    # The norm is that of the unscaled gradients.
    unscaled = Guard(jnp.float32(1), measured.sizes.finite)
    return unscaled, lambda grad: clip(guard.unscaled(grad))


def _clipped(norm: jax.Array, max_norm: float, grad: jax.Array) -> jax.Array:
    """``optax.clip_by_global_norm`` of one gradient, by the norm of all of them."""
    clipped = grad.astype(jnp.float32) / norm * jnp.float32(max_norm)
    return jnp.where(norm < jnp.float32(max_norm), grad, clipped.astype(grad.dtype))
