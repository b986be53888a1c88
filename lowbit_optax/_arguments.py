"""Checks of arguments that are the same for several functions."""

import inspect

import optax


def check_static_int(
    function: str, name: str, value, low: int, high: int | None = None
) -> None:
    """Raise unless an argument is a static int in its range.

    Args:
      function, name: of the function and its argument, for the error.
      value: given.
      low, high: what is accepted, inclusive; None for no upper bound.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{function}: {name} is {value!r}, and must be a static int; under "
            "optax.inject_hyperparams name it in static_args"
        )
    if value < low or (high is not None and value > high):
        accepted = f"{low} or more" if high is None else f"{low} to {high}"
        raise ValueError(f"{function}: {name} is {value}; accepted are {accepted}")


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
                "optax.MultiSteps cannot sum gradients of quantised weights, because "
                "its accumulators are like the parameters; use "
                "lowbit_optax.accumulate_gradients, or put MultiSteps inside lowbit"
            )
        frame = frame.f_back
