"""The fused update in array operations: the reference that defines its numbers."""

import math
import typing

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bitfields.xla import pack, pack_axis, unpack
from pallas_kernels.fused_update.spec import (
    Body,
    GroupedBody,
    Leaf,
    MultiplyAdd,
    Result,
)


def update(
    body: Body | GroupedBody,
    leaf: Leaf,
    table: jax.Array,
    row: jax.Array | None = None,
    layer: jax.Array | None = None,
    when: int | None = None,
) -> list[jax.Array]:
    """See :func:`pallas_kernels.fused_update`."""
    if row is not None:
        table = lax.dynamic_index_in_dim(table, row[0], 0, keepdims=False)
    scalars = list(table)
    values, group_values = [], []
    for number, operand in enumerate(leaf.operands):
        array = operand.array
        if layer is not None and number in leaf.overwritten:
            array = lax.dynamic_index_in_dim(array, layer[0], 0, keepdims=False)
        if operand.bits is not None:
            array = unpack(array, operand.bits, leaf.shape)
        (group_values if operand.per_group else values).append(array)
    index = None
    if layer is not None:
        index = _row_major(leaf.shape, layer[0].astype(jnp.uint32))
    arguments = values, scalars, index, multiply_add
    if leaf.grouped:
        new = _with_groups(
            typing.cast(GroupedBody, body), leaf, arguments, group_values
        )
    else:
        new = typing.cast(Body, body)(*arguments)
    skip = None if when is None else scalars[when] == jnp.uint32(0)
    return [
        _stored(value, result, leaf, layer, skip)
        for result, value in zip(leaf.results, new, strict=True)
    ]


def _with_groups(
    body: GroupedBody,
    leaf: Leaf,
    arguments: tuple[list, list, jax.Array | None, MultiplyAdd],
    group_values: list[jax.Array],
) -> list[jax.Array]:
    """The results of a body that takes maxima over groups."""
    before = body.before([_repeat(x, leaf) for x in group_values])
    maxima = [_maximum(x, leaf) for x in body.statistics(*arguments, before)]
    of_groups, _ = body.after(maxima)
    _, after = body.after([_repeat(x, leaf) for x in maxima])
    of_elements = iter(body(*arguments, before, after))
    of_groups = iter(of_groups)
    return [next(of_groups if r.per_group else of_elements) for r in leaf.results]


def _stored(
    value: jax.Array,
    result: Result,
    leaf: Leaf,
    layer: jax.Array | None,
    skip: jax.Array | None,
) -> jax.Array:
    """A result as it is stored, in its stack if it has one."""
    if result.bits is not None:
        value = pack(value, result.bits)
    if result.overwrites is None:
        return value
    old = stack = leaf.operands[result.overwrites].array
    if skip is not None:
        if layer is not None:
            old = lax.dynamic_index_in_dim(stack, layer[0], 0, keepdims=False)
        value = jnp.where(skip, old, value)
    if layer is not None:
        value = lax.dynamic_update_index_in_dim(stack, value, layer[0], 0)
    return value


def _repeat(x: jax.Array, leaf: Leaf) -> jax.Array:
    """An array with one element per group, repeated to the leaf's shape."""
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
