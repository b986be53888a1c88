"""Checks of arguments that several functions share."""

import inspect
import math
import reprlib
import typing
from collections.abc import Callable

import numpy as np

_BRIEF = reprlib.Repr()
_BRIEF.maxother = _BRIEF.maxstring = 100
brief = _BRIEF.repr
"""Return the ``repr`` of any value in a few words, for errors."""


def check_static_int(
    function: str, name: str, value, low: float = -math.inf, high: int | None = None
) -> None:
    """Raise an error unless an argument is a static int in its range.

    Args:
      function, name: the names of the function and of its argument, for the message.
      value: the argument.
      low, high: the smallest and the largest allowed value.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{function}: {name} must be a static int, got {brief(value)}; with "
            "optax.inject_hyperparams, add it to static_args"
        )
    if value < low or (high is not None and value > high):
        accepted = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{function}: {name} must be {accepted}, got {value}")


def check_number(
    function: str,
    name: str,
    value,
    is_accepted: Callable[[typing.Any], bool],
    accepted: str,
) -> None:
    """Raise a ValueError unless an argument is a number in an allowed range.

    Args:
      function, name: the names of the function and of its argument, for the message.
      value: the argument.
      is_accepted: a function that returns True for allowed numbers.
      accepted: the allowed numbers, such as ``"a number from 0 to 1"``.
    """
    is_number = isinstance(value, int | float | np.floating)
    if not is_number or isinstance(value, bool) or not is_accepted(value):
        raise ValueError(f"{function}: {name} must be {accepted}, got {brief(value)}")


def check_choice(function: str, name: str, value, choices: typing.Any) -> None:
    """Raise a ValueError unless an argument is a value of a ``typing.Literal``.

    >>> check_choice("demote", "order", "up", typing.Literal["down", "random"])
    Traceback (most recent call last):
    ValueError: demote: order must be one of 'down', 'random', got 'up'
    """
    accepted = typing.get_args(choices)
    if value not in accepted:
        words = ", ".join(map(repr, accepted))
        raise ValueError(f"{function}: {name} must be one of {words}, got {value!r}")


def check_type(argument: str, value, kind, accepted: str) -> None:
    """Raise a TypeError unless an argument is an instance of a type.

    Args:
      argument: the names of the function and of its argument, for the message.
      value: the argument.
      kind: the type, or a union of types.
      accepted: the allowed values in words.

    >>> check_type("pack: name", 1, str, "a string")
    Traceback (most recent call last):
    TypeError: pack: name must be a string, got 1
    """
    if not isinstance(value, kind):
        raise TypeError(f"{argument} must be {accepted}, got {brief(value)}")


def check_transformation(function: str, name: str, tx) -> None:
    """Raise a TypeError unless an argument is an optax transformation."""
    if callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)):
        return
    is_function = inspect.isroutine(tx) or isinstance(tx, type)
    hint = "; call it first, as in optax.adamw(1e-3)" if is_function else ""
    is_short = is_function or isinstance(tx, int | float | str | None)
    given = repr(tx) if is_short else f"a {type(tx).__name__}"
    raise TypeError(
        f"{function}: {name} must be an optax transformation, got {given}{hint}"
    )
