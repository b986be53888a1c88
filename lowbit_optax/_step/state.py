"""The optimizer state of :func:`lowbit_optax.lowbit`."""

import typing

import jax


class LowbitState(typing.NamedTuple):
    """State of :func:`lowbit`: parallel trees, each with the parameters' structure.

    Args:
      count: uint32 scalar, steps taken; with ``seed`` it is all the random state.
      seed: uint32 scalar.
      residual: the weight format's container of a tree of residuals, None at leaves
        that have none.
      inner_state: the inner transformation's state, its moments in their formats.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]: tuple's
    seed: jax.Array
    residual: typing.Any
    inner_state: typing.Any
