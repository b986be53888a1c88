"""Shared code of the aliases: inner optimizers, and checks of arguments."""

import inspect
import math
import typing
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowbit_optax import formats
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._step import trees
from lowbit_optax._step.moments import Moments

Mask = typing.Any | Callable[[typing.Any], typing.Any] | None
TwoRoundings = typing.Literal["nearest", "stochastic"] | None
ThreeRoundings = typing.Literal["nearest", "toward_zero", "stochastic"] | None

BFLOAT16_MOMENTS = formats.cast(jnp.bfloat16)
"""The moment format of Zamirai et al. 2020, with stochastic rounding."""


def without_none(**arguments) -> dict[str, typing.Any]:
    """Returns the arguments that are not None, so that defaults replace the others.

    >>> without_none(rounding=None, bits=8)
    {'bits': 8}
    """
    return {name: value for name, value in arguments.items() if value is not None}


_NUMBERS = ("eps", "eps_root", "weight_decay")


def checked(
    alias: str, moments: Moments, make: Callable[..., typing.Any], *args, **kwargs
) -> optax.GradientTransformationExtraArgs:
    """Checks the arguments and returns ``make(*args, **kwargs)``.

    Args:
      alias: the name of the calling function, for error messages.
      moments: the formats for the optimizer's moments.
      make: ``optax.adamw`` or ``optax.lion``.
      *args, **kwargs: the arguments of ``make``.
    """
    given = inspect.signature(make).bind(*args, **kwargs).arguments
    check_learning_rate(alias, given["learning_rate"])
    check_numbers(alias, **{name: given[name] for name in _NUMBERS if name in given})
    for name in ("b1", "b2"):
        if name in given:
            check_decay(alias, name, given[name])
    check_moment_dtype(alias, "mu_dtype", given["mu_dtype"], "mu", moments)
    return make(*args, **kwargs)


def sgd(
    alias: str,
    moments: Moments,
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | None,
    nesterov: bool,
    accumulator_dtype: typing.Any,
    *,
    weight_decay: float | jax.Array | None,
) -> optax.GradientTransformationExtraArgs:
    """Returns ``optax.sgd`` with an L2 penalty that adds no optimizer state."""
    decay = 0.0 if weight_decay is None else weight_decay
    check_learning_rate(alias, learning_rate)
    check_numbers(alias, weight_decay=decay, **without_none(momentum=momentum))
    if momentum is not None:
        dtype = accumulator_dtype
        check_moment_dtype(alias, "accumulator_dtype", dtype, "trace", moments)
    plain = optax.sgd(learning_rate, momentum, nesterov, accumulator_dtype)
    plain = optax.with_extra_args_support(plain)
    is_array = isinstance(decay, jax.Array)
    if not is_array and decay == 0:
        return plain
    decayed = optax.add_decayed_weights(decay)

    def update_fn(updates, state, params=None, **extra_args):
        grads, _ = decayed.update(updates, optax.EmptyState(), params)
        if is_array:
            # If the decay is zero and a weight is infinite, their product is NaN.
            keep = lambda g, new: jnp.where(decay == 0, g, new)
            grads = jax.tree.map(keep, updates, grads)
        return plain.update(grads, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(plain.init, update_fn)


def corrected_momentum(mu, grads, decay, count, nesterov: bool):
    """Returns the momentum without its bias; for Nesterov, the momentum one step ahead.

    Args:
      mu: the running average of ``grads``, which includes this step.
      grads: the gradients of this step.
      decay: the decay rate of the average.
      count: the number of this step; the first is 1.
      nesterov: whether to look ahead, as in ``optax.scale_by_adam``.
    """
    corrected = optax.tree.bias_correction
    if not nesterov:
        return corrected(mu, decay, count)
    ahead = corrected(mu, decay, optax.safe_increment(count))
    grads = corrected(grads, decay, count)
    return jax.tree.map(lambda m, g: decay * m + (1 - decay) * g, ahead, grads)


def check_learning_rate(alias: str, learning_rate) -> None:
    """Raises an error unless the learning rate is a schedule or a finite number.

    >>> check_learning_rate("kahan_sgd", None)
    Traceback (most recent call last):
        ...
    TypeError: kahan_sgd: learning_rate must be a number, a float32 scalar or a
    schedule, got None
    """
    if not callable(learning_rate):
        accepted = "a number, a float32 scalar or a schedule"
        _check_number(alias, "learning_rate", learning_rate, accepted)


def check_numbers(alias: str, **hyperparameters) -> None:
    """Raises an error if a hyperparameter is not a finite number."""
    for name, value in hyperparameters.items():
        _check_number(alias, name, value, "a number or a float32 scalar")


def check_decay(alias: str, name: str, decay) -> None:
    """Raises an error unless the decay rate of a running mean is in [0, 1)."""
    check_numbers(alias, **{name: decay})
    if not isinstance(decay, jax.Array) and not 0 <= decay < 1:
        raise ValueError(f"{alias}: {name} must be from 0 to below 1, got {decay}")


def check_moment_dtype(
    alias: str, argument: str, dtype, field: str, moments: Moments
) -> None:
    """Raises an error if both optax and ``moments`` set the dtype of a moment.

    Raises:
      ValueError: if ``moments`` also has a format for ``field``.
    """
    if dtype is None or np.dtype(dtype) == np.float32:
        return
    format_ = moments.get(field, "float32") if isinstance(moments, Mapping) else moments
    if isinstance(format_, str) and format_ == "float32":
        return
    stored = "8-bit codes" if format_ is None else repr(format_)
    raise ValueError(
        f"{alias}: {argument} is {np.dtype(dtype)}, but moments stores {field} as "
        f'{stored}; remove {argument}, or pass moments="float32"'
    )


def _check_number(alias: str, name: str, value, accepted: str) -> None:
    is_array = isinstance(value, (jax.Array, np.ndarray, np.generic))
    if is_array and not isinstance(value, float):
        _check_array(alias, name, value, accepted)
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{alias}: {name} must be {accepted}, got {value!r}")
    # Reading the value of a device array would wait for the device.
    if not isinstance(value, jax.Array) and not math.isfinite(value):
        raise ValueError(f"{alias}: {name} must be finite, got {value}")


def _check_array(alias: str, name: str, value, accepted: str) -> None:
    if value.shape:
        raise ValueError(
            f"{alias}: {name} must be {accepted}, got an array of shape {value.shape}"
        )
    # optax.inject_hyperparams stores hyperparameters in the dtype of the parameters by
    # default. A b2 of 0.999 becomes 1 in bfloat16, and 0 in unsigned integers.
    is_wide = trees.is_float(value) and not is_narrow(value.dtype)
    if not is_wide and not jnp.issubdtype(value.dtype, jnp.signedinteger):
        raise TypeError(
            f"{alias}: {name} must be {accepted}, got a {value.dtype} array. With "
            "optax.inject_hyperparams, pass hyperparam_dtype=jnp.float32"
        )
