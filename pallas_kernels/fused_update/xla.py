"""The fused update in array operations: the reference that defines its numbers."""

import math
import typing

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bitfields.xla import pack, unpack
from pallas_kernels.fused_update.spec import (
    BlockBody,
    Body,
    Leaf,
    MultiplyAdd,
    Result,
)
from pallas_kernels.layout import block_maxima, repeat_blocks


def update(
    body: Body | BlockBody,
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
    values, block_values = [], []
    for number, operand in enumerate(leaf.operands):
        array = operand.array
        if layer is not None and number in leaf.overwritten:
            array = lax.dynamic_index_in_dim(array, layer[0], 0, keepdims=False)
        if operand.bits is not None:
            array = unpack(array, operand.bits, leaf.layout)
        (block_values if operand.per_block else values).append(array)
    index = None
    if layer is not None:
        index = _row_major(leaf.shape, layer[0].astype(jnp.uint32))
    arguments = values, scalars, index, multiply_add
    if leaf.has_blocks:
        new = _with_blocks(typing.cast(BlockBody, body), leaf, arguments, block_values)
    else:
        new = typing.cast(Body, body)(*arguments)
    skip = None if when is None else scalars[when] == jnp.uint32(0)
    return [
        _stored(value, result, leaf, layer, skip)
        for result, value in zip(leaf.results, new, strict=True)
    ]


def _with_blocks(
    body: BlockBody,
    leaf: Leaf,
    arguments: tuple[list, list, jax.Array | None, MultiplyAdd],
    block_values: list[jax.Array],
) -> list[jax.Array]:
    """The results of a body that takes maxima over blocks."""
    repeat = lambda x: repeat_blocks(x, leaf.layout, leaf.block_size)
    before = body.before([repeat(x) for x in block_values])
    maxima = [
        block_maxima(x, leaf.layout, leaf.block_size)
        for x in body.statistics(*arguments, before)
    ]
    of_blocks, _ = body.after(maxima)
    _, after = body.after([repeat(x) for x in maxima])
    of_elements = iter(body(*arguments, before, after))
    of_blocks = iter(of_blocks)
    return [next(of_blocks if r.per_block else of_elements) for r in leaf.results]


def _stored(
    value: jax.Array,
    result: Result,
    leaf: Leaf,
    layer: jax.Array | None,
    skip: jax.Array | None,
) -> jax.Array:
    """A result as it is stored, in its stack if it has one."""
    if result.bits is not None:
        value = pack(value, result.bits, leaf.layout)
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


def multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """``a * b + c``; whether it rounds once or twice is XLA's choice."""
    return a * b + c


def _row_major(shape: tuple[int, ...], layer: jax.Array) -> jax.Array:
    index = jnp.full(shape, layer * jnp.uint32(math.prod(shape) % 2**32))
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    return index
