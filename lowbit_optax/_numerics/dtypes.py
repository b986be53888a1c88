"""Arguments that name a dtype: errors that say what was given and what is accepted."""

import typing

import jax.numpy as jnp
import numpy as np


def dtype_of(argument: str, value: typing.Any) -> np.dtype:
    """The dtype that a value names: a dtype, its name, or an array that has one.

    Args:
      argument: its name, for the error.
      value: what was passed. None is refused, although numpy takes it for float64.

    Raises:
      TypeError: if the value names no dtype.

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
    """The real floating-point dtype that a value names, as in :func:`dtype_of`.

    Raises:
      TypeError: if the value names another dtype, or no dtype.

    >>> float_dtype("f: dtype", jnp.int8)
    Traceback (most recent call last):
        ...
    TypeError: f: dtype is int8; accepted are floating-point dtypes such as bfloat16
    """
    dtype = dtype_of(argument, value)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise _not_a_float_dtype(argument, dtype)
    return dtype


def _not_a_float_dtype(argument: str, value: typing.Any) -> TypeError:
    return TypeError(
        f"{argument} is {value}; accepted are floating-point dtypes such as bfloat16"
    )
