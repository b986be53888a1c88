"""What a first backward pass finds out about gradients: their norm, and overflows."""

import dataclasses
import typing
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._step.guard import Guard
from lowbit_optax.loss_scaling.guarded import Sizes, implementation_of


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
