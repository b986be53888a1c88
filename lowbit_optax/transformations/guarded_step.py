"""Run a step of any transformation with a guard that may skip it."""

import optax

from lowbit_optax._numerics.landing import Landing
from lowbit_optax._step.guard import Guard, Unguarded
from lowbit_optax._step.stepper import stepper_of
from lowbit_optax._step.wrapped import check_wrapper, step_wrapped
from lowbit_optax.transformations.lowbit import apply_updates


def guarded(
    tx,
    params,
    state,
    grads,
    guard: Guard | Unguarded,
    landing: Landing,
    extra_args: dict,
):
    """Run a step unless the guard skips it.

    Args:
      tx: the transformation.
      params, state: the parameters, and the state of ``tx``.
      grads: the scaled gradients.
      guard: unscales the gradients, and decides on the device whether to step.
      landing: ``REPLACE`` for new parameters, ``ADD`` for updates.
      extra_args: passed to the transformation.

    Returns:
      ``(new params or updates, new state)``.

    Raises:
      ChangedUpdateError: if a wrapper changes rounded updates.
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
    # Other transformations also run in skipped steps, which drop the results.
    grads = guard.unscaled(grads)
    new, new_state = tx.update(grads, state, params, **extra_args)
    if landing.is_direct:
        new = guard.chosen(apply_updates(params, new), params)
    else:
        new = guard.updates(new)
    return new, guard.chosen(new_state, state)
