"""The optimizer state of :func:`lowbit_optax.lowbit`."""

import typing

import jax


class LowbitState(typing.NamedTuple):
    """State of :func:`lowbit`: parallel trees, each with the parameters' structure.

    Args:
      count: uint32 scalar, the number of steps taken. Together with ``seed`` it is the
        whole state of the random numbers.
      seed: uint32 scalar.
      residual: the tree of residuals, in the container type of the weight format; None
        at leaves that have no residual.
      inner_state: the inner transformation's state, with its moments in their formats.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]: tuple's
    seed: jax.Array
    residual: typing.Any
    inner_state: typing.Any
