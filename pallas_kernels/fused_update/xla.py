"""The reference for fused updates, which uses operations on whole arrays.

It unpacks the arrays of a leaf, calls the body on them, and packs the results. Kernels
compute the same results on tiles.
"""

import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bitfields import pack, pack_bitmap, unpack
from pallas_kernels.fused_update.spec import (
    BlockBody,
    Body,
    Leaf,
    Result,
    Scalars,
)
from pallas_kernels.layout import block_maxima, repeat_blocks

Barrier = Callable[[Sequence[jax.Array]], Sequence[jax.Array]]


def row_of(scalars: Scalars, row: jax.Array | None) -> list[jax.Array]:
    """Return a row of the table of scalars, in which ``values`` replace the last."""
    table, values = scalars.table, scalars.values
    if row is not None:
        table = lax.dynamic_index_in_dim(jnp.asarray(table), row[0], keepdims=False)
    words = list(table)
    return [*words[: len(words) - len(values)], *values]


def update(
    body: Body | BlockBody,
    leaf: Leaf,
    scalars: Sequence[jax.Array],
    layer: jax.Array | None = None,
    when: int | None = None,
    index: jax.Array | None = None,
    barrier: Barrier | None = None,
) -> list[jax.Array]:
    """Run :func:`pallas_kernels.fused_update` with array operations.

    Args:
      body, leaf, layer, when: see :func:`pallas_kernels.fused_update` and
        :class:`.spec.Scalars`.
      scalars: scalars of the body.
      index: uint32 indices of the elements if the leaf is a part of another leaf.
      barrier: a function that returns arrays, and makes XLA's CPU compiler compute them
        once and before any operation that uses them; None if XLA may fuse everything.
    """
    if barrier is None:
        body = getattr(body, "differentiable", body)
    else:
        body = getattr(body, "in_parts", body)
    scalars = list(scalars)
    values, block_values = [], []
    for number, operand in enumerate(leaf.operands):
        array = operand.array
        if layer is not None and number in leaf.overwritten:
            array = lax.dynamic_index_in_dim(array, layer[0], 0, keepdims=False)
        if operand.bits is not None:
            array = unpack(array, operand.bits, leaf.layout)
        if operand.repeated:
            array = jnp.broadcast_to(array, leaf.shape)
        is_plain = operand.block_size is None
        (values if is_plain else block_values).append(array)
    if layer is not None and index is None:
        index = index_of(leaf.shape, leaf.shape, layer=layer)
    arguments = values, scalars, index
    if leaf.block_sizes:
        blocks = typing.cast(BlockBody, body)
        new = _with_blocks(blocks, leaf, arguments, block_values, barrier)
    else:
        new = typing.cast(Body, body)(*arguments)
    if barrier is not None:
        new = _kept(new, leaf.results, barrier)
    skip = None if when is None else scalars[when] == jnp.uint32(0)
    return [
        _stored(value, result, leaf, layer, skip)
        for result, value in zip(leaf.results, new, strict=True)
    ]


def _kept(
    values: Sequence[jax.Array], results: Sequence[Result], barrier: Barrier
) -> list[jax.Array]:
    """Returns the new values behind a barrier, where fields of 8 bits are bytes."""
    is_byte = [x.bits == 8 for x in results]
    pairs = zip(values, is_byte, strict=True)
    kept = barrier([x.astype(jnp.uint8) if byte else x for x, byte in pairs])
    pairs = zip(kept, is_byte, strict=True)
    return [x.astype(jnp.uint32) if byte else x for x, byte in pairs]


def _with_blocks(
    body: BlockBody,
    leaf: Leaf,
    arguments: tuple[list, list, jax.Array | None],
    block_values: list[jax.Array],
    barrier: Barrier | None,
) -> list[jax.Array]:
    """Returns the results of a body that needs maxima over blocks."""
    layout = leaf.layout
    # Two loops, along columns and then along rows, use wide vectors. One loop would use
    # vectors of the few columns of a block.
    between = (lambda x: x) if barrier is None else lax.optimization_barrier
    sizes = [o.block_size for o in leaf.operands if o.block_size is not None]

    def repeated(trees: Sequence, sizes: Sequence[int]) -> list:
        repeat = lambda x, size: repeat_blocks(x, layout, size, between)
        pairs = zip(trees, sizes, strict=True)
        return [jax.tree.map(lambda x, n=n: repeat(x, n), each) for each, n in pairs]

    def before():
        if barrier is None:
            return body.before(repeated(block_values, sizes))
        return repeated(body.before(block_values), sizes)

    def after(maxima: Sequence[jax.Array]):
        if barrier is None:
            maxima = repeated(maxima, body.block_sizes[: len(maxima)])
            return body.after(maxima, repeated(block_values, sizes))[1]
        return repeated(body.after(maxima, block_values)[1], sizes)

    of_blocks, maxima = [before()], []
    while len(maxima) < len(body.block_sizes):
        statistics = body.statistics(*arguments, *of_blocks)
        of_round = body.block_sizes[len(maxima) :][: len(statistics)]
        found = [
            block_maxima(x, layout, size, between)
            for x, size in zip(statistics, of_round, strict=True)
        ]
        maxima += found if barrier is None else barrier(found)
        of_blocks[1:] = [after(maxima)]
    per_block, _ = body.after(maxima, block_values)
    per_element, per_block = iter(body(*arguments, *of_blocks)), iter(per_block)
    return [
        next(per_element if r.block_size is None else per_block) for r in leaf.results
    ]


def _stored(
    value: jax.Array,
    result: Result,
    leaf: Leaf,
    layer: jax.Array | None,
    skip: jax.Array | None,
) -> jax.Array:
    """Packs a result if it has bits, and writes it to its stack if it has one."""
    if result.is_bitmap:
        value = pack_bitmap(value, leaf.layout)
    elif result.bits is not None:
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


def larger_before(number: int, end: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return int32 ``max(x, y)`` if ``number < end``, and ``x`` otherwise."""
    return jnp.where(jnp.int32(number) < end, jnp.maximum(x, y), x)


def lowest_bits(count: jax.Array) -> jax.Array:
    """Return a uint32 with the lowest ``count`` bits set. Counts are clipped at 32."""
    shift = jnp.maximum(count, jnp.int32(0)).astype(jnp.uint32)
    # In XLA, a shift by 32 or more gives 0.
    return ~lax.shift_left(jnp.full_like(shift, 2**32 - 1), shift)


def index_of(
    shape: tuple[int, ...],
    whole: tuple[int, ...],
    first: jax.Array | None = None,
    layer: jax.Array | None = None,
) -> jax.Array:
    """Return the row-major indices of the elements of a part, modulo 2^32.

    Args:
      shape: shape of the part.
      whole: shape of the leaf or layer that contains the part.
      first: uint32 scalar, the index of the part's first element; 0 if None.
      layer: int32 vector with one element, the index of the layer; 0 if None.
    """
    index = jnp.full(shape, jnp.uint32(0) if first is None else first)
    if layer is not None:
        size = jnp.uint32(math.prod(whole) % 2**32)
        index = index + layer[0].astype(jnp.uint32) * size
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(whole[axis + 1 :]) % 2**32)
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    return index
