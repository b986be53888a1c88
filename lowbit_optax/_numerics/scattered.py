"""Reading and writing few elements of arrays on devices, from the host.

Elements move as integers, because a processor may change the bits of a NaN.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_LEAST = 1024
"""The least number of elements for which programs are compiled."""


def read(data, flat: np.ndarray) -> np.ndarray:
    """Return the elements of an array with these row-major indices.

    If they are few, only they leave the device.

    >>> read(jnp.arange(6).reshape(2, 3), np.array([1, 5])).tolist()
    [1, 5]
    """
    places = [x.astype(np.int32) for x in np.unravel_index(flat, data.shape or (1,))]
    bytes_moved = flat.size * (4 * len(places) + data.dtype.itemsize)
    if isinstance(data, jax.Array) and bytes_moved < data.nbytes:
        return np.asarray(_gather(data, _padded(places, 0)))[: flat.size]
    return np.asarray(data).reshape(-1)[flat]


def written(leaf, places: Sequence[np.ndarray], values: np.ndarray):
    """Return an array with new values at some places, in its own sharding.

    Args:
      leaf: an array of JAX or numpy. It stays valid.
      places: for each axis, the indices of the elements; one axis for a scalar.
      values: the new elements, in the dtype of the array.

    >>> written(jnp.zeros((2, 2)), ([1], [0]), np.float32([5])).tolist()
    [[0.0, 0.0], [5.0, 0.0]]
    """
    places = [np.asarray(x) for x in places]
    if not isinstance(leaf, jax.Array):
        new = np.array(leaf)
        new.reshape(leaf.shape or (1,))[tuple(places)] = values
        return new
    shards = []
    for shard in leaf.addressable_shards:
        lengths, data = leaf.shape or (1,), shard.data
        bounds = [x.indices(n)[:2] for x, n in zip(shard.index, lengths, strict=False)]
        inside, local = np.ones(values.size, bool), []
        for x, (first, last) in zip(places, bounds or [(0, 1)], strict=True):
            inside &= (x >= first) & (x < last)
            local.append((x - first).astype(np.int32))
        if inside.any():
            local = _padded([x[inside] for x in local], max(data.shape or (1,)))
            data = _scatter(data, local, _padded([values[inside]], 0)[0])
        shards.append(data)
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def _padded(arrays: Sequence[np.ndarray], value: int) -> tuple[np.ndarray, ...]:
    """Pad arrays to a power of two, so that few lengths are compiled."""
    size = arrays[0].size
    missing = max(_LEAST, 2 ** (size - 1).bit_length()) - size
    return tuple(np.concatenate([x, np.full(missing, value, x.dtype)]) for x in arrays)


def _bits(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")


@jax.jit
def _gather(data: jax.Array, places: tuple) -> jax.Array:
    taken = _bits(data.reshape(data.shape or (1,)))[places]
    return lax.bitcast_convert_type(taken, data.dtype)


@jax.jit
def _scatter(data: jax.Array, places: tuple, values: jax.Array) -> jax.Array:
    old = _bits(data.reshape(data.shape or (1,)))
    new = old.at[places].set(_bits(values), mode="drop")
    return lax.bitcast_convert_type(new, data.dtype).reshape(data.shape)
