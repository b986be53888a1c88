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


def check_made_by(what: str, tx, params, state) -> None:
    """Raise a ValueError unless the wrappers of a transformation made a state.

    Errors about a :class:`LowbitState` inside the wrappers name its leaves.

    Args:
      what: the name of ``tx`` in the message.
      tx, params: the transformation, and its parameters.
      state: the state that the user passed.
    """
    is_own = lambda x: isinstance(x, LowbitState)
    hidden = lambda tree: jax.tree.map(lambda _: 0, tree, is_leaf=is_own)
    made = jax.eval_shape(lambda params: tx.init(params), trees.abstract(params))
    if jax.tree.structure(hidden(state)) == jax.tree.structure(hidden(made)):
        return
    where = trees.first_difference(trees.named_leaves(hidden(made))[0], hidden(state))
    # Without the original error, which prints all arrays of the state.
    raise ValueError(
        f"{what} must have made the state for these params: its init returns "
        f"{trees.outline(made)}, got {trees.outline(state)} ({where})"
    ) from None
