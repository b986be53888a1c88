"""Names of types in signatures, where optax's would know less than the caller does.

optax's trees are arrays, numbers, iterables and mappings, so a type checker refuses
``params["kernel"].dtype``, and trees of shapes.

Params ---------> a tree of parameters; what is returned has the type of what was given
PyTree ---------> a tree of arrays, or of their shapes and dtypes
OptState -------> the state of a transformation
Transformation -> optax's, or ``optax.MultiSteps``, which has the same two methods
"""

import typing

import optax

Params = typing.TypeVar("Params")
PyTree = typing.Any
OptState = typing.Any
Transformation = optax.GradientTransformation | optax.MultiSteps
