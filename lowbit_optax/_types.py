"""Types for signatures that type checkers handle better than optax's types.

With optax's types, a type checker reports ``params["kernel"].dtype`` and trees of
shapes as errors.

Params ---------> a tree of parameters; functions return the type that they receive
PyTree ---------> a tree of arrays, or of shapes and dtypes
Function -------> a function of the user, such as a loss
OptState -------> the state of a transformation
Transformation -> an optax transformation, or ``optax.MultiSteps``
"""

import typing
from collections.abc import Callable

import optax

Params = typing.TypeVar("Params")
PyTree = typing.Any
Function = Callable[..., typing.Any]
OptState = typing.Any
Transformation = optax.GradientTransformation | optax.MultiSteps
