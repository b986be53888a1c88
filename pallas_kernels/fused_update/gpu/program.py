"""The code of a program.

A program finds its leaf, loads the operands, runs the update's elementwise body, and
stores the results. :mod:`.lanes` computes the offsets of the elements, and
:mod:`.operands` selects the leaf's arrays. No code here depends on the launcher.
"""

import functools
import itertools
import math
import typing
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.bitfields import get_field
from pallas_kernels.fused_update import xla
from pallas_kernels.fused_update.gpu.arrangements import Arrangement
from pallas_kernels.fused_update.gpu.kernel import Kernel
from pallas_kernels.fused_update.gpu.lanes import (
    BlockLanes,
    BlockPlaces,
    Lanes,
    Row,
    lanes_of,
)
from pallas_kernels.fused_update.gpu.numbers import Scalar, constants
from pallas_kernels.fused_update.gpu.operands import Access, Key, Memory, Packed, Stores
from pallas_kernels.fused_update.gpu.peephole import (
    with_instructions,
    with_peephole_rules,
)
from pallas_kernels.fused_update.gpu.tiling import Tiling
from pallas_kernels.fused_update.spec import BlockBody, Operand, Result
from pallas_kernels.layout import TILE_SIZE


def run_program(
    kernel: Kernel,
    program: jax.Array,
    refs: Iterable,
    arrangement: Arrangement,
    guard: Callable[[Callable], None] = lambda work: work(),
) -> None:
    """Run one program of a kernel.

    Args:
      kernel: the kernel.
      program: int32 scalar, the index of the program in the kernel.
      refs: references to the kernel's arguments, and then to all results.
      arrangement: the arrangement of the program's lanes in arrays.
      guard: function that receives the update as a function, and calls it or skips it.
    """
    shared, operands, results = kernel.named(refs)
    leaf, exists = np.int32(0), None
    if kernel.numbers is not None:
        leaf, program, exists = kernel.numbers.find(shared.numbers, program)
        numbers = kernel.numbers.read(shared.numbers, leaf, arrangement.instructions)
    else:
        numbers = constants(kernel.tiling.numbers(are_equal=True))
        if kernel.leaves > 1:
            # With 64-bit types enabled, a Python int would be an int64 here.
            programs = np.int32(kernel.tiling.programs)
            leaf, program = lax.div(program, programs), lax.rem(program, programs)
    row = jnp.uint32(0) if shared.rows is None else shared.rows[leaf]
    base = jnp.uint32(0) if shared.bases is None else shared.bases[leaf]
    layer = jnp.int32(0) if shared.layer is None else shared.layer[np.int32(0)]
    # Read the table before any store, because a result might alias it.
    first = row.astype(jnp.int32) * np.int32(kernel.table_width)
    scalars = [shared.table[first + np.int32(i)] for i in range(kernel.table_width)]
    if shared.layer is not None:
        layer_size = math.prod(kernel.leaf.shape) % 2**32
        base = base + layer.astype(jnp.uint32) * np.uint32(layer_size)
    memory = Memory(leaf, operands, results, arrangement)

    def update():
        lanes = lanes_of(kernel.tiling, arrangement, program, base, numbers)
        _Program(kernel, lanes, memory, layer, scalars).update()

    if kernel.when is not None:
        # Results overwrite operands, so skipping the stores keeps the old values.
        proceeds = scalars[kernel.when] != np.uint32(0)
        exists = proceeds if exists is None else exists & proceeds
    if exists is None:
        guard(update)
    else:
        pl.when(exists)(lambda: guard(update))


