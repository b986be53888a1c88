"""``with_loss_scale``: unscale gradients, skip overflows, and adapt the scale."""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._arguments import check_transformation, check_type
from lowbit_optax._step import trees
from lowbit_optax._step.guard import UNGUARDED
from lowbit_optax._step.stepper import Stepper, check_multi_steps_around, check_state
from lowbit_optax._types import Function, OptState, Transformation
from lowbit_optax.loss_scaling.scales import LARGEST_SCALE, Scaling
from lowbit_optax.loss_scaling.sizes import Sizes
from lowbit_optax.transformations.step import guarded


class LossScaleState(typing.NamedTuple):
    """State of :func:`with_loss_scale`.

    Args:
      scale: float32 scalar, the factor for the next loss.
      scaling_state: the state of the scaling.
      skipped: int32 scalar, the number of steps skipped so far.
      inner_state: the state of the inner transformation.
    """

    scale: jax.Array
    scaling_state: typing.Any
    skipped: jax.Array
    inner_state: typing.Any

    @property
    def factor(self) -> jax.Array:
        """The float32 scalar that unscales gradients."""
        return jnp.float32(1) / jnp.asarray(self.scale, jnp.float32)


def with_loss_scale(
    inner: Transformation, scaling: Scaling
) -> optax.GradientTransformationExtraArgs:
    """Unscale the gradients of a scaled loss, and skip steps that overflow.

        g = grads / scale in float32;  if all are finite: inner.update(g)
        scale = scaling.next(...)

    If a gradient is not finite, the parameters and the state of the inner
    transformation do not change. Only the scale, the state of the scaling and the count
    of skipped steps change. The device makes this decision without a branch: the inner
    transformation runs on zeros, and its results are discarded.

    Args:
      inner: any optax transformation, including transformations of this package. If it
        is ``lowbit``, a skipped step changes nothing in it. You can also put this
        function inside ``lowbit``, but ``lowbit`` then counts skipped steps too.
      scaling: the result of :func:`static_scale`, :func:`backoff_scale` or
        :func:`log_normal_scale`.

    Returns:
      An optax transformation. Pass gradients from :func:`scaled_value_and_grad` to it.
      It cannot detect gradients of an unscaled loss, and divides them by the scale too.
      :func:`lowbit_optax.step` computes the new parameters directly, without updates.

    Raises:
      TypeError: if ``inner`` is not a transformation, or ``scaling`` is not a scaling.
      ValueError: from ``init`` if this function is inside ``optax.MultiSteps``, whose
        accumulator never recovers from an overflow. Put it around ``optax.MultiSteps``;
        or if ``inner`` contains another loss scale.

    References:
      Micikevicius et al. 2018, section 3.2; OpenSeq2Seq, "Automatic Loss Scaling".

    >>> import jax.numpy as jnp, lowbit_optax
    >>> scaling = lowbit_optax.loss_scaling.static_scale(8.0)
    >>> tx = with_loss_scale(lowbit_optax.kahan_sgd(0.5), scaling)
    >>> params = jnp.ones(4, jnp.float16)
    >>> loss_fn = lambda params: jnp.sum(params.astype(jnp.float32))
    >>> state = tx.init(params)
    >>> loss, grads = scaled_value_and_grad(loss_fn)(params, state)
    >>> grads
    Array([8., 8., 8., 8.], dtype=float16)
    >>> lowbit_optax.step(tx, params, state, grads)[0]
    Array([0.5, 0.5, 0.5, 0.5], dtype=float16)
    """
    check_transformation("with_loss_scale", "inner", inner)
    accepted = "the result of static_scale(), backoff_scale() or log_normal_scale()"
    check_type("with_loss_scale: scaling", scaling, Scaling, accepted)
    return LossScaled(inner, scaling).transformation


