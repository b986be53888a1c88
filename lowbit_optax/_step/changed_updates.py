"""Errors for wrappers that change an update of ``lowbit``.

An update of ``lowbit`` is the difference of two stored parameters, and the residual in
the new state belongs to the new parameter. A wrapper may return the update unchanged,
or skip the step by returning zeros and the old state. Any other update leads to a
parameter that does not match the residual, and small updates are lost.
:class:`.wrapped.WrapperTrace` finds such updates.
"""

import itertools
from collections.abc import Iterable

import jax.numpy as jnp
import optax

from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._step import trees
from lowbit_optax._step.state import holds_lowbit


class ChangedUpdateError(ValueError):
    """A wrapper changes updates that ``lowbit`` has already rounded.

    Args:
      params: dict from paths to parameters, for parameters with changed updates.
    """

    def __init__(self, params: dict):
        self.names = tuple(params)
        name, leaf = next(iter(params.items()))
        others = f" ({len(params) - 1} more)" if len(params) > 1 else ""
        super().__init__(
            "lowbit: a transformation after or around lowbit must not change updates, "
            f"but changes the update of params{name}, {trees.describe(leaf)}{others}. "
            "This update is rounded to match the residual, so a changed update would "
            "lose the low bits of the weights. Put the transformation inside, as in "
            "lowbit(optax.chain(optax.adamw(1e-3), optax.scale(0.5))). Around lowbit, "
            "use only wrappers that return its updates unchanged, or zeros together "
            "with the old state"
        )


def check_updates(params, is_changed: Iterable[bool]) -> None:
    """Raise an error if the update of a narrow or quantized parameter is changed."""
    leaves = trees.by_path(params).items()
    changed = {
        name: leaf
        for (name, leaf), changes in zip(leaves, is_changed, strict=False)
        if changes and (trees.is_quantized(leaf) or is_narrow(jnp.asarray(leaf).dtype))
    }
    if changed:
        raise ChangedUpdateError(changed)


def check_state(state, params) -> None:
    """Raise ChangedUpdateError for the state of a wrapper that changes updates.

    This check finds ``optax.contrib.mechanize`` by its state, because JAX cannot trace
    its update if gradients and parameters differ in dtype.
    """
    if any(map(holds_lowbit, trees.all_of(optax.contrib.MechanicState, state))):
        check_updates(params, itertools.repeat(True))
