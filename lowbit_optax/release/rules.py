"""What is done with a layer's gradients in a backward loop: an update, or a sum.

Rules of :mod:`lowbit_optax.release.backward`.
"""

import dataclasses
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lowbit_optax._step import context
from lowbit_optax._step.stacks import Layer
from lowbit_optax.release.floats import as_float, from_float
from lowbit_optax.release.plan import Released
from lowbit_optax.release.traced_loss import Leaf, Traced
from lowbit_optax.transformation import step


@dataclasses.dataclass(frozen=True, eq=False)
class Optimizer:
    """An optimizer's step, and the parts of its state that belong to leaves.

    Args:
      tx: the transformation.
      state: the leaves of its state.
      structure: the state's.
      slots: see :class:`lowbit_optax.release.plan.Plan`.
      change: what is done to each gradient before.
    """

    tx: optax.GradientTransformation
    state: list
    structure: jax.tree_util.PyTreeDef
    slots: typing.Mapping[str, tuple[int, ...]]
    change: Callable[[jax.Array], jax.Array]

    def step(self, traced: Traced, grads: dict, params: dict, state: dict):
        """One step with some gradients, and zeros for the others.

        Args:
          traced: the loss.
          grads: by leaf's name.
          params: by name, those that are not the loss's own.
          state: by number, the leaves that are not its own.

        Returns:
          ``(params, state)``: by leaf's name, and a list.
        """
        state = [state.get(n, x) for n, x in enumerate(self.state)]
        new_params, new_state = step(
            self.tx,
            traced.tree(lambda leaf: params.get(leaf.name, leaf.value)),
            jax.tree.unflatten(self.structure, state),
            traced.tree(
                lambda leaf: (
                    self.change(grads[leaf.name])
                    if leaf.name in grads
                    else leaf.no_gradient()
                )
            ),
        )
        names = [leaf.name for leaf in traced.leaves]
        new_params = traced.treedef.flatten_up_to(new_params)
        return dict(zip(names, new_params, strict=True)), jax.tree.leaves(new_state)

    def stacks(self, leaves: list[Leaf]) -> list[jax.Array]:
        """The arrays of leaves, and then those of the state that belong to them."""
        arrays = [x for leaf in leaves for x in leaf.arrays]
        return arrays + [self.state[s] for s in self.numbers(leaves)]

    def numbers(self, leaves: list[Leaf]) -> list[int]:
        """Numbers of the state's leaves that belong to leaves of the parameters."""
        return [s for leaf in leaves for s in self.slots[leaf.name]]

    def sort(self, leaves: list[Leaf], arrays: list) -> tuple[dict, dict]:
        """Arrays in the order of :meth:`stacks`, as values by name and parts of the
        state by number.
        """
        arrays = iter(arrays)
        values = {
            leaf.name: leaf.with_arrays([next(arrays) for _ in leaf.arrays])
            for leaf in leaves
        }
        return values, {s: next(arrays) for s in self.numbers(leaves)}


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """Updates a layer in its stacks as soon as its gradients are there."""

    traced: Traced
    released: Released
    optimizer: Optimizer

    def handle(self) -> list[jax.Array]:
        """The stacks as the backward pass gets them, and will return them."""
        return list(map(as_float, self.optimizer.stacks(self.released.leaves)))

    def stacks(self, handle) -> list[jax.Array]:
        """The stacks that came back."""
        like = self.optimizer.stacks(self.released.leaves)
        return [from_float(x, y.dtype) for x, y in zip(handle, like, strict=True)]

    def begin(self, handle):
        return self.stacks(handle)

    def end(self, carried):
        return list(map(as_float, carried))

    def layer(self, index, carried):
        values = [value for leaf in self.released.leaves for value in leaf.parts]
        return {
            self.released.operand(value): _layer_of(stack, index)
            for value, stack in zip(values, carried, strict=False)
        }

    def update(self, index, carried, grads):
        grads = {
            leaf.name: grads[self.released.operand(leaf.slot)]
            for leaf in self.released.leaves
        }
        return lax.platform_dependent(
            index,
            carried,
            grads,
            cuda=self._in_stacks,
            default=self._between_stacks,
        )

    def _in_stacks(self, index, carried, grads):
        """With kernels that write into the stacks."""
        layer = self._layer(index)
        new = self._step(layer, [layer.of(stack) for stack in carried], grads)
        return [layer.put(a, b) for a, b in zip(carried, new, strict=True)]

    def _between_stacks(self, index, carried, grads):
        """The layer taken out, updated, and put back.

        If XLA fused the update with its reading and writing, that of one stack would
        read the old layer of another, for which XLA's CPU compiler copies whole stacks
        in every turn of the loop. What is inside of a conditional is not fused with
        what is outside (an optimization barrier does not hold there).
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
        params, state = optimizer.sort(leaves, old)
        with context.one_layer(layer):
            params, state = optimizer.step(self.traced, grads, params, state)
        arrays = [x for leaf in leaves for x in jax.tree.leaves(params[leaf.name])]
        return arrays + [state[s] for s in optimizer.numbers(leaves)]


@dataclasses.dataclass(frozen=True, eq=False)
class SumOfSquares:
    """Adds up the squares of the layers' gradients, and updates nothing."""

    released: Released

    def handle(self) -> jax.Array:
        """Where the sum starts."""
        return jnp.zeros([], jnp.float32)

    def begin(self, handle):
        return handle

    def end(self, carried):
        return carried

    def layer(self, index, carried):
        return {
            self.released.operand(value): _layer_of(stack, index)
            for leaf in self.released.leaves
            for value, stack in zip(leaf.parts, leaf.arrays, strict=True)
        }

    def update(self, index, carried, grads):
        return carried + sum(map(squares, grads.values()))


def squares(grad: jax.Array) -> jax.Array:
    """The sum of a gradient's squares, in float32."""
    return jnp.sum(jnp.square(grad.astype(jnp.float32)))


def _layer_of(stack: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)
