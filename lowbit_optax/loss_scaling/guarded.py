"""The parts of a loss-scaled step: how large gradients are, and a step under a guard.

``with_loss_scale`` puts them together for all gradients at once, and
:mod:`lowbit_optax.release` for a few at a time.
"""

import typing

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lowbit_optax._numerics.landing import Landing
from lowbit_optax._step import trees
from lowbit_optax._step.guard import Guard, Unguarded
from lowbit_optax._step.stepper import stepper_of
from lowbit_optax._step.wrapped import check_wrapper, step_wrapped
from lowbit_optax.transformations.lowbit import apply_updates


class Sizes(typing.NamedTuple):
    """How large some gradients are, divided by the loss scale.

    Args:
      finite: bool scalar, whether all of them are finite.
      largest: float32 scalar, max |g|, if they are.
    """

    finite: jax.Array
    largest: jax.Array

    @classmethod
    def of(cls, grads, factor: jax.Array) -> "Sizes":
        """The sizes of gradients times the factor, which may make them infinite."""
        arrays = [x for x in jax.tree.leaves(grads) if trees.is_float(x) and x.size]
        if not arrays:
            return cls(jnp.bool_(True), jnp.float32(0))
        largest = jnp.stack([_largest_magnitude(x) for x in arrays])
        scaled = largest * factor
        finite = jnp.all(jnp.isfinite(jnp.stack([largest, scaled])))
        return cls(finite, jnp.max(scaled))


def _largest_magnitude(x: jax.Array) -> jax.Array:
    """The largest ``|x|`` as float32; NaN if an element is NaN.

    The maximum is taken over bit patterns, because on some backends a maximum of floats
    ignores NaNs. The bit pattern of a NaN is larger than the pattern of any number.
    """
    wide = jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    patterns = lax.bitcast_convert_type(wide, f"uint{8 * wide.dtype.itemsize}")
    largest = lax.bitcast_convert_type(jnp.max(patterns), wide.dtype)
    return largest.astype(jnp.float32)


def guarded(
    tx: optax.GradientTransformation,
    params,
    state,
    grads,
    guard: Guard | Unguarded,
    landing: Landing,
    extra_args: dict,
):
    """A step, of any transformation, that happens only if the guard allows it.

    Args:
      tx: the transformation.
      params, state: as in optax.
      grads: scaled.
      guard: unscales the gradients, and decides on the device.
      landing: ``REPLACE`` for new parameters, ``ADD`` for updates.
      extra_args: for the transformation.

    Returns:
      ``(new params or updates, new state)``.

    Raises:
      ChangedUpdateError: if a wrapper changes updates that land exactly.
    """
    stepper = stepper_of(tx)
    if stepper is not None:
        return stepper.run(params, state, grads, landing, extra_args, guard)
    tx = optax.with_extra_args_support(tx)
    if landing.is_direct:
        arguments = tx, params, state, grads, extra_args, apply_updates, guard
        direct = step_wrapped(*arguments)
        if direct is not None:
            return direct
    else:
        check_wrapper(tx, params, state, grads, extra_args)
    # Any other transformation runs in a skipped step too, and its results are dropped.
    grads = guard.unscaled(grads)
    new, new_state = tx.update(grads, state, params, **extra_args)
    if landing.is_direct:
        new = guard.chosen(apply_updates(params, new), params)
    else:
        new = guard.updates(new)
    return new, guard.chosen(new_state, state)
