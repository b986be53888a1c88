"""Refusals that need to know the calling code."""

import inspect

import optax


def refuse_multi_steps() -> None:
    """Raise if ``optax.MultiSteps`` is initialising a transformation of this package.

    MultiSteps makes accumulators like the parameters, which for quantised weights are
    uint32 words, in which gradients cannot be summed. It would fail at the first
    update. It passes nothing on that tells a transformation who calls it, so this
    function looks at the calling frames.
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
