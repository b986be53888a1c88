"""What the aliases share: defaults, checks, and the paper's bfloat16 unit."""

import typing

import jax
import jax.numpy as jnp

from lowbit_optax import formats
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax.transformation import lowbit

Arithmetic = typing.Literal["float32", "param"]

BFLOAT16 = formats.cast(jnp.bfloat16)
"""The papers' moments, rounded stochastically so that they do not get stuck."""


def extra_bits(bits, rounding, residual_rounding):
    """The aliases' weight format: bfloat16's whole float32 unless told.

    ``bits`` is None by default and not 16, because ``optax.inject_hyperparams`` makes
    a traced hyperparameter of every int.
    """
    return formats.extra_bits(
        16 if bits is None else bits,
        rounding=rounding,
        residual_rounding=residual_rounding,
    )


def unit(build, weights, options):
    """The paper's bfloat16 unit: ``build(dtype)`` as the inner transformation."""
    # The unit's values are numbers of its format already: rounding them is exact.
    moments = formats.cast(jnp.bfloat16, rounding="nearest")
    return lowbit(build(jnp.bfloat16), weights=weights, moments=moments, **options)


def static(**arguments) -> None:
    """Refuse traced arguments of the paper's bfloat16 unit."""
    for name, value in arguments.items():
        if isinstance(value, jax.Array):
            raise TypeError(
                f"{name} is a {value.dtype} array; with arithmetic='param' only "
                "learning_rate may be one. With optax.inject_hyperparams name the "
                "others in static_args"
            )


def wide(**hyperparameters) -> None:
    """Refuse numbers that arrive in 16 bits, where a b2 of 0.999 is 1.

    ``optax.inject_hyperparams`` stores them in the parameters' dtype unless told.
    """
    for name, value in hyperparameters.items():
        if hasattr(value, "dtype") and is_narrow(value.dtype):
            raise TypeError(
                f"{name} is a {value.dtype} array; accepted are Python numbers, "
                "float32 arrays and schedules. With optax.inject_hyperparams pass "
                "hyperparam_dtype=jnp.float32"
            )


def is_param(arithmetic: str) -> bool:
    """Whether the paper's bfloat16 unit is asked for, after a check of the argument."""
    if arithmetic not in ("float32", "param"):
        raise ValueError(f"arithmetic is {arithmetic!r}, not 'float32' or 'param'")
    return arithmetic == "param"


def only_float32(moments, **arguments) -> None:
    """Refuse arguments that the paper's algorithms do not have."""
    if moments is not BFLOAT16:
        arguments["moments"] = moments
    for name, value in arguments.items():
        static(**{name: value})
        if value:
            raise ValueError(
                f"{name} is {value!r}, but arithmetic='param' runs the paper's "
                "algorithm, which has none; take arithmetic='float32'"
            )
