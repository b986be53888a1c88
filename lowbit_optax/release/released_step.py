"""A step: the loss, a pass that measures gradients if need be, and one that updates."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._step.guard import Guard, Unguarded
from lowbit_optax.loss_scaling.guarded import Sizes, implementation_of
from lowbit_optax.release.host_memory import placed
from lowbit_optax.release.ordering import tied
from lowbit_optax.release.plan import ReleasePlan, loss_scaled, without_scale
from lowbit_optax.release.reverse import Reverse, run_forward
from lowbit_optax.release.stretches import Stretch
from lowbit_optax.release.traced_loss import TracedLoss
from lowbit_optax.release.updates import Updates


class Measured(typing.NamedTuple):
    """What is known of some gradients; () in place of what nobody asked for.

    Args:
      squares: float32 scalar, the sum of the squares of the unscaled gradients.
      sizes: whether they are finite, and the largest.
    """

    squares: typing.Any
    sizes: typing.Any


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

    def begin(self, stretch: Stretch) -> Measured:
        """What is known of no gradients."""
        del stretch
        return self.of([])

    def params(self, stretch: Stretch, carried) -> dict[str, typing.Any]:
        """The parameters' stacks."""
        del carried
        return {leaf.name: leaf.value for leaf in stretch.in_loop}

    def update(self, stretch: Stretch, index, carried: Measured, grads) -> Measured:
        """What is known with a layer's gradients, too."""
        del stretch, index
        return self.total([carried, self.of(grads.values())])

    def take(self, stretch: Stretch, grads: dict[str, jax.Array]) -> Measured:
        """What is known of a stretch's gradients."""
        del stretch
        return self.of(grads.values())

    def of(self, grads: Iterable[jax.Array]) -> Measured:
        """What is known of some gradients."""
        grads = list(grads)
        squares, sizes = (), ()
        if self.squares:
            squares = sum(map(self._sum_of_squares, grads), jnp.float32(0))
        if self.sizes and self.factor is not None:
            sizes = Sizes.of(grads, self.factor, implementation_of(self.tx))
        return Measured(squares, sizes)

    def total(self, parts: Sequence[Measured]) -> Measured:
        """What is known of all gradients, from what is of some."""
        return Measured(
            sum(each.squares for each in parts) if self.squares else (),
            Sizes.of_all(each.sizes for each in parts) if self.sizes else (),
        )

    def _sum_of_squares(self, grad: jax.Array) -> jax.Array:
        if self.factor is not None:
            grad = Guard(self.factor, jnp.bool_(True)).times(grad)
        return jnp.sum(jnp.square(grad.astype(jnp.float32)))


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
    computed = run_forward(loss, plan)
    factor, start = None, jnp.ones_like(computed.outputs[0])
    if scaled is not None:
        factor = jnp.float32(1) / opt_state.scale
        start = opt_state.scale.astype(start.dtype)
    by_layer = overflow == "layer"
    is_exact = scaled is not None and not by_layer
    measure = Measure(inner, factor, max_grad_norm is not None, is_exact)
    start, measured = _measured(computed, start, measure)
    guard, transform = _treatment(measured, factor if is_exact else None, max_grad_norm)
    gate = functools.partial(_same_for_all, guard)
    if by_layer and factor is not None:
        gate = functools.partial(_by_own_sizes, inner, factor)
    updates = Updates(inner, state, loss, plan, gate, transform)
    params, state, sizes = updates.finished(*computed.go_back(start, updates))
    value, params = loss.result(computed.outputs), loss.tree_of(params)
    state = jax.tree.unflatten(treedef, state)
    if scaled is None:
        return value, params, state
    if is_exact:
        return value, params, scaled.after(opt_state, state, measured.sizes)
    skipped = loss.tree_of({name: ~x.finite for name, x in sizes.items()})
    state = scaled.after(opt_state, state, Sizes.of_all(sizes.values()))
    return value, params, state, skipped


def _measured(
    computed: Reverse, start: jax.Array, measure: Measure
) -> tuple[jax.Array, Measured]:
    """What a backward pass finds, and the cotangent with which the next one begins."""
    nothing = measure.of([])
    if not (measure.squares or measure.sizes):
        return start, nothing
    results, rest = computed.go_back(start, measure)
    measured = measure.total([nothing, *results, measure.of(rest.values())])
    # Else XLA would see that both passes compute the same gradients, and keep them.
    return tied((start, measured))


def _treatment(
    measured: Measured, factor: jax.Array | None, max_grad_norm: float | None
) -> tuple[Guard | Unguarded, Callable[[jax.Array], jax.Array]]:
    """The guard of all updates, and what is done to their gradients before.

    Args:
      measured: in all gradients.
      factor: which unscales them; None if none of them can make an update fail.
      max_grad_norm: what they are clipped to.
    """
    guard = Unguarded()
    if factor is not None:
        guard = Guard(factor, measured.sizes.finite)
    if max_grad_norm is None:
        return guard, lambda grad: grad
    clip = functools.partial(_clipped, jnp.sqrt(measured.squares), max_grad_norm)
    if isinstance(guard, Unguarded):
        return guard, clip
    # The norm is that of the unscaled gradients.
    unscaled = Guard(jnp.float32(1), guard.proceed)
    return unscaled, lambda grad: clip(guard.unscaled(grad))


def _clipped(norm: jax.Array, max_norm: float, grad: jax.Array) -> jax.Array:
    """``optax.clip_by_global_norm`` of one gradient, by the norm of all of them."""
    clipped = grad.astype(jnp.float32) / norm * jnp.float32(max_norm)
    return jnp.where(norm < jnp.float32(max_norm), grad, clipped.astype(grad.dtype))


def _same_for_all(guard: Guard | Unguarded, grads):
    """The gate of updates that all happen, or none of which does."""
    del grads
    return guard, ()


def _by_own_sizes(tx, factor: jax.Array, grads: Mapping[str, jax.Array]):
    """The gate of updates each of which happens if its own gradients are finite."""
    sizes = Sizes.of(grads, factor, implementation_of(tx))
    return Guard(factor, sizes.finite), sizes
