"""Whether an update in the backward pass happens: what loss scaling adds to it.

::

    Open ----------> no loss scale: every update happens
    AllOrNothing --> ``overflow="exact"``: a pass before has looked at all gradients
    PartByPart ----> ``overflow="layer"``: each update looks at its own gradients

``Measure`` is what that first pass looks for: overflows, and the norm for clipping.
"""

import dataclasses
import typing
from collections.abc import Iterable

import jax
import jax.numpy as jnp
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


class Measured(typing.NamedTuple):
    """What is known of some gradients; () in place of what nobody asked for.

    Args:
      squares: float32 scalar, the sum of the squares of the unscaled gradients.
      sizes: whether they are finite, and the largest.
    """

    squares: typing.Any
    sizes: typing.Any


@dataclasses.dataclass(frozen=True, eq=False)
class Measure:
    """What is to be found out.

    Args:
      tx: the optimizer, whose implementation reduces many gradients.
      squares: whether the sum of squares is wanted.
      sizes: whether the sizes are.
      factor: which unscales gradients; None if they are not scaled.
    """

    tx: optax.GradientTransformation
    squares: bool
    sizes: bool
    factor: jax.Array | None

    def __bool__(self) -> bool:
        return self.squares or self.sizes

    def of_none(self) -> Measured:
        """What is known of no gradients."""
        return Measured(
            jnp.zeros([], jnp.float32) if self.squares else (),
            Sizes(jnp.bool_(True), jnp.float32(0)) if self.sizes else (),
        )

    def of(self, grads: Iterable[jax.Array]) -> Measured:
        """What is known of some gradients."""
        grads = list(grads)
        none = self.of_none()
        squares, sizes = none
        if self.squares:
            squares = squares + sum(map(self._sum_of_squares, grads))
        if self.factor is not None and self.sizes:
            sizes = Sizes.of(grads, self.factor, implementation_of(self.tx))
        return Measured(squares, sizes)

    def joined(self, a: Measured, b: Measured) -> Measured:
        """What is known of gradients and of others."""
        squares = a.squares + b.squares if self.squares else ()
        sizes = Sizes.of_all([a.sizes, b.sizes]) if self.sizes else ()
        return Measured(squares, sizes)

    def added(self, before: Measured, grads: Iterable[jax.Array]) -> Measured:
        """What is known with these gradients, too."""
        return self.joined(before, self.of(grads))

    def _sum_of_squares(self, grad: jax.Array) -> jax.Array:
        grad = unscaled(grad, self.factor).astype(jnp.float32)
        return jnp.sum(jnp.square(grad))


def unscaled(grad: jax.Array, factor: jax.Array | None) -> jax.Array:
    """A gradient times the factor, in float32 if it was narrower."""
    return grad if factor is None else Guard(factor, jnp.bool_(True)).times(grad)
