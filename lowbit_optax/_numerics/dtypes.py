"""Checks of arguments that name a dtype."""

import typing

import jax.numpy as jnp
import numpy as np


def dtype_of(argument: str, value: typing.Any) -> np.dtype:
    """Return the dtype that a value specifies: a dtype, a name, or an array.

    Args:
      argument: name of the argument, for the error.
      value: value of the argument. None raises an error, although numpy reads it as
        float64.

    Raises:
      TypeError: if the value specifies no dtype.

    >>> dtype_of("dtype", "bfloat16")
    dtype(bfloat16)
    """
    try:
        dtype = None if value is None else np.dtype(value)
    except (TypeError, ValueError):
        dtype = None
    if dtype is None:
        raise _not_a_float_dtype(argument, repr(value))
    return dtype


def float_dtype(argument: str, value: typing.Any) -> np.dtype:
    """Return the dtype that a value specifies, if it is a real floating-point dtype.

    Raises:
      TypeError: if the value specifies another dtype, or no dtype.

    >>> float_dtype("f: dtype", jnp.int8)
    Traceback (most recent call last):
        ...
    TypeError: f: dtype must be a floating-point dtype such as bfloat16, got int8
    """
    dtype = dtype_of(argument, value)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise _not_a_float_dtype(argument, dtype)
    return dtype


def _not_a_float_dtype(argument: str, value: typing.Any) -> TypeError:
    return TypeError(
        f"{argument} must be a floating-point dtype such as bfloat16, got {value}"
    )
