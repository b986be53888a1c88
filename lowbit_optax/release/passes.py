"""What is done in a backward pass: the optimizer's steps, or measuring gradients.

    LayerUpdates, MeasuredLayers   with a layer's gradients, in a backward loop
    UpdatesPass, MeasuringPass     with those of other leaves, between loops

The first two are each a :class:`lowbit_optax.release.backward.GradientConsumer`, the
others a :class:`lowbit_optax.release.reverse.BackwardPass`.
"""

import dataclasses
import functools
import typing
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from lowbit_optax._step import context
from lowbit_optax._step.guard import Guard, Unguarded
from lowbit_optax._step.layers import Layer
from lowbit_optax.loss_scaling.guarded import Sizes
from lowbit_optax.release.gates import Gate, Measure, Measured
from lowbit_optax.release.host_memory import beside, is_on_host, on_device
from lowbit_optax.release.parts import Optimizer, Part
from lowbit_optax.release.reverse import Cotangents
from lowbit_optax.release.stretches import ReleasedScan, Stretch
from lowbit_optax.release.traced_loss import TracedLoss


@dataclasses.dataclass(frozen=True, eq=False)
class LayerUpdates:
    """Updates each layer in its stacks as soon as its gradients are there.

    What it carries are the stacks of ``optimizer.stacks(released.leaves)``, and what
    the gate has found in the gradients of each layer.
    """

    loss: TracedLoss
    released: ReleasedScan
    optimizer: Optimizer
    gate: Gate

    def begin(self) -> tuple[list[jax.Array], typing.Any]:
        """The stacks before the step, and room for what will be found."""
        leaves = self.released.leaves
        length = self.released.scan.length
        found = jax.eval_shape(lambda: self.gate.check([])[1])
        found = jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), found)
        return self.optimizer.stacks(leaves), found

    def layer(self, index, carried) -> dict[int, jax.Array]:
        values = [n for leaf in self.released.leaves for n in leaf.array_values]
        # The state's stacks come after those of the parameters.
        stacks = carried[0][: len(values)]
        return {
            self.released.operand(value): _layer_of(stack, index)
            for value, stack in zip(values, stacks, strict=True)
        }

    def update(self, index, carried, grads):
        stacks, found = carried
        by_name = {
            leaf.name: grads[self.released.operand(leaf.gradient_value)]
            for leaf in self.released.leaves
        }
        guard, new = self.gate.check(by_name)
        put_back = functools.partial(self._update_and_put_back, guard)
        in_stacks = functools.partial(self._update_in_stacks, guard)
        # Kernels have no access to host memory.
        can_write = self.optimizer.writes_into_stacks(guard)
        if can_write and not any(map(is_on_host, stacks)):
            stacks = lax.platform_dependent(
                index, stacks, by_name, cuda=in_stacks, default=put_back
            )
        else:
            stacks = put_back(index, stacks, by_name)
        put = lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, index, 0)
        return stacks, jax.tree.map(put, found, new)

    def _update_in_stacks(self, guard, index, stacks, grads):
        """By kernels, which write into the stacks."""
        layer = self._layer(index)
        new = self._step(layer, [layer.of(stack) for stack in stacks], grads, guard)
        return [layer.put(a, b) for a, b in zip(stacks, new, strict=True)]

    def _update_and_put_back(self, guard, index, stacks, grads):
        """The layer is taken out, updated, and put back.

        If XLA fused the update with the reads and writes around it, the update of one
        stack would read the old layer of another, and XLA's CPU compiler would copy
        whole stacks in every iteration. It does not fuse what is inside a conditional
        with what is outside. (An optimization barrier does not prevent the fusion.)
        """
        layer = self._layer(index)
        old = [on_device(layer.of(stack)) for stack in stacks]
        new = lax.cond(
            index >= jnp.int32(0),
            lambda: self._step(layer, old, grads, guard),
            lambda: old,
        )
        return [layer.put(a, beside(b, a)) for a, b in zip(stacks, new, strict=True)]

    def _layer(self, index) -> Layer:
        names = frozenset(leaf.name for leaf in self.released.leaves)
        return Layer(index, self.released.scan.length, names)

    def _step(
        self, layer: Layer, old: list, grads: dict, guard: Guard | Unguarded
    ) -> list:
        """New layers for old ones, in the order of the stacks."""
        leaves, optimizer = self.released.leaves, self.optimizer
        params, state = optimizer.by_leaf(leaves, old)
        with context.one_layer(layer):
            new_params, new_state = optimizer.step(
                self.loss, grads, params, state, guard
            )
        arrays = [x for leaf in leaves for x in jax.tree.leaves(new_params[leaf.name])]
        return arrays + [new_state[n] for n in optimizer.stack_numbers(leaves)]


@dataclasses.dataclass(frozen=True, eq=False)
class MeasuredLayers:
    """Measures the layers' gradients, and updates nothing."""

    released: ReleasedScan
    measure: Measure

    def begin(self) -> Measured:
        """What is known of no gradients."""
        return self.measure.of_none()

    def layer(self, index, carried) -> dict[int, jax.Array]:
        del carried
        return {
            self.released.operand(value): _layer_of(stack, index)
            for leaf in self.released.leaves
            for value, stack in zip(leaf.array_values, leaf.arrays, strict=True)
        }

    def update(self, index, carried, grads):
        del index
        return self.measure.added(carried, grads.values())


def _layer_of(stack: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)


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
