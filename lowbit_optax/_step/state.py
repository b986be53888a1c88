"""The optimizer state of :func:`lowbit_optax.lowbit`."""

import typing

import jax

from lowbit_optax._step import trees
from lowbit_optax.formats.base import Residuals


class LowbitState(typing.NamedTuple):
    """State of :func:`lowbit`: parallel trees, each with the parameters' structure.

    Args:
      count: uint32 scalar, the number of steps taken. Together with ``seed`` it is the
        whole state of the random numbers.
      seed: uint32 scalar, the user's seed mixed with a checksum of the parameters at
        ``init``. Replace it to give a state noise of its own.
      residual: the residuals; blanks at leaves that have none.
      inner_state: the inner transformation's state, with its moments in their formats.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]: tuple's
    seed: jax.Array
    residual: Residuals
    inner_state: typing.Any


def holds_lowbit(state) -> bool:
    """Whether an optimizer's state holds one of :func:`lowbit`."""
    return bool(trees.all_of(LowbitState, state))
