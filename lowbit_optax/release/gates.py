"""Whether an update in the backward pass happens: what loss scaling adds to it.

::

    Open ----------> no loss scale: every update happens
    AllOrNothing --> ``overflow="exact"``: a pass before has looked at all gradients
    PartByPart ----> ``overflow="layer"``: each update looks at its own gradients
"""

import dataclasses
import typing

import jax
import optax

from lowbit_optax._step.guard import Guard, Unguarded
from lowbit_optax._step.stepper import stepper_of
from lowbit_optax.loss_scaling.guarded import Sizes, implementation_of
from lowbit_optax.loss_scaling.transformation import LossScaled, LossScaleState

OVERFLOWS = ("exact", "layer")
"""What may be done about overflows."""


class Gate(typing.Protocol):
    """Decides, in the backward pass, whether the update of some leaves happens."""

    def check(self, grads) -> tuple[Guard | Unguarded, typing.Any]:
        """The guard of an update with these gradients, and what was found in them.

        The second is a :class:`Sizes` of scalars, or (), if nothing had to be looked
        for.
        """
        ...


class Open:
    """Lets every update happen: there is no loss scale, or nothing can overflow."""

    def check(self, grads) -> tuple[Unguarded, tuple[()]]:
        """No guard."""
        del grads
        return Unguarded(), ()


@dataclasses.dataclass(frozen=True, eq=False)
class AllOrNothing:
    """Lets all updates happen, or none.

    Args:
      guard: by what the pass before has found in all gradients.
    """

    guard: Guard

    def check(self, grads) -> tuple[Guard, tuple[()]]:
        """The same guard for all."""
        del grads
        return self.guard, ()


@dataclasses.dataclass(frozen=True, eq=False)
class PartByPart:
    """Lets an update happen if its own gradients are finite.

    Args:
      tx: the optimizer, without the loss scale.
      factor: which unscales gradients.
    """

    tx: optax.GradientTransformation
    factor: jax.Array

    def check(self, grads) -> tuple[Guard, Sizes]:
        """A guard by the sizes of these gradients."""
        sizes = Sizes.of(grads, self.factor, implementation_of(self.tx))
        return Guard(self.factor, sizes.finite), sizes


def loss_scaled(tx: optax.GradientTransformation) -> LossScaled | None:
    """The configuration of ``with_loss_scale``, if a transformation is made by it."""
    stepper = stepper_of(tx)
    return stepper if isinstance(stepper, LossScaled) else None


def without_scale(tx: optax.GradientTransformation, opt_state):
    """A transformation and its state, taken out of the loss scale around them.

    Raises:
      TypeError: if the state is that of another transformation.
      ValueError: if a loss scale is inside another transformation.
    """
    scaled = loss_scaled(tx)
    if scaled is not None:
        scaled.check_state(opt_state)
        tx, opt_state = scaled.inner, opt_state.inner_state
    is_scale = lambda x: isinstance(x, LossScaleState)
    for path, leaf in jax.tree.leaves_with_path(opt_state, is_leaf=is_scale):
        if is_scale(leaf):
            raise ValueError(
                "release: there is a loss scale inside another transformation, at "
                f"state{jax.tree_util.keystr(path)}; accepted is with_loss_scale "
                "around the whole optimizer"
            )
    return tx, opt_state
