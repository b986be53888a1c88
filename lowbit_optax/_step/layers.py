"""``Layer``: the layer of stacked parameters that a step updates.

:mod:`lowbit_optax.release` updates one layer of a stack at a time: it passes
``params[i]`` instead of ``params``, and the matching ``state[i]``. If the update treats
all layers alike, the result equals layer ``i`` of the update of the whole stack. Only
random numbers depend on the position in the stack, so the engine gets the layer through
:mod:`lowbit_optax._step.context`, and draws the same numbers as for the whole stack.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.random_bits import (
    RandomBits,
    keys_at_layer,
    layers_have_keys,
)
from lowbit_optax._step.trees import STATIC


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False)
class Layer:
    """One layer of stacked parameters.

    Args:
      index: int32 scalar, the index of the layer in its stack.
      count: the number of layers.
      names: paths of the stacked parameters; other parameters are not stacked.
    """

    index: jax.Array
    count: int = dataclasses.field(metadata=STATIC)
    names: frozenset[str] = dataclasses.field(metadata=STATIC)

    def bits(self, random: RandomBits, name: str, leaf) -> RandomBits:
        """Return the random bits of a leaf at the layer's position in its stack."""
        if name not in self.names:
            return random
        return random.at_layer(self.index, self.count, leaf.shape)

    def first_element(self, leaf) -> jax.Array:
        """Return the index of the layer's first element in the stack, modulo 2^32."""
        size = jnp.uint32(math.prod(leaf.shape) % 2**32)
        return self.index.astype(jnp.uint32) * size

    def keys(
        self, keys: tuple[jax.Array, jax.Array], names: Sequence[str], leaves: Sequence
    ) -> tuple[jax.Array, jax.Array]:
        """Return the keys of each leaf, given the keys of whole leaves.

        Each layer of a large stack has its own keys.
        """
        key, second = keys
        for i, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
            if name in self.names and layers_have_keys(self.count, leaf.shape):
                first, other = keys_at_layer(
                    key[i], second[i], self.index, self.count, leaf.shape
                )
                key, second = key.at[i].set(first), second.at[i].set(other)
        return key, second
