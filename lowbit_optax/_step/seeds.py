"""The seed of a new state: the user's, and a checksum of the parameters.

With the user's seed alone, each ``init`` would repeat the noise of the first one, and
so would each transformation of a parameter with the same path, such as one per layer.
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
    """The seed of the state of these parameters, a uint32 scalar.

    Other parameters give another seed, even if they differ in one bit only. Integer
    sums do not depend on their order, so that every sharding gives the same seed. In
    the user's ``jax.shard_map`` all shards use the seed of the shard with the largest
    sum, which replicas have in common with a single device.

    Args:
      seed: the user's.
      leaves: the parameters; only floats and quantised weights matter.

    >>> int(seed_of(0, [jnp.ones(3)])) == int(seed_of(0, [jnp.ones(3).at[0].set(2)]))
    False
    """
    held = [x for x in leaves if trees.is_quantized(x) or trees.is_float(x)]
    total = jnp.uint32(0)
    arrays = [x for x in jax.tree.leaves(held) if isinstance(x, Array)]
    for array in arrays:  # shapes alone, as optax's ``init`` accepts them, have no bits
        total = traced_once(_checksum)(array, total)
        if not isinstance(total, Tracer):
            total = jax.device_get(total)  # the next leaf may be on another device
    for axis in jax.sharding.get_abstract_mesh().manual_axes:
        total = lax.pmax(total, axis)  # all at once, it would have to vary over all
    return hash_words(total, jnp.uint32(seed), jnp.uint32(seed))


def _checksum(array: jax.Array, total: jax.Array) -> jax.Array:
    """The sum so far, plus a hash of each element, its place and that sum, mod 2^32.

    With the sum so far, XLA needs memory for one leaf at a time.
    """
    # The halves of a 64-bit element become two elements.
    words = f"uint{8 * min(array.dtype.itemsize, 4)}"
    words = lax.bitcast_convert_type(array, words).astype(jnp.uint32)
    hashes = hash_words(row_major(words.shape) + total, words, words)
    return total + jnp.sum(hashes, dtype=jnp.uint32)
