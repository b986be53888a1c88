"""The fused update as a Pallas kernel on the Triton backend.

Loads and stores have offsets and masks of their own: a BlockSpec's have no masks on
this backend, and a ragged tail would be written out of bounds. What runs between them,
the body, is elementwise and knows nothing of the backend, so that another launcher can
take it over.
"""

import dataclasses
import functools
import math
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.fused import xla
from pallas_kernels.fused.sharded import Shard
from pallas_kernels.fused.specs import Body, Result
from pallas_kernels.fused.views import Lanes, View, lanes_of
from pallas_kernels.fused.words import Reader, Writer

# Four elements a thread: of float32 and words the 16 bytes that an instruction moves.
WIDTH = 512
_WARPS = 4


def update(
    body: Body,
    shard: Shard,
    table: jax.Array,
    row: jax.Array | None = None,
    layer: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> list[jax.Array]:
    """One kernel over a leaf, a shard of it, or one layer of a stack.

    Args:
      body: see :data:`pallas_kernels.fused.Body`.
      shard: the arrays at hand.
      table, row: as in :func:`pallas_kernels.fused_update`.
      layer: int32 vector of one element, which layer.
      interpret: run the kernel's operations with XLA, on any platform.

    Returns:
      One array a result.
    """
    leaf = shard.leaf
    operands, results = leaf.operands, leaf.results
    view = View(shard.shape, leaf.shape, leaf.packed, WIDTH)
    stacked = leaf.overwritten if leaf.stacked else frozenset()
    arrays = [
        # A layer is indexed by itself: a stack may have more than 2^31 elements.
        o.array.reshape(o.array.shape[0] if i in stacked else 1, -1)
        for i, o in enumerate(operands)
    ]
    # No constant operands: each would be a kernel of its own that writes it.
    place = [row, None if shard.base is None else shard.base.reshape(1), layer]
    given = tuple(x is not None for x in place)
    place = [x for x in place if x is not None]
    shapes = [_result_shape(r, operands, view) for r in results]
    outputs = [
        jax.ShapeDtypeStruct(
            (1, math.prod(shape))
            if r.overwrites is None
            else arrays[r.overwrites].shape,
            r.dtype,
            manual_axis_type=manual_axes(r, operands),
        )
        for r, shape in zip(results, shapes, strict=True)
    ]
    written = pl.pallas_call(
        functools.partial(
            _kernel,
            body,
            view,
            tuple(o.bits for o in operands),
            tuple(results),
            frozenset(stacked),
            given,
            table.shape[-1],
            math.prod(leaf.shape) % 2**32,
            xla.multiply_add if interpret else multiply_add,
        ),
        grid=(view.programs,),
        out_shape=outputs,
        input_output_aliases={
            len(place) + 1 + r.overwrites: i
            for i, r in enumerate(results)
            if r.overwrites is not None
        },
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="fused_update",
    )(*place, table.reshape(-1), *arrays)
    return [x.reshape(shape) for x, shape in zip(written, shapes, strict=True)]


def multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """``a * b + c`` in one instruction, which rounds once."""
    (result,) = triton.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[a, b, c],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(a.shape, jnp.float32)],
    )
    return result


def _kernel(
    body, view, bits, results, stacked, given, width, size, multiply_add, *refs
):
    refs = list(refs)
    row, base, layer = (refs.pop(0)[0] if g else jnp.uint32(0) for g in given)
    scalars = read_scalars(refs.pop(0), row, width)
    reads, writes = refs[: len(bits)], refs[len(bits) :]
    base = base + layer.astype(jnp.uint32) * jnp.uint32(size)
    layer = layer.astype(jnp.int32)
    lanes = lanes_of(view, pl.program_id(0), base)
    in_layer = lambda number: layer if number in stacked else 0
    reads = [
        _Plain(ref, in_layer(i))
        if width is None
        else Reader(width, view.chunk, _word_loader(ref, in_layer(i), lanes, width))
        for i, (ref, width) in enumerate(zip(reads, bits, strict=True))
    ]
    writes = [
        _Plain(ref, in_layer(r.overwrites))
        if r.bits is None
        else Writer(
            r.bits, view.chunk, _word_storer(ref, in_layer(r.overwrites), lanes, r.bits)
        )
        for ref, r in zip(writes, results, strict=True)
    ]
    packed = [x for x in writes if isinstance(x, Writer)]

    def visit(piece, carry):
        for x in reads:
            if isinstance(x, Reader):
                x.start(piece)
        for x, open_word in zip(packed, carry, strict=True):
            x.start(piece, open_word)
        for r in range(view.chunk):
            row = piece * jnp.int32(view.chunk) + jnp.int32(r)
            offset, exists = lanes.offset(row), lanes.exists(row)
            values = [
                x.load(offset, exists) if isinstance(x, _Plain) else x.field(r)
                for x in reads
            ]
            new = body(values, scalars, lanes.element(row), multiply_add)
            for x, value in zip(writes, new, strict=True):
                if isinstance(x, _Plain):
                    x.store(offset, value, exists)
                else:
                    # Fields of the padding are 0, as in pack.
                    if exists is not None and exists is not lanes.inside:
                        value = jnp.where(exists, value, jnp.uint32(0))
                    x.put(r, value)
        return [x.finish() for x in packed]

    first = [x.first_carry((view.width,)) for x in packed]
    if view.rows == view.chunk:
        visit(jnp.int32(0), first)
    else:
        lax.fori_loop(0, view.rows // view.chunk, visit, first)


@dataclasses.dataclass(frozen=True)
class _Plain:
    """An array that is not packed, or a layer of a stack of them."""

    ref: typing.Any
    layer: jax.Array | int

    def load(self, offset: jax.Array, mask: jax.Array | None) -> jax.Array:
        return triton.load(self.ref.at[self.layer, offset], mask=mask)

    def store(self, offset: jax.Array, value: jax.Array, mask) -> None:
        triton.store(self.ref.at[self.layer, offset], value, mask=mask)


def _word_loader(ref, layer, lanes: Lanes, bits: int):
    def load(word):
        offset = lanes.word_offset(bits, word)
        return triton.load(ref.at[layer, offset], mask=lanes.inside)

    return load


def _word_storer(ref, layer, lanes: Lanes, bits: int):
    def store(word, value, when):
        mask = lanes.inside
        if when is not None:
            when = jnp.broadcast_to(when, value.shape)
            mask = when if mask is None else mask & when
        offset = lanes.word_offset(bits, word)
        triton.store(ref.at[layer, offset], value, mask=mask)

    return store


def read_scalars(table, row: jax.Array, width: int) -> list[jax.Array]:
    """A row of the table; before any store, which might alias it."""
    first = row.astype(jnp.int32) * jnp.int32(width)
    return [table[first + jnp.int32(i)] for i in range(width)]


def _result_shape(result: Result, operands, view: View) -> tuple[int, ...]:
    if result.overwrites is not None:
        return operands[result.overwrites].array.shape
    if result.bits is None:
        return view.shape
    rows = view.groups * result.bits
    return (*view.shape[: view.axis], rows, *view.shape[view.axis + 1 :])


def manual_axes(result: Result, operands):
    """How a result varies over the mesh of a ``jax.shard_map``: as what it replaces."""
    if result.overwrites is not None:
        return jax.typeof(operands[result.overwrites].array).manual_axis_type
    types = [jax.typeof(o.array).manual_axis_type for o in operands]
    return max(types, key=lambda each: len(each.varying))
