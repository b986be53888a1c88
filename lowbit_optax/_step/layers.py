"""The update of one layer of stacked parameters, and what its code must know.

:mod:`lowbit_optax.release` calls a transformation with one layer in place of the whole
stack: ``params[i]`` for ``params``, and ``state[i]`` for the state that belongs to it.
If the update treats all layers alike, the result is layer ``i`` of the whole stack's
update, except that random numbers depend on where an element lies in the stack.
"""

import dataclasses
import math
import typing
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.random_bits import (
    RandomBits,
    keys_at_layer,
    layers_have_keys,
)

Value = typing.TypeVar("Value")


class ByIdentity(typing.Generic[Value]):
    """A mapping whose keys are compared by ``is`` alone.

    It is meant for arrays and tracers, which have no hash and whose ``==`` compares
    elements; and the ``id`` of an array that no longer exists can be given to another
    one. The mapping keeps its keys alive. A look-up goes through all of them, so there
    should be few.

    Args:
      pairs: keys and their values; if a key occurs twice, the last value counts.
    """

    def __init__(self, pairs: Iterable[tuple[typing.Any, Value]] = ()):
        self._pairs = list(pairs)

    def add(self, key, value: Value) -> None:
        """Add a key and its value."""
        self._pairs.append((key, value))

    def get(self, key) -> Value | None:
        """The value of a key; None if it was not added."""
        return next((v for k, v in reversed(self._pairs) if k is key), None)


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
