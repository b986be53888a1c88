"""Checks of arguments that are the same for several functions."""

import math
import typing
from collections.abc import Callable

import numpy as np


def check_static_int(
    function: str, name: str, value, low: float = -math.inf, high: int | None = None
) -> None:
    """Raise unless an argument is a static int in its range.

    Args:
      function, name: the names of the function and its argument, for the error.
      value: the argument.
      low, high: the least and the largest accepted value, if there are bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{function}: {name} is {value!r}, and must be a static int; under "
            "optax.inject_hyperparams name it in static_args"
        )
    if value < low or (high is not None and value > high):
        accepted = f"{low} or more" if high is None else f"{low} to {high}"
        raise ValueError(f"{function}: {name} is {value}; accepted are {accepted}")


def check_number(
    function: str,
    name: str,
    value,
    is_accepted: Callable[[typing.Any], bool],
    accepted: str,
) -> None:
    """Raise a ValueError unless an argument is a number that is accepted.

    Args:
      function, name: the names of the function and its argument, for the error.
      value: the argument.
      is_accepted: a function that returns whether a number is accepted.
      accepted: the end of the message, such as ``"are numbers from 0 to 1"``.
    """
    is_number = isinstance(value, int | float | np.floating)
    if not is_number or isinstance(value, bool) or not is_accepted(value):
        raise ValueError(f"{function}: {name} is {value!r}; accepted {accepted}")


def check_choice(function: str, name: str, value, choices: typing.Any) -> None:
    """Raise a ValueError unless an argument is one of a ``typing.Literal``'s values.

    >>> check_choice("demote", "order", "up", typing.Literal["down", "random"])
    Traceback (most recent call last):
    ValueError: demote: order is 'up'; accepted are 'down', 'random'
    """
    accepted = typing.get_args(choices)
    if value not in accepted:
        words = ", ".join(map(repr, accepted))
        raise ValueError(f"{function}: {name} is {value!r}; accepted are {words}")


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
