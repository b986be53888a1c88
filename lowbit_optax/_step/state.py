"""The state of a :func:`lowbit_optax.lowbit` transformation."""

import typing

import jax

from lowbit_optax._step import trees
from lowbit_optax.formats.base import Residuals


class LowbitState(typing.NamedTuple):
    """State of :func:`lowbit`. Its trees have the structure of the parameters.

    Args:
      count: uint32 scalar, the number of completed steps. ``seed`` and ``count``
        determine all random numbers.
      seed: uint32 scalar, a hash of the ``seed`` argument and a checksum of the
        parameters at ``init``. Replace it to draw other random numbers.
      residual: the residuals, with a blank at each leaf that has none.
      inner_state: the state of the inner transformation, with moments in their formats.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    seed: jax.Array
    residual: Residuals
    inner_state: typing.Any


def holds_lowbit(state) -> bool:
    """Return whether an optimizer state contains a :class:`LowbitState`."""
    return bool(trees.all_of(LowbitState, state))
