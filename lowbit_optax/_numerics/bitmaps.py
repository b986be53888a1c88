"""Bitmaps: a bit for each element of an array, in the layout of packed fields.

A byte contains 8 consecutive rows of a column, the first row in its lowest bit. A
bitmap therefore has the shape of the words of 4-bit fields, which
:mod:`pallas_kernels.layout` defines, and a shard of whole groups of 8 rows has whole
bytes. The bitmap of a scalar is a scalar.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import operations
from pallas_kernels.bitfields import pack_bitmap
from pallas_kernels.layout import layout_of, packed_shape


def shape_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the bitmap of an array.

    >>> shape_of((4096, 512)), shape_of((100,)), shape_of(())
    ((512, 512), (32,), ())
    """
    return packed_shape(shape, 4) if shape else ()


def of_changes(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return the bitmap of the elements whose bits differ.

    >>> of_changes(jnp.float16([0, 0, 0]), jnp.float16([0, -0.0, 1]))[:4]
    Array([0, 1, 1, 0], dtype=uint8)
    """
    differs = differing(old, new)
    if not old.shape:
        return differs.astype(jnp.uint8)
    return pack_bitmap(differs, layout_of(old.shape))


def differing(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return uint32 1 for each element that differs in any bit, and 0 for others."""
    if old.dtype.itemsize == 2:
        return operations.differing(old, new)
    pairs = zip(words_of(old), words_of(new), strict=True)
    differences = [before ^ after for before, after in pairs]
    zeros = jnp.zeros(old.shape, jnp.uint32)
    either = functools.reduce(jnp.bitwise_or, differences, zeros)
    return jnp.minimum(either, np.uint32(1))


def unpacked(bitmap, shape: tuple[int, ...], np: typing.Any = np):
    """Return a bitmap as booleans of this shape. ``np`` is numpy, or ``jax.numpy``.

    >>> unpacked(np.array([[1, 2]], np.uint8), (8, 2))[:3].tolist()
    [[True, False], [False, True], [False, False]]
    """
    if not shape:
        return bitmap.astype(bool)
    layout = layout_of(shape)
    axis, matrix = layout.row_axis, list(layout.matrix_shape)
    matrix[axis] = -1
    bits = np.unpackbits(bitmap.reshape(matrix), axis=axis, bitorder="little")
    bits = bits[(slice(None),) * axis + (slice(layout.rows),)].astype(bool)
    return layout.from_matrix(bits)


def words_of(x: jax.Array) -> list[jax.Array]:
    """Return the bits of an array as uint32 arrays of its shape.

    PRNG keys have none, because no step changes them.
    """
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return []
    if jnp.iscomplexobj(x):
        return words_of(x.real) + words_of(x.imag)
    if x.dtype == bool:
        return [x.astype(jnp.uint32)]
    kind = jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo
    if kind(x.dtype).bits == 64:
        halves = lax.bitcast_convert_type(x, jnp.uint32)
        return [halves[..., 0], halves[..., 1]]
    unsigned = f"uint{kind(x.dtype).bits}"
    return [lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)]
