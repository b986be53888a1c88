"""The seed of a state, and the random numbers of one layer of stacked parameters.

``Lowbit.start`` calls :func:`seed_of`, which combines the user's seed with a checksum
of the parameters. Without the checksum, every ``init`` would lead to the same random
numbers. Different parameters with the same path would also share random numbers, for
example if each layer has its own transformation.

:mod:`lowbit_optax.release` updates one layer of a stack at a time: it passes
``params[i]`` instead of ``params``, and the matching ``state[i]``. If the update treats
all layers alike, the result equals layer ``i`` of the update of the whole stack. Only
random numbers depend on the position in the stack, so the engine gets the
:class:`Layer` through :mod:`lowbit_optax._step.context`, and draws the same numbers as
for the whole stack.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from lowbit_optax._jaxprs.compiling import traced_once
from lowbit_optax._numerics.random_bits import (
    RandomBits,
    hash_words,
    keys_at_layer,
    layers_have_keys,
    row_major,
)
from lowbit_optax._step import trees
from lowbit_optax._step.trees import STATIC

Array = jax.Array | np.ndarray | np.generic


def seed_of(seed: int | jax.Array, leaves: Sequence) -> jax.Array:
    """Return the seed for the state of these parameters, a uint32 scalar.

    Parameters that differ in a single bit get different seeds. The checksum is an
    integer sum, which does not depend on the order, so every sharding gives the same
    seed. Inside the user's ``jax.shard_map``, all shards use the largest sum of any
    shard, so that replicas get the seed of a single device.

    Args:
      seed: the user's seed.
      leaves: the parameters; only floats and quantized weights count.

    >>> int(seed_of(0, [jnp.ones(3)])) == int(seed_of(0, [jnp.ones(3).at[0].set(2)]))
    False
    """
    held = list(filter(trees.is_float, leaves))
    total = jnp.uint32(0)
    arrays = [x for x in jax.tree.leaves(held) if isinstance(x, Array)]
    for array in arrays:  # optax's ``init`` also accepts shapes, which have no bits
        total = traced_once(_checksum)(array, total)
        if not isinstance(total, Tracer):
            total = jax.device_get(total)  # the next leaf may be on another device
    # Reduce one axis at a time, because the sum may not vary over all axes.
    for axis in jax.sharding.get_abstract_mesh().manual_axes:
        total = lax.pmax(total, axis)
    return hash_words(total, jnp.uint32(seed), jnp.uint32(seed))


def _checksum(array: jax.Array, total: jax.Array) -> jax.Array:
    """Return the total plus a hash of each element, modulo 2^32.

    A hash also depends on the element's index and on the total so far, so that XLA
    needs memory for one leaf at a time.
    """
    # A 64-bit element becomes two elements.
    words = f"uint{8 * min(array.dtype.itemsize, 4)}"
    words = lax.bitcast_convert_type(array, words).astype(jnp.uint32)
    hashes = hash_words(row_major(words.shape) + total, words, words)
    return total + jnp.sum(hashes, dtype=jnp.uint32)


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
