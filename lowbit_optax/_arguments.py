"""Checks of arguments that are the same for several functions."""


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


def check_transformation(function: str, name: str, tx) -> None:
    """Raise unless an argument is an optax transformation.

    Args:
      function: the name of the function, for the error.
      name: the name of its argument.
      tx: the argument.
    """
    if callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)):
        return
    hint = "; call it first, such as optax.adamw(1e-3)" if callable(tx) else ""
    is_short = callable(tx) or isinstance(tx, int | float | str | None)
    given = repr(tx) if is_short else f"a {type(tx).__name__}"
    raise TypeError(f"{function}: {name} is {given}, not an optax transformation{hint}")
