"""The fused update in array operations: the reference that defines its numbers."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fused.specs import Body, Leaf
from pallas_kernels.packing import pack, unpack


def update(
    body: Body,
    leaf: Leaf,
    table: jax.Array,
    row: jax.Array | None = None,
    layer: jax.Array | None = None,
) -> list[jax.Array]:
    """See :func:`pallas_kernels.fused_update`."""
    operands, results, shape = leaf.operands, leaf.results, leaf.shape
    if row is not None:
        table = lax.dynamic_index_in_dim(table, row[0], 0, keepdims=False)
    scalars = list(table)
    stacked = leaf.overwritten if leaf.stacked else ()
    values = []
    for number, operand in enumerate(operands):
        array = operand.array
        if number in stacked:
            array = lax.dynamic_index_in_dim(array, layer[0], 0, keepdims=False)
        if operand.bits is not None:
            array = unpack(array, operand.bits, shape)
        values.append(array)
    index = None
    if layer is not None:
        index = _row_major(shape, layer[0].astype(jnp.uint32))
    written = []
    for result, value in zip(
        results, body(values, scalars, index, multiply_add), strict=True
    ):
        if result.bits is not None:
            value = pack(value, result.bits)
        if layer is not None and result.overwrites is not None:
            stack = operands[result.overwrites].array
            value = lax.dynamic_update_index_in_dim(stack, value, layer[0], 0)
        written.append(value)
    return written


def multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """``a * b + c``; whether it rounds once or twice is XLA's choice."""
    return a * b + c


def _row_major(shape: tuple[int, ...], layer: jax.Array) -> jax.Array:
    index = jnp.full(shape, layer * jnp.uint32(math.prod(shape) % 2**32))
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    return index
