"""The fused update in array operations: the reference that defines its numbers."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bitfields.xla import pack, pack_axis, unpack
from pallas_kernels.fused_update.spec import Body, Leaf


def update(
    body: Body,
    leaf: Leaf,
    table: jax.Array,
    row: jax.Array | None = None,
    layer: jax.Array | None = None,
    when: int | None = None,
) -> list[jax.Array]:
    """See :func:`pallas_kernels.fused_update`."""
    operands, results, shape = leaf.operands, leaf.results, leaf.shape
    if row is not None:
        table = lax.dynamic_index_in_dim(table, row[0], 0, keepdims=False)
    scalars = list(table)
    stacked = leaf.overwritten if leaf.stacked else ()
    values, group_values = [], []
    for number, operand in enumerate(operands):
        array = operand.array
        if number in stacked:
            array = lax.dynamic_index_in_dim(array, layer[0], 0, keepdims=False)
        if operand.bits is not None:
            array = unpack(array, operand.bits, shape)
        (group_values if operand.per_group else values).append(array)
    index = None
    if layer is not None:
        index = _row_major(shape, layer[0].astype(jnp.uint32))
    arguments = values, scalars, index, multiply_add
    if leaf.grouped:
        before = body.before([_spread(x, leaf) for x in group_values])
        maxima = [_maximum(x, leaf) for x in body.statistics(*arguments, before)]
        of_groups, _ = body.after(maxima)
        _, after = body.after([_spread(x, leaf) for x in maxima])
        of_elements = iter(body(*arguments, before, after))
        of_groups = iter(of_groups)
        new = [next(of_groups if r.per_group else of_elements) for r in results]
    else:
        new = body(*arguments)
    written = []
    for result, value in zip(results, new, strict=True):
        if result.bits is not None:
            value = pack(value, result.bits)
        if when is not None and result.overwrites is not None:
            old = operands[result.overwrites].array
            if layer is not None:
                old = lax.dynamic_index_in_dim(old, layer[0], 0, keepdims=False)
            value = jnp.where(scalars[when] != jnp.uint32(0), value, old)
        if layer is not None and result.overwrites is not None:
            stack = operands[result.overwrites].array
            value = lax.dynamic_update_index_in_dim(stack, value, layer[0], 0)
        written.append(value)
    return written


def _spread(x: jax.Array, leaf: Leaf) -> jax.Array:
    """A per-group array as one of the leaf's shape."""
    axis = pack_axis(leaf.shape)
    x = jnp.repeat(x, leaf.group, axis, total_repeat_length=x.shape[axis] * leaf.group)
    return lax.slice_in_dim(x, 0, leaf.shape[axis], axis=axis)


def _maximum(x: jax.Array, leaf: Leaf) -> jax.Array:
    """The maximum of each group of non-negative values."""
    axis = pack_axis(leaf.shape)
    size = leaf.shape[axis]
    widths = [(0, -size % leaf.group if a == axis else 0) for a in range(x.ndim)]
    x = jnp.pad(x, widths)
    groups = (x.shape[axis] // leaf.group, leaf.group)
    return x.reshape(*x.shape[:axis], *groups, *x.shape[axis + 1 :]).max(axis + 1)


def multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """``a * b + c``; whether it rounds once or twice is XLA's choice."""
    return a * b + c


def _row_major(shape: tuple[int, ...], layer: jax.Array) -> jax.Array:
    index = jnp.full(shape, layer * jnp.uint32(math.prod(shape) % 2**32))
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    return index
