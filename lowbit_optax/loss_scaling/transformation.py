"""``with_loss_scale``: unscale, skip what has overflowed, adapt."""

import dataclasses
import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lowbit_optax import trees
from lowbit_optax.float_layouts import is_narrow
from lowbit_optax.loss_scaling.scales import Scaling
from lowbit_optax.wrapper import LowbitTransformation, step


class LossScaleState(typing.NamedTuple):
    """State of :func:`with_loss_scale`.

    Args:
      scale: float32 scalar, by which the next loss is to be multiplied.
      memory: what the scaling remembers.
      skipped: int32 scalar, steps skipped so far.
      inner_state: the inner transformation's state.
    """

    scale: jax.Array
    memory: typing.Any
    skipped: jax.Array
    inner_state: typing.Any


def with_loss_scale(
    inner: optax.GradientTransformation, scaling: Scaling
) -> LowbitTransformation:
    """Take gradients of a scaled loss; skip the step where any has overflowed.

        g = grads / scale in float32;  if all are finite: inner.update(g)
        scale = scaling.next(...)

    When a gradient is not finite nothing of the inner transformation's state moves, nor
    any parameter, by one bit. Only the scale, what the scaling remembers and the count
    of skipped steps do. Nothing is brought to the host.

    Args:
      inner: any optax transformation, those of this package included: around
        ``lowbit`` the whole step is skipped. Inside of ``lowbit`` works too, but
        ``lowbit``'s step count goes on.
      scaling: from :func:`static_scale`, :func:`backoff_scale` or
        :func:`log_normal_scale`.

    Returns:
      An optax transformation of gradients from :func:`scaled_value_and_grad`.
      :func:`lowbit_optax.step` takes it without forming differences.

    Raises:
      TypeError: if ``scaling`` is none.

    References:
      Micikevicius et al. 2018, section 3.2; OpenSeq2Seq, "Automatic Loss Scaling".

    >>> import jax.numpy as jnp, lowbit_optax
    >>> scaling = lowbit_optax.static_scale(8.0)
    >>> tx = with_loss_scale(lowbit_optax.kahan_sgd(0.5), scaling)
    >>> params = jnp.ones(4, jnp.float16)
    >>> loss_fn = lambda params: jnp.sum(params.astype(jnp.float32))
    >>> state = tx.init(params)
    >>> loss, grads = scaled_value_and_grad(loss_fn)(params, state)
    >>> grads
    Array([8., 8., 8., 8.], dtype=float16)
    >>> lowbit_optax.step(tx, grads, state, params)[0]
    Array([0.5, 0.5, 0.5, 0.5], dtype=float16)
    """
    if not isinstance(scaling, Scaling):
        raise TypeError(
            f"with_loss_scale: scaling is {scaling!r}; accepted are static_scale(), "
            "backoff_scale() and log_normal_scale()"
        )
    config = LossScaled(inner, scaling)
    return LowbitTransformation(config.init, config.update, config)


def scaled_value_and_grad(loss_fn: Callable, has_aux: bool = False) -> Callable:
    """``jax.value_and_grad`` of a loss times the current loss scale.

    Args:
      loss_fn: called as ``loss_fn(params, *args, **kwargs)``.
      has_aux: whether it returns ``(loss, aux)``.

    Returns:
      A function ``(params, opt_state, *args, **kwargs) -> (value, grads)``. The value
      is not scaled, the gradients are: :func:`with_loss_scale` unscales them.
    """

    @functools.wraps(loss_fn)
    def with_gradient(params, opt_state, *args, **kwargs):
        scale = current_loss_scale(opt_state)

        def scaled(params):
            value = loss_fn(params, *args, **kwargs)
            loss = value[0] if has_aux else value
            return loss.astype(jnp.float32) * scale, value

        (_, value), grads = jax.value_and_grad(scaled, has_aux=True)(params)
        return value, grads

    return with_gradient


