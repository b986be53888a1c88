"""Refusals of what only the calling code shows."""

import inspect

import optax


def refuse_multi_steps() -> None:
    """Raise if ``optax.MultiSteps`` is initialising a transformation of this package.

    MultiSteps makes accumulators like the parameters, uint32 words for quantised
    weights, in which gradients cannot be summed. It hands on nothing that tells a
    transformation who calls it, and would fail at the first update, so the callers are
    looked at.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), optax.MultiSteps):
            raise TypeError(
                "optax.MultiSteps cannot sum gradients of QuantizedTensors, because "
                "its accumulators are like the parameters; use "
                "lowbit_optax.accumulate_gradients, or put MultiSteps inside lowbit"
            )
        frame = frame.f_back
