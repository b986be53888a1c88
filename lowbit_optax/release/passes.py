"""What is done in a backward pass: the optimizer's steps, or a sum of squares.

Each class is a :class:`lowbit_optax.release.reverse.BackwardPass`.
"""

import typing
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from lowbit_optax.release.consumers import LayerUpdates, SumOfSquares, sum_of_squares
from lowbit_optax.release.optimizer import Optimizer
from lowbit_optax.release.parts import Part
from lowbit_optax.release.reverse import Cotangents
from lowbit_optax.release.scans import ReleasedScan
from lowbit_optax.release.stretches import Stretch
from lowbit_optax.release.traced_loss import TracedLoss


class UpdatesPass:
    """Steps on leaves as soon as their gradients are there.

    Args:
      loss: whose parameters are updated.
      optimizer: at a state.
      parts: the leaves that are updated after each stretch.
    """

    def __init__(
        self, loss: TracedLoss, optimizer: Optimizer, parts: Mapping[Stretch, Part]
    ):
        self._loss, self._optimizer, self._parts = loss, optimizer, parts
        self._params: dict[str, typing.Any] = {}
        self._state: dict[int, jax.Array] = {}

    def consumer(self, released: ReleasedScan) -> LayerUpdates:
        """Of the gradients in a scan's loop."""
        return LayerUpdates(self._loss, released, self._optimizer)

    def after_loop(self, released: ReleasedScan, carried) -> None:
        """Takes the new stacks."""
        self.tied(self._optimizer.by_leaf(released.leaves, carried))

    def take(self, stretch: Stretch, grads: dict[str, jax.Array]):
        """Steps on the leaves of a stretch."""
        part = self._parts[stretch]
        params, state = self._optimizer.step_on(part, self._loss, grads)
        return params, {n: x for n, x in state.items() if n in part.own}

    def tied(self, arrays) -> None:
        """Takes new parameters by path, and state by number."""
        params, state = arrays
        self._params |= params
        self._state |= state

    def finished(
        self, last: Part | None, cotangents: Cotangents
    ) -> tuple[dict[str, typing.Any], list]:
        """All new parameters by path, and the new state's leaves.

        Args:
          last: the leaves that have not been updated. If None, a step on all leaves is
            taken, with zeros for the gradients of those that have, whose results are
            then replaced.
          cotangents: by value, the other leaves' gradients.
        """
        loss, optimizer = self._loss, self._optimizer
        grads = {
            leaf.name: cotangents[leaf.gradient_value]
            for leaf in loss.leaves
            if leaf.gradient_value in cotangents
        }
        if last is None:
            params, state = optimizer.step(loss, grads, {}, {})
            state = dict(enumerate(state))
        else:
            params, state = optimizer.step_on(last, loss, grads)
        state |= self._state
        return params | self._params, [state[n] for n in range(len(state))]


class SquaresPass:
    """Adds up the squares of gradients, and keeps none of them.

    Attributes:
      total: the sum so far, float32.
    """

    def __init__(self):
        self.total = jnp.zeros([], jnp.float32)

    def consumer(self, released: ReleasedScan) -> SumOfSquares:
        """Of the gradients in a scan's loop."""
        return SumOfSquares(released)

    def after_loop(self, released: ReleasedScan, carried: jax.Array) -> None:
        """Adds the loop's sum."""
        del released
        self.total = self.total + carried

    def take(self, stretch: Stretch, grads: dict[str, jax.Array]) -> jax.Array:
        """The sum with these gradients."""
        del stretch
        return self.total + sum(map(sum_of_squares, grads.values()))

    def tied(self, arrays: jax.Array) -> None:
        """Takes the new sum."""
        self.total = arrays