def current_loss_scale(opt_state: optax.OptState) -> jax.Array:
    """The scale, a float32 scalar, that the next loss is to be multiplied by.

    Args:
      opt_state: the state of :func:`with_loss_scale`, or one that holds it: a chain's,
        ``lowbit``'s, a TrainState's ``opt_state``.

    Raises:
      ValueError: if there is none in it, or several.
    """
    is_state = lambda x: isinstance(x, LossScaleState)
    found = [x for x in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(x)]
    if len(found) != 1:
        raise ValueError(
            f"current_loss_scale: {len(found)} loss scales in this optimizer state; "
            "was it made by one with_loss_scale?"
        )
    return found[0].scale


@dataclasses.dataclass(frozen=True, eq=False)
class LossScaled:
    """The choices of one :func:`with_loss_scale` call."""

    inner: optax.GradientTransformation
    scaling: Scaling

    def init(self, params: optax.Params) -> LossScaleState:
        """The state with the first scale."""
        scale, memory = self.scaling.init()
        skipped = jnp.zeros([], jnp.int32)
        return LossScaleState(scale, memory, skipped, self.inner.init(params))

    def update(self, updates, state, params=None, **extra_args):
        """As in optax; a skipped step's updates are -0, which changes nothing."""
        inner = optax.with_extra_args_support(self.inner)

        def update(grads):
            return inner.update(grads, state.inner_state, params, **extra_args)

        def skip(shapes):
            return jax.tree.map(_nothing, shapes[0]), state.inner_state

        return self._guarded(updates, state, update, skip)

    def step(self, grads, state, params, **extra_args):
        """``(new params, new state)`` without differences."""

        def update(grads):
            return step(self.inner, grads, state.inner_state, params, **extra_args)

        return self._guarded(
            grads, state, update, lambda _: (params, state.inner_state)
        )

    def inner_update(self, grads, state, params, **extra_args):
        """What the inner transformation does to unscaled gradients."""
        grads = _unscaled(grads, state.scale)
        if isinstance(self.inner, LowbitTransformation):
            config = self.inner.config
            return config.inner_update(grads, state.inner_state, params, **extra_args)
        inner = optax.with_extra_args_support(self.inner)
        return params, inner.update(grads, state.inner_state, params, **extra_args)[0]

    def _guarded(self, grads, state, update, skip):
        if not isinstance(state, LossScaleState):
            raise TypeError(
                f"with_loss_scale: state is a {type(state).__name__}, not a "
                "LossScaleState; was it made by this transformation's init?"
            )
        grads = _unscaled(grads, state.scale)
        finite, largest = _sizes(grads)

        def kept(grads):
            # float32 gradients would widen the moments of narrow parameters.
            results, inner_state = update(grads)
            return results, jax.tree.map(_like, inner_state, state.inner_state)

        shapes = jax.eval_shape(kept, grads)
        results, inner_state = lax.cond(finite, kept, lambda _: skip(shapes), grads)
        scale, memory = self.scaling.next(state.scale, state.memory, largest, finite)
        skipped = state.skipped + (~finite).astype(jnp.int32)
        return results, LossScaleState(scale, memory, skipped, inner_state)


def _unscaled(grads, scale: jax.Array):
    inverse = jnp.float32(1) / scale

    def unscale(grad):
        if not trees.is_float(grad):
            return grad
        dtype = jnp.float32 if is_narrow(grad.dtype) else grad.dtype
        return grad.astype(dtype) * inverse.astype(dtype)

    return jax.tree.map(unscale, grads)


def _sizes(grads) -> tuple[jax.Array, jax.Array]:
    """Whether all are finite, and the largest magnitude, if they are."""
    arrays = [x for x in jax.tree.leaves(grads) if trees.is_float(x) and x.size]
    if not arrays:
        return jnp.bool_(True), jnp.float32(0)
    # Not from the maximum: on some backends it is not NaN where an element is.
    finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in arrays])
    sizes = jnp.stack([jnp.max(jnp.abs(x)).astype(jnp.float32) for x in arrays])
    return jnp.all(finite), jnp.max(sizes)


def _like(new, old):
    return new.astype(old.dtype) if trees.is_float(new) else new


def _nothing(like) -> jax.Array:
    if jnp.issubdtype(like.dtype, jnp.floating):
        return jnp.full(like.shape, -0.0, like.dtype)  # x + -0 is x, also for x = -0
    return jnp.zeros(like.shape, like.dtype)
