"""Arguments that name a dtype: errors that say what was given and what is accepted."""

import typing

import jax.numpy as jnp
import numpy as np


def dtype_of(what: str, given: typing.Any) -> np.dtype:
    """The dtype that an argument names: a dtype, its name, or what has one, as arrays.

    Args:
      what: the argument, for the error.
      given: None names none, although numpy takes it for float64.

    Raises:
      TypeError: if it names none.

    >>> dtype_of("dtype", "bfloat16")
    dtype(bfloat16)
    """
    try:
        dtype = None if given is None else np.dtype(given)
    except (TypeError, ValueError):
        dtype = None
    if dtype is None:
        raise TypeError(
            f"{what} is {given!r}; accepted are floating-point dtypes such as bfloat16"
        )
    return dtype


def float_dtype(what: str, given: typing.Any) -> np.dtype:
    """The real floating-point dtype that an argument names.

    Args:
      what, given: as for :func:`dtype_of`.

    Raises:
      TypeError: if it names another dtype, or none.

    >>> float_dtype("f: dtype", jnp.int8)
    Traceback (most recent call last):
        ...
    TypeError: f: dtype is int8; accepted are floating-point dtypes such as bfloat16
    """
    dtype = dtype_of(what, given)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{what} is {dtype}; accepted are floating-point dtypes such as bfloat16"
        )
    return dtype
