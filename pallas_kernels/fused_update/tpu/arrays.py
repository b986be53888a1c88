"""How arrays are handed to a TPU kernel: as matrices, some of them transposed.

XLA:TPU stores some arrays transposed. A kernel takes them as they lie and transposes
each block in its own memory, since a copy of the array would move it twice more.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.fused_update.spec import Operand, Result, Shard
from pallas_kernels.fused_update.tpu.tiling import LANES, Tiling, lies_transposed
from pallas_kernels.layout import block_shape


def merged_axes(shard: Shard) -> Shard:
    """A part whose rows are not next to the columns, with all axes after them as one.

    That keeps the order of elements, words and blocks, if no block is cut. XLA:TPU
    copies the arrays, which is less than what it does with blocks itself, but more than
    what it does with words alone.
    """
    leaf = shard.leaf
    widths = [block_shape(size)[1] for size in leaf.block_sizes]
    if not widths or leaf.layout.axis > -3 or shard.shape[-1] % max(widths):
        return shard
    after = -leaf.layout.axis - 1

    def one(shape):
        return (*shape[:-after], math.prod(shape[-after:]))

    def merged(x):
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(one(x.shape), x.dtype)
        return x.reshape(one(x.shape))

    leaf = leaf.with_arrays([merged(x) for x in leaf.arrays])
    leaf = dataclasses.replace(leaf, shape=one(leaf.shape))
    return Shard(leaf, one(shard.shape), shard.base)


def as_matrices(x: jax.Array) -> jax.Array:
    """An array of rank 2 or more as matrices: all axes before the rows are one."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def is_transposed(tiling: Tiling, like: Operand | Result, shape) -> bool:
    """Whether a kernel reads and writes an array as XLA transposes it.

    Its blocks must then be of whole tiles, or the array itself. Otherwise XLA copies
    the array, which is small.
    """
    rows = tiling.stored_rows(like)
    fits = rows % LANES == 0 or (tiling.grid[1] == 1 and rows == shape[-2])
    return fits and lies_transposed(shape)


def swapped(x: jax.Array, yes: bool) -> jax.Array:
    """An array with rows and columns swapped, if they are."""
    return jnp.swapaxes(x, -1, -2) if yes else x


def held_as(dtype) -> np.dtype:
    """The dtype that an array has in a kernel: Mosaic loads no float16."""
    return np.dtype(np.uint16 if dtype == np.float16 else dtype)


def as_held(x: jax.Array) -> jax.Array:
    """An array in the dtype that it has in a kernel. XLA copies float16."""
    held = held_as(x.dtype)
    return x if held == x.dtype else lax.bitcast_convert_type(x, held)


def as_given(x: jax.Array, dtype) -> jax.Array:
    """The inverse of :func:`as_held`: the array with the dtype that its owner gave it.

    Args:
      x: what a kernel has written.
      dtype: of the leaf's array, as wide as that of ``x``.
    """
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
