"""How ``lowbit_optax.step`` finds the configuration behind a transformation.

A transformation is a plain ``optax.GradientTransformationExtraArgs``. So it can be
mapped over, copied, changed by ``_replace`` and kept in modules like any other. Its
``update`` is a bound method of a :class:`Stepper`, which survives all of these.
"""

import abc
import typing

import optax


class Stepper(abc.ABC):
    """The configuration behind a transformation that can step parameters directly."""

    @abc.abstractmethod
    def init(self, params: optax.Params) -> typing.Any:
        """As in optax."""

    @abc.abstractmethod
    def update(
        self, updates: optax.Updates, state, params: optax.Params | None = None, **extra
    ) -> tuple[optax.Updates, typing.Any]:
        """As in optax."""

    @abc.abstractmethod
    def step(
        self, params: optax.Params, state, grads: optax.Updates, **extra
    ) -> tuple[optax.Params, typing.Any]:
        """``(new params, new state)``, without forming differences of parameters."""

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