class _Program:
    """Updates the lanes of one program. ``scalars`` are arguments of the body."""

    def __init__(
        self,
        kernel: Kernel,
        lanes: Lanes,
        memory: Memory,
        layer: jax.Array,
        scalars: list[jax.Array],
    ):
        self._leaf, self._body = kernel.leaf, kernel.body
        self._lanes, self._memory, self._layer = lanes, memory, layer
        self._scalars, self._instructions = scalars, memory.arrangement.instructions
        operands, results = enumerate(kernel.leaf.operands), kernel.leaf.results
        self._reads = [self._array(i, operand, i) for i, operand in operands]
        self._writes = [
            self._array(i, result, result.overwrites)
            for i, result in enumerate(results)
        ]
        self._per_row = [x for x in self._writes if not isinstance(x, _PerBlock)]
        self._packed = [x for x in self._per_row if isinstance(x, Packed)]
        self._run = with_instructions(self._body, "__call__", self._instructions)
        # Reading and writing rows one by one needs fewer registers.
        self._reads_at_once = bool(self._leaf.block_sizes) or memory.has_branches

    @property
    def _block_lanes(self) -> BlockLanes:
        return typing.cast(BlockLanes, self._lanes)

    def _array(self, number: int, like: Operand | Result, operand: int | None):
        """Return the accessor of an operand, or of a result that replaces one."""
        layer = self._layer if operand in self._leaf.in_stacks else None
        if like.block_size is not None:
            places = self._block_lanes.blocks_of(like.block_size)
            return _PerBlock(number, layer, places)
        if like.bits is not None:
            return Packed(number, layer, self._block_lanes, like.bits)
        if like.repeated:
            return _Repeated(number, self._lanes.tiling, like.repeated)
        is_written = isinstance(like, Result) or operand in self._leaf.overwritten
        return _Plain(number, layer, self._lanes.tiling.width, is_written)

    def update(self) -> None:
        """Update all rows of the lanes, chunk by chunk."""
        carry = [x.first_carry() for x in self._packed]
        chunks = self._lanes.tiling.chunks
        if chunks == 1:
            self._update_chunk(np.int32(0), carry)
            return

        # With 64-bit types enabled, a fori_loop of static length counts in int64,
        # which needs more registers.
        def step(counted, _):
            chunk, carry = counted
            new = self._update_chunk(chunk, carry)
            carry = jax.tree.map(self._block_lanes.arrangement.carried, new)
            return (chunk + np.int32(1), carry), None

        lax.scan(step, (jnp.int32(0), carry), length=chunks)

    def _update_chunk(self, chunk: Scalar, carry: list) -> list:
        """Update the chunk with this index, and return its partly filled words."""
        rows, memory = self._lanes.rows(chunk), self._memory
        wanted = self._words_and_blocks(chunk)
        at_once = self._plain(rows) if self._reads_at_once else {}
        loaded = memory.load(wanted | at_once)
        for number, x in enumerate(self._reads):
            if isinstance(x, Packed):
                words = [loaded[key] for key in wanted if key[0] == number]
                loaded[number, 0] = x.aligned(chunk, words)
        run, stores = self._run, []
        if self._leaf.block_sizes:
            run, stores = self._with_blocks(chunk, rows, loaded)
        fields = {x.number: [] for x in self._packed}
        for row in rows:
            if not self._reads_at_once:
                loaded |= memory.load(self._plain([row]))
            new = run(self._values(row, loaded), self._scalars, row.index)
            for x, value in zip(self._per_row, new, strict=True):
                if isinstance(x, _Plain):
                    stores.append((x.access(row), value))
                else:
                    fields[x.number].append(value)
            if not memory.has_branches:
                # Write the last results first. In the original order, kernels with
                # float16 weights need up to 29 more registers.
                memory.store(stores[::-1])
                stores = []
        full = [
            x.stores(chunk, fields[x.number], open_word)
            for x, open_word in zip(self._packed, carry, strict=True)
        ]
        memory.store([*stores, *(store for words, _ in full for store in words)])
        return [open_word for _, open_word in full]

    def _words_and_blocks(self, chunk: Scalar) -> dict[Key, Access]:
        """Return accesses to the chunk's packed operands and per-block operands."""
        wanted = {}
        for number, x in enumerate(self._reads):
            if isinstance(x, Packed):
                words = enumerate(x.loads(chunk))
                wanted |= {(number, i): access for i, access in words}
            elif isinstance(x, _PerBlock):
                wanted[number, 0] = x.access(chunk)
        return wanted

    def _plain(self, rows: Sequence[Row]) -> dict[Key, Access]:
        """Return accesses to all other operands of these rows."""
        return {
            (number, row.number): x.access(row)
            for row in rows
            for number, x in enumerate(self._reads)
            if isinstance(x, (_Plain, _Repeated))
        }

    def _values(self, row: Row, loaded) -> list[jax.Array]:
        """Return a row's elements for each operand that is not per block."""
        return [
            get_field(loaded[number, 0], row.number, x.bits)
            if isinstance(x, Packed)
            else loaded[number, row.number]
            for number, x in enumerate(self._reads)
            if not isinstance(x, _PerBlock)
        ]

    def _with_blocks(
        self, chunk: Scalar, rows: Sequence[Row], loaded
    ) -> tuple[Callable, Stores]:
        """Compute the maxima over blocks.

        Returns:
          ``(run, stores)``: the body as a function of a row, with the values of the
          row's blocks already passed, and the stores of the per-block results.
        """
        body = typing.cast(BlockBody, self._body)
        expand = self._block_lanes.arrangement.expand
        decode = with_peephole_rules(body.before, self._instructions)
        encode = with_peephole_rules(body.after, self._instructions)
        reads = [n for n, x in enumerate(self._reads) if isinstance(x, _PerBlock)]
        of_blocks = [loaded[n, 0] for n in reads]
        given, maxima, stored = [jax.tree.map(expand, decode(of_blocks))], [], []
        while len(maxima) < len(body.block_sizes):
            sizes = body.block_sizes[len(maxima) :]
            maxima += self._maxima(chunk, rows, loaded, given, sizes)
            stored, after = encode(maxima, of_blocks)
            given[1:] = [jax.tree.map(expand, after)]
        writes = (x for x in self._writes if isinstance(x, _PerBlock))
        stores = [(x.access(chunk), v) for x, v in zip(writes, stored, strict=True)]
        return lambda *args: self._run(*args, *given), stores

    def _maxima(
        self,
        chunk: Scalar,
        rows: Sequence[Row],
        loaded,
        given: Sequence[tuple],
        sizes: Sequence[int],
    ) -> list:
        """Return the next maxima over blocks, whose sizes come first in ``sizes``."""
        body, lanes = typing.cast(BlockBody, self._body), self._block_lanes
        statistics = with_instructions(body, "statistics", self._instructions)
        left = lanes.rows_left(chunk * np.int32(lanes.tiling.chunk_rows))
        left = None if left is None else lanes.arrangement.expand(left)
        zeros = jnp.zeros(lanes.arrangement.shape, jnp.int32)
        maxima: list = []
        for row in rows:
            values = self._values(row, loaded)
            new = statistics(values, self._scalars, row.index, *given)
            maxima = maxima or [lanes.arrangement.carried(zeros)] * len(new)
            larger = jnp.maximum
            if left is not None:
                larger_before = (self._instructions or xla).larger_before
                larger = functools.partial(larger_before, row.number, left)
            maxima = [larger(*pair) for pair in zip(maxima, new, strict=True)]
        if lanes.inside is not None:
            maxima = [jnp.where(lanes.inside, x, np.int32(0)) for x in maxima]
        return [
            lanes.arrangement.maxima(x, lanes.tiling.block_size // size)
            for size, x in zip(sizes, maxima, strict=False)
        ]


class _Plain(typing.NamedTuple):
    """An operand or result with one element for each element of the leaf.

    If ``is_written``, programs write the array, so they do not read each other's
    elements.
    """

    number: int
    layer: jax.Array | None
    width: int
    is_written: bool

    def access(self, row: Row) -> Access:
        """Return the access to the elements of a row of lanes."""
        mask = row.exists if self.is_written else row.readable
        return Access(self.number, self.layer, row.offset, mask, self.width)


class _Repeated(typing.NamedTuple):
    """An operand with a single element along the axes ``repeated`` of the leaf."""

    number: int
    tiling: Tiling
    repeated: tuple[int, ...]

    def access(self, row: Row) -> Access:
        """Return the access to the elements that a row of lanes reads."""
        rest, place, stride = row.offset.astype(jnp.uint32), jnp.int32(0), 1
        axes = enumerate(self.tiling.shape)
        runs = itertools.groupby(axes, lambda axis: axis[0] in self.repeated)
        sizes = [(gone, math.prod(n for _, n in run)) for gone, run in runs]
        for gone, size in reversed(sizes):
            along = jnp.full_like(rest, size)
            if not gone:
                within = lax.rem(rest, along).astype(jnp.int32)
                place, stride = place + within * np.int32(stride), stride * size
            rest = lax.div(rest, along)
        # The lanes of a tile are neighbors along the last axis.
        width = 1 if len(self.tiling.shape) - 1 in self.repeated else self.tiling.width
        place = jnp.broadcast_to(place, row.offset.shape)
        return Access(self.number, None, place, row.readable, width)


class _PerBlock(typing.NamedTuple):
    """An operand or result with one element for each block."""

    number: int
    layer: jax.Array | None
    places: BlockPlaces

    def access(self, chunk: Scalar) -> Access:
        """Return the access to the values of the blocks in a chunk of rows."""
        tiles = self.places.block_size // TILE_SIZE
        place = self.places.of_chunk(chunk)
        return Access(self.number, self.layer, *place, tiles=tiles)
