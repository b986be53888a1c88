"""What is done in a backward pass: the optimizer's steps, or measuring gradients.

Each class is a :class:`lowbit_optax.release.reverse.BackwardPass`.
"""

import typing
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp

from lowbit_optax._step.guard import Guard
from lowbit_optax.loss_scaling.guarded import Sizes
from lowbit_optax.release.consumers import LayerUpdates, MeasuredLayers
from lowbit_optax.release.gates import Gate
from lowbit_optax.release.measures import Measure, Measured
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
      gate: decides whether each step happens.

    Attributes:
      found: by path of a leaf, what the gate has found in the gradients with which it
        was updated; one for each layer of a leaf that was updated in a loop.
    """

    def __init__(
        self,
        loss: TracedLoss,
        optimizer: Optimizer,
        parts: Mapping[Stretch, Part],
        gate: Gate,
    ):
        self._loss, self._optimizer, self._parts = loss, optimizer, parts
        self._gate = gate
        self._params: dict[str, typing.Any] = {}
        self._state: dict[int, jax.Array] = {}
        self.found: dict[str, typing.Any] = {}

    def consumer(self, released: ReleasedScan) -> LayerUpdates:
        """Of the gradients in a scan's loop."""
        return LayerUpdates(self._loss, released, self._optimizer, self._gate)

    def after_loop(self, released: ReleasedScan, carried) -> None:
        """Takes the new stacks."""
        stacks, found = carried
        params, state = self._optimizer.by_leaf(released.leaves, stacks)
        self.tied((params, state, dict.fromkeys(params, found)))

    def take(self, stretch: Stretch, grads: dict[str, jax.Array]):
        """Steps on the leaves of a stretch."""
        part = self._parts[stretch]
        guard, found = self._gate.check(grads)
        params, state = self._optimizer.step_on(part, self._loss, grads, guard)
        state = {n: x for n, x in state.items() if n in part.own}
        return params, state, dict.fromkeys(params, found)

    def tied(self, arrays) -> None:
        """Takes new parameters by path, state by number, and what was found."""
        params, state, found = arrays
        self._params |= params
        self._state |= state
        self.found |= found

    def finished(
        self,
        last: Part | None,
        cotangents: Cotangents,
        of_no_gradient: Collection[int] = (),
    ) -> tuple[dict[str, typing.Any], list]:
        """All new parameters by path, and the new state's leaves.

        Args:
          last: the leaves that have not been updated. If None, a step on all leaves is
            taken, with zeros for the gradients of those that have, whose results are
            then replaced.
          cotangents: by value, the other leaves' gradients.
          of_no_gradient: numbers of the state's leaves, such as a count, that go on if
            any step happens; the others if that with these gradients does.
        """
        grads = {
            leaf.name: cotangents[leaf.gradient_value]
            for leaf in self._loss.leaves
            if leaf.gradient_value in cotangents
        }
        guard, found = self._gate.check(grads)
        params, state = self._last_step(last, grads, guard)
        if found and isinstance(guard, Guard):
            checked = [each.finite for each in self.found.values()]
            checked += [found.finite] if grads else []
            proceed = jnp.any(jnp.stack([jnp.any(x) for x in checked]))
            some = Guard(guard.factor, proceed)
            finite = {n: jnp.where(found.finite, x, 0) for n, x in grads.items()}
            # Of this step only these numbers are computed.
            _, shared = self._last_step(last, finite, some)
            state |= {n: shared[n] for n in of_no_gradient if n in shared}
            names = [leaf.name for leaf in self._loss.leaves]
            self.found = dict.fromkeys(names, found) | self.found
        state |= self._state
        return params | self._params, [state[n] for n in range(len(state))]

    def _last_step(self, last: Part | None, grads, guard):
        loss, optimizer = self._loss, self._optimizer
        if last is not None:
            return optimizer.step_on(last, loss, grads, guard)
        params, state = optimizer.step(loss, grads, {}, {}, guard)
        return params, dict(enumerate(state))

    def sizes(self) -> Sizes:
        """Of all gradients, if the gate looks at them."""
        return Sizes.of_all(self.found.values())


class MeasuringPass:
    """Measures gradients, and keeps none of them.

    Attributes:
      measured: so far.
    """

    def __init__(self, measure: Measure):
        self._measure = measure
        self.measured = measure.of_none()

    def consumer(self, released: ReleasedScan) -> MeasuredLayers:
        """Of the gradients in a scan's loop."""
        return MeasuredLayers(released, self._measure)

    def after_loop(self, released: ReleasedScan, carried: Measured) -> None:
        """Takes what the loop has found."""
        del released
        self.measured = self._measure.joined(self.measured, carried)

    def take(self, stretch: Stretch, grads: dict[str, jax.Array]) -> Measured:
        """What is known with these gradients."""
        del stretch
        return self._measure.added(self.measured, grads.values())

    def tied(self, arrays: Measured) -> None:
        """Takes what is known."""
        self.measured = arrays
