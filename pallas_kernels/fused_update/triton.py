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
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.fused_update import xla
from pallas_kernels.fused_update.sharded import Shard
from pallas_kernels.fused_update.short_forms import multiply_add, with_short_forms
from pallas_kernels.fused_update.spec import Body, Result
from pallas_kernels.fused_update.tiling import Lanes, View, lanes_of
from pallas_kernels.fused_update.words import Reader, Writer

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
    when: int | None = None,
    interpret: bool = False,
) -> list[jax.Array]:
    """One kernel over a leaf, a shard of it, or one layer of a stack.

    Args:
      body: see :data:`pallas_kernels.fused_update.Body`.
      shard: the arrays at hand.
      table, row: as in :func:`pallas_kernels.fused_update`.
      layer: int32 vector of one element, which layer.
      when: as in :func:`pallas_kernels.fused_update`.
      interpret: run the kernel's operations with XLA, on any platform.

    Returns:
      One array a result.
    """
    leaf = shard.leaf
    operands, results = leaf.operands, leaf.results
    group = leaf.group if leaf.packed or leaf.grouped else None
    view = View(shard.shape, leaf.shape, leaf.packed, WIDTH, group, leaf.grouped)
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
    local = dataclasses.replace(leaf, shape=shard.shape)
    shapes = [
        local.stored_shape(r)
        if r.overwrites is None
        else operands[r.overwrites].array.shape
        for r in results
    ]
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
            tuple(dataclasses.replace(o, array=None) for o in operands),
            tuple(results),
            frozenset(stacked),
            given,
            table.shape[-1],
            math.prod(leaf.shape) % 2**32,
            when,
            interpret,
        ),
        grid=(view.programs,),
        out_shape=outputs,
        input_output_aliases={
            len(place) + 1 + r.overwrites: i
            for i, r in enumerate(results)
            if r.overwrites is not None
        },
        compiler_params=triton.CompilerParams(
            num_warps=view.parts if view.parts > 1 else _WARPS, num_stages=1
        ),
        interpret=interpret,
        name="fused_update",
    )(*place, table.reshape(-1), *arrays)
    return [x.reshape(shape) for x, shape in zip(written, shapes, strict=True)]


def _kernel(
    body, view, operands, results, stacked, given, width, size, when, interpret, *refs
):
    refs = list(refs)
    row, base, layer = (refs.pop(0)[0] if g else jnp.uint32(0) for g in given)
    scalars = read_scalars(refs.pop(0), row, width)

    base = base + layer.astype(jnp.uint32) * jnp.uint32(size)
    layer = layer.astype(jnp.int32)
    lanes = lanes_of(view, pl.program_id(0), base)

    @unless_skipped(scalars, when)
    def _():
        _update(
            body, view, operands, results, stacked, interpret, lanes, layer, scalars,
            refs,
        )  # fmt: skip


def _update(
    body, view, operands, results, stacked, interpret, lanes, layer, scalars, refs
):
    def array(ref, spec, number):
        at = layer if number in stacked else 0
        if spec.bits is None:
            return _Plain(ref, at, spec.per_group)
        words = _Words(ref, at, lanes, spec.bits)
        if isinstance(spec, Result):
            by_bytes = spec.bits == 8 and not interpret
            return Writer(spec.bits, view.chunk, words, by_bytes)
        return Reader(spec.bits, view.chunk, words)

    reads = [
        array(ref, spec, i)
        for i, (ref, spec) in enumerate(zip(refs, operands, strict=False))
    ]
    writes = [
        array(ref, spec, spec.overwrites)
        for ref, spec in zip(refs[len(operands) :], results, strict=True)
    ]
    rows = _Rows(view, lanes, [x for x in reads if not _is_per_group(x)], scalars)
    per_group = [x for x in writes if _is_per_group(x)]
    writes = [x for x in writes if not _is_per_group(x)]
    by_bytes = [i for i, x in enumerate(writes) if isinstance(x, Writer) and x.by_bytes]
    run = with_instructions(body, interpret, by_bytes)
    if per_group or any(map(_is_per_group, reads)):
        run = _over_groups(body, run, rows, reads, per_group, interpret)
    packed = [x for x in writes if isinstance(x, Writer)]

    def visit(piece, carry):
        for x, open_word in zip(packed, carry, strict=True):
            x.start(piece, open_word)
        for r, values, index, offset, exists in rows.of(piece):
            new = run(values, scalars, index)
            for x, value in zip(writes, new, strict=True):
                if isinstance(x, _Plain):
                    x.store(offset, value, exists)
                else:
                    # Fields of the padding are 0, as in pack.
                    if exists is not None and exists is not lanes.inside:
                        value = jax.tree.map(
                            lambda v, e=exists: jnp.where(e, v, jnp.uint32(0)), value
                        )
                    x.put(r, value)
        return [x.finish() for x in packed]

    rows.loop(visit, [x.first_carry(view.lanes_shape) for x in packed])


def with_instructions(function, interpret: bool, bytes_: Sequence[int] = ()):
    """A body's function with the GPU's own instructions, unless interpreted."""

    def run(values, scalars, index, *of_groups):
        chosen = xla.multiply_add if interpret else multiply_add
        return function(values, scalars, index, chosen, *of_groups)

    return run if interpret else with_short_forms(run, bytes_)


