"""The seed of a new state, from the user's seed and a checksum of the parameters.

``Lowbit.start`` calls :func:`seed_of`. Without the checksum, every ``init`` would lead
to the same random numbers. Different parameters with the same path would also share
random numbers, for example if each layer has its own transformation.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from lowbit_optax._jaxprs.traced_once import traced_once
from lowbit_optax._numerics.random_bits import hash_words, row_major
from lowbit_optax._step import trees

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