def scaled_value_and_grad(loss_fn: Function, has_aux: bool = False) -> Function:
    """Differentiate the scaled loss, like ``jax.value_and_grad``.

    Args:
      loss_fn: a function that is called as ``loss_fn(params, *args, **kwargs)``.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``.

    Returns:
      A function ``(params, opt_state, *args, **kwargs) -> (value, grads)``. The value
      is not scaled. The gradients are scaled, and :func:`with_loss_scale` unscales
      them.

    Raises:
      TypeError: when it is called, if the loss is not float32, bfloat16 or float64.

    >>> import jax.numpy as jnp, optax
    >>> from lowbit_optax.loss_scaling import static_scale
    >>> tx = with_loss_scale(optax.sgd(0.5), static_scale(8.0))
    >>> params = jnp.float16(2.0)
    >>> loss_fn = lambda x: jnp.square(x).astype(jnp.float32)
    >>> scaled_value_and_grad(loss_fn)(params, tx.init(params))
    (Array(4., dtype=float32), Array(32., dtype=float16))
    """

    @functools.wraps(loss_fn)
    def with_gradient(params, opt_state, *args, **kwargs):
        scale = current_loss_scale(opt_state)

        def scaled(params):
            value = loss_fn(params, *args, **kwargs)
            loss = value[0] if has_aux else value
            check_wide_loss("scaled_value_and_grad", loss)
            return loss.astype(jnp.float32) * scale, value

        (_, value), grads = jax.value_and_grad(scaled, has_aux=True)(params)
        return value, grads

    return with_gradient


def check_wide_loss(function: str, loss: jax.Array) -> None:
    """Raise a TypeError unless a loss can be multiplied by the largest scale."""
    is_real = jnp.issubdtype(loss.dtype, jnp.floating)
    if not is_real or float(jnp.finfo(loss.dtype).max) < LARGEST_SCALE:
        raise TypeError(
            f"{function}: the loss must be float32, bfloat16 or float64, because large "
            f"scales overflow in other dtypes, got {loss.dtype}. Return "
            "loss.astype(jnp.float32)"
        )


def current_loss_scale(opt_state: OptState) -> jax.Array:
    """Return the factor for the next loss.

    Args:
      opt_state: the state of :func:`with_loss_scale`, or a state that contains it, such
        as the state of a chain or of ``lowbit``, or the ``opt_state`` of a TrainState.

    Returns:
      A float32 scalar.

    Raises:
      ValueError: if ``opt_state`` does not contain exactly one loss scale.

    >>> import jax.numpy as jnp, optax
    >>> from lowbit_optax.loss_scaling import static_scale
    >>> tx = with_loss_scale(optax.sgd(0.5), static_scale(8.0))
    >>> current_loss_scale(optax.chain(tx).init(jnp.ones(3)))
    Array(8., dtype=float32)
    """
    found = trees.all_of(LossScaleState, opt_state)
    if len(found) != 1:
        raise ValueError(
            "current_loss_scale: opt_state must contain exactly one loss scale, got "
            f"{len(found)}; was it created with one with_loss_scale?"
        )
    return found[0].scale


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LossScaled(Stepper):
    """The configuration of one call of :func:`with_loss_scale`."""

    inner: Transformation
    scaling: Scaling

    def init(self, params) -> LossScaleState:
        """Return the initial state, with the first scale."""
        check_multi_steps_around(params, "with_loss_scale")
        scale, scaling_state = self.scaling.init()
        skipped, inner_state = jnp.zeros([], jnp.int32), self.inner.init(params)
        if trees.all_of(LossScaleState, inner_state):
            raise ValueError(
                "with_loss_scale: inner must not contain another with_loss_scale, "
                "because both would unscale the gradients. Use only one of them"
            )
        return LossScaleState(scale, scaling_state, skipped, inner_state)

    def after(self, state: LossScaleState, inner_state, sizes: Sizes) -> LossScaleState:
        """Return the state after a step.

        Args:
          state: the state before the step.
          inner_state: the state of the inner transformation after the step.
          sizes: the sizes of all gradients.
        """
        old = jnp.asarray(state.scale, jnp.float32)  # users may set any real number
        seen = state.scaling_state, sizes.largest, sizes.finite
        scale, scaling_state = self.scaling.next(old, *seen)
        skipped = jnp.where(sizes.finite, state.skipped, state.skipped + 1)
        return LossScaleState(scale, scaling_state, skipped, inner_state)

    def run(self, params, state, grads, landing, extra_args, guard=UNGUARDED):
        """Run a step. If it is skipped, updates are -0, which changes no parameter."""
        check_state("with_loss_scale", state, LossScaleState)
        factor = state.factor
        scaled = guard.within(factor, jnp.bool_(True))
        sizes = Sizes.of(grads, scaled.factor)
        inner_guard = guard.within(factor, sizes.finite)
        arguments = params, state.inner_state, grads, inner_guard, landing, extra_args
        results, inner_state = guarded(self.inner, *arguments)
        own = self.after(state, (), sizes)
        own = guard.chosen(own, state._replace(inner_state=()))
        return results, own._replace(inner_state=inner_state)
