"""Refuse transformations that do not work inside ``optax.MultiSteps``.

MultiSteps empties its accumulator by a product with 0, and 0 x inf is NaN. So one
infinity or NaN in any microbatch never leaves it. A transformation inside that
skips such gradients then skips every later one, and training ends without an error.

MultiSteps passes nothing on that tells a transformation who calls it, so
:func:`check_multi_steps_around` looks at the calling frames.
"""

import inspect

import jax
import optax

from lowbit_optax._step import trees

_SKIPS = (optax.ApplyIfFiniteState, optax.ZeroNansState)
"""States of optax's transformations that leave non-finite gradients out."""


def check_multi_steps_around(params, skips: str | None = None) -> None:
    """Raise if a MultiSteps whose ``init`` is running cannot hold its caller.

    Args:
      params: the parameters that the caller's ``init`` received.
      skips: the caller's name, if it skips non-finite gradients.

    Raises:
      TypeError: for quantised weights.
      ValueError: if something inside the MultiSteps skips non-finite gradients.
    """
    this = inspect.currentframe()
    assert this is not None, "Python without frames"
    frame, around = this.f_back, None
    while frame is not None:
        if frame.f_code is this.f_code:
            return  # that call sees the whole state
        if around is None and frame.f_code is optax.MultiSteps.init.__code__:
            around = frame
        frame = frame.f_back
    if around is None:
        return
    if any(map(trees.is_quantized, trees.named_leaves(params)[1])):
        raise TypeError(
            "optax.MultiSteps cannot sum gradients of quantised weights, because "
            "its accumulators are like the parameters; use "
            "lowbit_optax.accumulate_gradients, or put MultiSteps inside lowbit"
        )
    if skips is not None:
        raise ValueError(_refusal(skips))
    multi_steps, params = around.f_locals["self"], around.f_locals["params"]
    # JAX would take the bound method for the one that it may be tracing.
    init = lambda params: multi_steps.init(params)
    check_multi_steps_in(jax.eval_shape(init, params))


def check_multi_steps_in(state) -> None:
    """Raise if a state has a MultiSteps in which something skips bad gradients.

    One that itself skips such gradients, by ``should_skip_update_fn``, has a
    ``skip_state`` and no need of it.

    Raises:
      ValueError: naming the state of what skips.
    """
    for multi_steps in trees.all_of(optax.MultiStepsState, state):
        skips = trees.all_of(_SKIPS, multi_steps.inner_opt_state)
        if skips and not jax.tree.leaves(multi_steps.skip_state):
            raise ValueError(_refusal(type(skips[0]).__name__))


def _refusal(skips: str) -> str:
    return (
        f"optax.MultiSteps with {skips} inside: an infinity or NaN would stay in the "
        "accumulator, because MultiSteps empties it by a product with 0, and "
        "every later step would be skipped. Accepted are the other order, such as "
        "with_loss_scale(optax.MultiSteps(tx, 4), scaling), "
        "lowbit(optax.apply_if_finite(optax.MultiSteps(optax.adamw(1e-3), 4), 5)) and "
        "optax.chain(optax.zero_nans(), optax.MultiSteps(tx, 4)); or "
        "lowbit_optax.accumulate_gradients in place of MultiSteps, such as "
        "accumulate_gradients(with_loss_scale(tx, scaling), 4)"
    )