def _over_groups(body, run, rows: "_Rows", reads, writes, interpret):
    """What writes the elements, after the groups have been measured and written."""
    lanes, scalars, shape = rows.lanes, rows.scalars, rows.view.lanes_shape
    statistics = with_instructions(body.statistics, interpret)
    of_groups, after = body.before, body.after
    if not interpret:
        of_groups, after = with_short_forms(of_groups), with_short_forms(after)
    before = of_groups(
        [x.load(lanes.lane, lanes.inside) for x in reads if _is_per_group(x)]
    )

    def measure(piece, maxima):
        for _, values, index, _, exists in rows.of(piece):
            new = statistics(values, scalars, index, before)
            if exists is not None:
                new = [jnp.where(exists, x, jnp.int32(0)) for x in new]
            maxima = [jnp.maximum(*pair) for pair in zip(maxima, new, strict=True)]
        return maxima

    maxima = rows.loop(measure, [jnp.zeros(shape, jnp.int32)] * body.maxima)
    if rows.view.parts > 1:
        maxima = [jnp.max(x, axis=0, keepdims=True) for x in maxima]
        maxima = [jnp.broadcast_to(x, shape) for x in maxima]
    stored, after = after(maxima)
    for x, value in zip(writes, stored, strict=True):
        x.store(lanes.lane, value, lanes.inside)
    return lambda *args: run(*args, before, after)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of a program, piece by piece."""

    view: View
    lanes: Lanes
    reads: list
    scalars: list
    held: list = dataclasses.field(default_factory=list)

    def of(self, piece: jax.Array):
        """``(number in the piece, values, index, offset, which lanes exist)``."""
        if self.view.parts == 1:
            return self._of(piece)
        # It is the only piece: what has been read once is not read again.
        if not self.held:
            self.held.extend(self._of(piece))
        return self.held

    def _of(self, piece: jax.Array):
        lanes, chunk = self.lanes, self.view.chunk
        for x in self.reads:
            if isinstance(x, Reader):
                x.start(piece)
        for r in range(chunk):
            start = piece * jnp.int32(chunk)
            offset, exists = lanes.offset(start, r), lanes.exists(start, r)
            values = [
                x.load(offset, exists) if isinstance(x, _Plain) else x.field(r)
                for x in self.reads
            ]
            yield r, values, lanes.element(start + jnp.int32(r)), offset, exists

    def loop(self, visit, carry):
        """``visit(piece, carry)`` on every piece."""
        count = self.view.rows // self.view.chunk
        if count == 1:
            return visit(jnp.int32(0), carry)
        return lax.fori_loop(0, count, visit, carry)


@dataclasses.dataclass(frozen=True)
class _Plain:
    """An array that is not packed, or a layer of a stack of them."""

    ref: typing.Any
    layer: jax.Array | int
    per_group: bool = False

    def load(self, offset: jax.Array, mask: jax.Array | None) -> jax.Array:
        return triton.load(self.ref.at[self.layer, offset], mask=mask)

    def store(self, offset: jax.Array, value: jax.Array, mask) -> None:
        triton.store(self.ref.at[self.layer, offset], value, mask=mask)


def _is_per_group(x) -> bool:
    return isinstance(x, _Plain) and x.per_group


@dataclasses.dataclass(frozen=True)
class _Words:
    """The words of the lanes' groups, by number."""

    ref: typing.Any
    layer: jax.Array | int
    lanes: Lanes
    bits: int

    def load(self, start: jax.Array, word: int = 0) -> jax.Array:
        offset = self.lanes.word_offset(self.bits, start, word)
        mask = self.lanes.has_word(self.bits, start + jnp.int32(word))
        return triton.load(self.ref.at[self.layer, offset], mask=mask)

    def store(
        self, start: jax.Array, word: int, value: jax.Array, when: jax.Array | None
    ) -> None:
        mask = self.lanes.has_word(self.bits, start + jnp.int32(word))
        if when is not None:
            when = jnp.broadcast_to(when, value.shape)
            mask = when if mask is None else mask & when
        offset = self.lanes.word_offset(self.bits, start, word)
        triton.store(self.ref.at[self.layer, offset], value, mask=mask)


def read_scalars(table, row: jax.Array, width: int) -> list[jax.Array]:
    """A row of the table; before any store, which might alias it."""
    first = row.astype(jnp.int32) * jnp.int32(width)
    return [table[first + jnp.int32(i)] for i in range(width)]


def unless_skipped(scalars: Sequence[jax.Array], when: int | None):
    """A decorator that runs a function now, but not where the scalar ``when`` is 0.

    What is not written stays as it was: results are written over operands.
    """
    if when is None:
        return lambda function: function()
    return pl.when(scalars[when] != jnp.uint32(0))


def manual_axes(result: Result, operands):
    """How a result varies over the mesh of a ``jax.shard_map``: as what it replaces."""
    if result.overwrites is not None:
        return jax.typeof(operands[result.overwrites].array).manual_axis_type
    types = [jax.typeof(o.array).manual_axis_type for o in operands]
    return max(types, key=lambda each: len(each.varying))
