"""What all transformations of this package are: steppers behind optax's interface.

A transformation is a plain ``optax.GradientTransformationExtraArgs``. So it can be
mapped over, copied, changed by ``_replace`` and kept in modules like any other. Its
``update`` is a bound method of a :class:`Stepper`, which survives all of these.
"""

import abc
import typing

import optax

from lowbit_optax._numerics.landing import ADD, REPLACE, Landing
from lowbit_optax._step import context, trees


class Stepper(abc.ABC):
    """The configuration behind a transformation that can step parameters directly."""

    @abc.abstractmethod
    def init(self, params: optax.Params) -> typing.Any:
        """As in optax."""

    @abc.abstractmethod
    def run(
        self, params, state, grads: optax.Updates, landing: Landing, extra_args: dict
    ) -> tuple[typing.Any, typing.Any]:
        """``(new params or updates, new state)``.

        Args:
          params, state, grads: as in optax.
          landing: ``REPLACE`` for new parameters, ``ADD`` for updates.
          extra_args: for the inner transformation.
        """

    def update(
        self, updates: optax.Updates, state, params: optax.Params | None = None, **extra
    ) -> tuple[optax.Updates, typing.Any]:
        """As in optax."""
        if not context.current().wants_params:
            return self.run(params, state, updates, ADD, extra)
        with context.params_wanted(False):
            new, state = self.run(params, state, updates, REPLACE, extra)
        _, leaves, treedef = trees.named_leaves(new)
        return treedef.unflatten(map(NewParam, leaves)), state

    def step(
        self, params: optax.Params, state, grads: optax.Updates, **extra
    ) -> tuple[optax.Params, typing.Any]:
        """``(new params, new state)``, without forming differences of parameters."""
        return self.run(params, state, grads, REPLACE, extra)

    @property
    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """The optax transformation of this configuration."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)


def stepper_of(tx) -> Stepper | None:
    """The :class:`Stepper` behind a transformation; None if it has none.

    >>> import optax
    >>> stepper_of(optax.sgd(0.1)) is None
    True
    """
    owner = getattr(getattr(tx, "update", None), "__self__", None)
    return owner if isinstance(owner, Stepper) else None


class NewParam:
    """A new parameter in place of an update; neither an array nor a pytree node."""

    def __init__(self, value):
        self.value = value
