"""What is done with the gradients of a layer in a backward loop: a step, or measures.

Each class is a :class:`lowbit_optax.release.backward.GradientConsumer`.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jax import lax

from lowbit_optax._step import context
from lowbit_optax._step.guard import Guard, Unguarded
from lowbit_optax._step.layers import Layer
from lowbit_optax.release.gates import Gate
from lowbit_optax.release.host_memory import beside, is_on_host, on_device
from lowbit_optax.release.measures import Measure, Measured
from lowbit_optax.release.optimizer import Optimizer
from lowbit_optax.release.scans import ReleasedScan
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
