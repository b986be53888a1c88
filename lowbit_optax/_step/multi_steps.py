"""Errors for transformations that do not work inside ``optax.MultiSteps``.

MultiSteps resets its accumulator with a product with 0, and 0 x inf is NaN. One
infinity or NaN in any microbatch therefore stays in the accumulator. If a
transformation inside skips such gradients, it skips every later step, and training
stops without an error.

The ``init`` of this package's transformations calls these functions. MultiSteps does
not pass any information about itself to the transformation inside, so
:func:`check_multi_steps_around` looks for it in the calling frames.
"""

import jax
import optax

from lowbit_optax._step import context, trees

_SKIPS = (optax.ApplyIfFiniteState, optax.ZeroNansState)
"""States of optax's transformations that skip or zero non-finite gradients."""


def check_multi_steps_around(params, skips: str | None = None) -> None:
    """Raise an error if the caller is inside a MultiSteps that does not support it.

    Args:
      params: the parameters that the caller's ``init`` received.
      skips: the name of the caller if it skips non-finite gradients.
    """
    this, init = check_multi_steps_around.__code__, optax.MultiSteps.init.__code__
    if sum(x.f_code is this for x in context.calling_frames()) > 1:
        return  # the outer call checks the whole state
    around = next((x for x in context.calling_frames() if x.f_code is init), None)
    if around is None:
        return
    if any(map(trees.is_quantized, trees.named_leaves(params)[1])):
        raise TypeError(
            "optax.MultiSteps does not support quantized weights, because its "
            "accumulators have the types of the parameters. Use "
            "lowbit_optax.accumulate_gradients, or put MultiSteps inside lowbit"
        )
    if skips is not None:
        raise ValueError(_refusal(skips))
    multi_steps, params = around.f_locals["self"], around.f_locals["params"]
    # Use a new function, because JAX may already be tracing the bound method.
    init = lambda params: multi_steps.init(params)
    check_multi_steps_in(jax.eval_shape(init, params))


def check_multi_steps_in(state) -> None:
    """Raise an error if a MultiSteps contains a transformation that skips gradients.

    A MultiSteps with ``should_skip_update_fn`` is allowed, because it skips such
    gradients itself.
    """
    for multi_steps in trees.all_of(optax.MultiStepsState, state):
        skips = trees.all_of(_SKIPS, multi_steps.inner_opt_state)
        if skips and not jax.tree.leaves(multi_steps.skip_state):
            raise ValueError(_refusal(type(skips[0]).__name__))


def _refusal(skips: str) -> str:
    return (
        f"optax.MultiSteps must not contain {skips}, which skips non-finite gradients. "
        "MultiSteps resets its accumulator with a product with 0, so an infinity or "
        "NaN would stay there, and every later step would be skipped. Use the other "
        "order, as in with_loss_scale(optax.MultiSteps(tx, 4), scaling), "
        "lowbit(optax.apply_if_finite(optax.MultiSteps(optax.adamw(1e-3), 4), 5)) or "
        "optax.chain(optax.zero_nans(), optax.MultiSteps(tx, 4)). Or use "
        "lowbit_optax.accumulate_gradients instead of MultiSteps, as in "
        "accumulate_gradients(with_loss_scale(tx, scaling), 4)"
    )
