"""What is done with the gradients of a layer in a backward loop: a step, or a sum.

Each class is a :class:`lowbit_optax.release.backward.GradientConsumer`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from lowbit_optax._step import context
from lowbit_optax._step.layer import Layer
from lowbit_optax.release.optimizer import Optimizer
from lowbit_optax.release.scans import ReleasedScan
from lowbit_optax.release.traced_loss import TracedLoss


@dataclasses.dataclass(frozen=True, eq=False)
class LayerUpdates:
    """Updates each layer in its stacks as soon as its gradients are there.

    What it carries are the stacks of ``optimizer.stacks(released.leaves)``.
    """

    loss: TracedLoss
    released: ReleasedScan
    optimizer: Optimizer

    def begin(self) -> list[jax.Array]:
        """The stacks before the step."""
        return self.optimizer.stacks(self.released.leaves)

    def layer(self, index, carried) -> dict[int, jax.Array]:
        values = [n for leaf in self.released.leaves for n in leaf.array_values]
        # The state's stacks come after those of the parameters.
        stacks = carried[: len(values)]
        return {
            self.released.operand(value): _layer_of(stack, index)
            for value, stack in zip(values, stacks, strict=True)
        }

    def update(self, index, carried, grads):
        by_name = {
            leaf.name: grads[self.released.operand(leaf.gradient_value)]
            for leaf in self.released.leaves
        }
        return lax.platform_dependent(
            index,
            carried,
            by_name,
            cuda=self._update_in_stacks,
            default=self._update_and_put_back,
        )

    def _update_in_stacks(self, index, carried, grads):
        """By kernels, which write into the stacks."""
        layer = self._layer(index)
        new = self._step(layer, [layer.of(stack) for stack in carried], grads)
        return [layer.put(a, b) for a, b in zip(carried, new, strict=True)]

    def _update_and_put_back(self, index, carried, grads):
        """The layer is taken out, updated, and put back.

        If XLA fused the update with the reads and writes around it, the update of one
        stack would read the old layer of another, and XLA's CPU compiler would copy
        whole stacks in every iteration. It does not fuse what is inside a conditional
        with what is outside. (An optimization barrier does not prevent the fusion.)
        """
        layer = self._layer(index)
        old = [layer.of(stack) for stack in carried]
        new = lax.cond(
            index >= jnp.int32(0),
            lambda: self._step(layer, old, grads),
            lambda: old,
        )
        return [layer.put(a, b) for a, b in zip(carried, new, strict=True)]

    def _layer(self, index) -> Layer:
        return Layer(index, frozenset(leaf.name for leaf in self.released.leaves))

    def _step(self, layer: Layer, old: list, grads: dict) -> list:
        """New layers for old ones, in the order of the stacks."""
        leaves, optimizer = self.released.leaves, self.optimizer
        params, state = optimizer.by_leaf(leaves, old)
        with context.one_layer(layer):
            new_params, new_state = optimizer.step(self.loss, grads, params, state)
        arrays = [x for leaf in leaves for x in jax.tree.leaves(new_params[leaf.name])]
        return arrays + [new_state[n] for n in optimizer.stack_numbers(leaves)]


@dataclasses.dataclass(frozen=True, eq=False)
class SumOfSquares:
    """Adds up the squares of the layers' gradients, and updates nothing."""

    released: ReleasedScan

    def begin(self) -> jax.Array:
        """The sum at the start."""
        return jnp.zeros([], jnp.float32)

    def layer(self, index, carried) -> dict[int, jax.Array]:
        del carried
        return {
            self.released.operand(value): _layer_of(stack, index)
            for leaf in self.released.leaves
            for value, stack in zip(leaf.array_values, leaf.arrays, strict=True)
        }

    def update(self, index, carried, grads):
        del index
        return carried + sum(map(sum_of_squares, grads.values()))


def sum_of_squares(grad: jax.Array) -> jax.Array:
    """The sum of the squares of a gradient, in float32."""
    return jnp.sum(jnp.square(grad.astype(jnp.float32)))


def _layer_of(stack: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)
