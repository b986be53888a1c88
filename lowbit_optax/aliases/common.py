"""What the aliases share: types, defaults, and checks of their arguments."""

import math
import typing
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowbit_optax import formats
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._step.moment_slots import Moments
from pallas_kernels.platforms import Implementation as Implementation

Mask = typing.Any | Callable[[optax.Params], typing.Any] | None
TwoRoundings = typing.Literal["nearest", "stochastic"] | None
ThreeRoundings = typing.Literal["nearest", "toward_zero", "stochastic"] | None

_BFLOAT16_MOMENTS = formats.cast(jnp.bfloat16)


def bfloat16_if_none(moments: Moments) -> Moments:
    """The moments of Zamirai et al., rounded stochastically so that they keep moving.

    >>> bfloat16_if_none(None)
    Cast(dtype=dtype(bfloat16), rounding='stochastic')
    """
    return _BFLOAT16_MOMENTS if moments is None else moments


def given(**arguments) -> dict[str, typing.Any]:
    """The arguments that are not None: for the others the callee's defaults hold.

    >>> given(rounding=None, bits=8)
    {'bits': 8}
    """
    return {name: value for name, value in arguments.items() if value is not None}


def check_learning_rate(alias: str, learning_rate) -> None:
    """Refuse what is neither a schedule nor a finite number.

    >>> check_learning_rate("kahan_sgd", None)
    Traceback (most recent call last):
        ...
    TypeError: kahan_sgd: learning_rate is None; accepted are numbers, float32 scalars
    and schedules
    """
    if not callable(learning_rate):
        accepted = "numbers, float32 scalars and schedules"
        _check_number(alias, "learning_rate", learning_rate, accepted)


def check_numbers(alias: str, **hyperparameters) -> None:
    """Refuse hyperparameters that are not finite numbers."""
    for name, value in hyperparameters.items():
        _check_number(alias, name, value, "numbers and float32 scalars")


def check_moment_dtype(
    alias: str, argument: str, dtype, field: str, moments: Moments
) -> None:
    """Refuse an optax dtype for a moment that ``moments`` stores in a format.

    Args:
      alias: the optimizer's name, for the error.
      argument: optax's name for the dtype, such as ``mu_dtype``.
      dtype: its value.
      field: the moment that it is about.
      moments: the alias's argument.

    Raises:
      ValueError: if both say how the moment is stored.
      TypeError: if ``optax.inject_hyperparams`` made an array of the dtype.
    """
    if isinstance(dtype, jax.Array):
        raise TypeError(
            f"{alias}: {argument} is an array, not a dtype; with "
            "optax.inject_hyperparams name it in static_args"
        )
    if dtype is None or np.dtype(dtype) == np.float32:
        return
    format_ = moments.get(field, "float32") if isinstance(moments, Mapping) else moments
    if isinstance(format_, str) and format_ == "float32":
        return
    stored = "8-bit codes" if format_ is None else repr(format_)
    raise ValueError(
        f"{alias}: {argument} is {np.dtype(dtype)}, but by moments {field} is stored "
        f"as {stored}; leave {argument} out, or keep {field} out of moments, as in "
        'moments="float32"'
    )


def _check_number(alias: str, name: str, value, accepted: str) -> None:
    is_array = isinstance(value, (jax.Array, np.ndarray, np.generic))
    if is_array and not isinstance(value, float):
        _check_array(alias, name, value, accepted)
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{alias}: {name} is {value!r}; accepted are {accepted}")
    # Of an array on a device the value is not waited for.
    if not isinstance(value, jax.Array) and not math.isfinite(value):
        raise ValueError(
            f"{alias}: {name} is {value}, which is not finite; accepted are {accepted}"
        )


def _check_array(alias: str, name: str, value, accepted: str) -> None:
    if value.shape:
        raise ValueError(
            f"{alias}: {name} is an array of shape {value.shape}; accepted are "
            f"{accepted}"
        )
    # optax.inject_hyperparams stores hyperparameters in the parameters' dtype unless it
    # is told another. A b2 of 0.999 is 1 in bfloat16, and 0 among unsigned integers.
    wide_float = jnp.issubdtype(value.dtype, jnp.floating) and not is_narrow(
        value.dtype
    )
    if not wide_float and not jnp.issubdtype(value.dtype, jnp.signedinteger):
        raise TypeError(
            f"{alias}: {name} is a {value.dtype} array; accepted are {accepted}. With "
            "optax.inject_hyperparams pass hyperparam_dtype=jnp.float32"
        )
