"""The update of one layer of stacked parameters, and what its code must know.

:mod:`lowbit_optax.release` calls a transformation with one layer in place of the whole
stack: ``params[i]`` for ``params``, and ``state[i]`` for the state that belongs to it.
If the update treats all layers alike, the result is layer ``i`` of the whole stack's
update, except that random numbers depend on where an element lies in the stack.
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


@dataclasses.dataclass(eq=False)
class Layer:
    """One layer of some of the parameters.

    Args:
      index: int32 scalar, the layer's number.
      count: how many layers there are.
      names: paths of the stacked parameters.
    """

    index: jax.Array
    count: int
    names: frozenset[str]

    def bits(self, random: RandomBits, name: str, leaf) -> RandomBits:
        """The random bits of a leaf, at the layer's place in its stack."""
        if name not in self.names:
            return random
        return random.at_layer(self.index, self.count, leaf.shape)

    def first_element(self, leaf) -> jax.Array:
        """The index of a layer's first element in its stack, modulo 2^32."""
        size = jnp.uint32(math.prod(leaf.shape) % 2**32)
        return self.index.astype(jnp.uint32) * size

    def keys(
        self, keys: tuple[jax.Array, jax.Array], names: Sequence[str], leaves: Sequence
    ) -> tuple[jax.Array, jax.Array]:
        """The keys of each leaf, from those of whole leaves, in a form for kernels.

        A layer of a large stack has keys of its own.
        """
        key, second = keys
        for i, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
            if name in self.names and layers_have_keys(self.count, leaf.shape):
                first, other = keys_at_layer(
                    key[i], second[i], self.index, self.count, leaf.shape
                )
                key, second = key.at[i].set(first), second.at[i].set(other)
        return key, second
