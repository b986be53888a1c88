"""Fused updates of large leaves on CPUs part by part, and of many small ones together.

XLA's CPU compiler makes one loop for each result of an update, and cannot overwrite an
array that another loop still reads. For a whole leaf, it therefore writes every result
to new memory, whose pages the system must clear, and then copies the result. Here, a
loop updates parts of :data:`PART` elements. The results of a part stay in a few MiB of
memory until all of them are computed, and the next iteration reuses that memory.

XLA's CPU compiler takes as long for a small leaf as for a large one. Therefore, small
leaves of different shapes are copied into one *joined* leaf. It is updated part by
part, and the results are copied back. The joined leaf consists of *bands* of 128
columns. The height of a band is the smallest number of rows that contains whole words
and blocks. Each leaf is cut into *strips* of this height, which are concatenated along
the columns, padded with zeros and cut into bands.

:mod:`pallas_kernels.fused_update.xla` updates each part, so the results are equal.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.fused_update import xla
from pallas_kernels.fused_update.spec import BlockBody, Body, Leaf, Operand, Result
from pallas_kernels.layout import FOLD, TILE_SIZE, WORD, block_shape, layout_of, period
from pallas_kernels.platforms import transformable

PART = 2**17
"""Approximate number of elements of a part. Its arrays fit into a core's caches."""


def update(
    body: Body | BlockBody,
    leaf: Leaf,
    scalars: Sequence[jax.Array],
    when: int | None = None,
) -> list[jax.Array]:
    """Run :func:`pallas_kernels.fused_update.xla.update` part by part.

    Args:
      body, leaf, when: see :func:`.xla.update`. The leaf must not be stacked.
      scalars: scalars of the body, in any dtypes that it accepts. The results can be
        differentiated with respect to them.
    """

    def in_parts(scalars, leaf):
        parts = _parts(leaf)
        seen = dataclasses.replace(leaf, shape=parts.shape)
        arrays = [o.array.reshape(seen.stored_shape(o)) for o in leaf.operands]

        def arguments(first, length):
            shape = (length, *parts.shape[1:])
            first = jnp.uint32(first) * jnp.uint32(math.prod(parts.shape[1:]))
            return scalars, xla.index_of(shape, parts.shape, first)

        skips = None if when is None else scalars[when] == jnp.uint32(0)
        new = over_parts(body, seen.with_arrays(arrays), parts, arguments, skips)
        return [
            x.reshape(leaf.stored_shape(result))
            for x, result in zip(new, leaf.results, strict=True)
        ]

    def whole(scalars, leaf):
        return xla.update(body, leaf, scalars, when=when)

    return transformable(in_parts, whole)(list(scalars), leaf)


@dataclasses.dataclass(frozen=True)
class Parts:
    """A division of the first axis of a leaf into parts.

    Args:
      shape: shape of the leaf, or of a reshaped view of it.
      length: length of a part along the first axis.
      last: length of an additional last part if its length differs; otherwise 0.
    """

    shape: tuple[int, ...]
    length: int
    last: int = 0

    @property
    def count(self) -> int:
        """Number of parts that have the length ``length``."""
        return (self.shape[0] - self.last) // self.length


def _parts(leaf: Leaf) -> Parts:
    """Returns the parts of a leaf, or one part if several would change the layout."""
    shape, is_plain = leaf.shape, not leaf.has_words_or_blocks
    if is_plain:
        size, columns = math.prod(shape), shape[-1]
        shape = (size // columns, columns) if columns <= PART else (size,)
    parts = _divided(shape, leaf.unit(0))
    if is_plain and parts.last:
        # The number of elements may have a divisor that the number of rows lacks.
        return _divided((math.prod(shape),), 1)
    lengths = shape[0], parts.length, parts.last
    axes = {layout_of((n, *shape[1:])).axis for n in lengths if n}
    return parts if is_plain or len(axes) == 1 else Parts(shape, shape[0])


def _divided(shape: tuple[int, ...], unit: int) -> Parts:
    """Returns parts of the first axis that consist of ``unit`` rows or a multiple."""
    rows, row = shape[0], math.prod(shape[1:])
    parts = max(1, round(rows * row / PART))
    for count in range(parts, 2 * parts):
        if rows % (count * unit) == 0:
            return Parts(shape, rows // count)
    length = max(PART // (unit * row), 1) * unit
    if rows < 2 * length:
        return Parts(shape, rows)
    # The last part gets the remainder, because few rows could change the layout.
    return Parts(shape, length, length + rows % length)


def over_parts(
    body: Body | BlockBody,
    leaf: Leaf,
    parts: Parts,
    arguments: Callable,
    skips: jax.Array | None,
) -> list[jax.Array]:
    """Update a leaf part by part along its first axis and return its results.

    Args:
      body: body of the update.
      leaf: leaf with the shape of ``parts``.
      parts: parts of the leaf.
      arguments: a function that returns the scalars and the index for the body, given
        the first row of a part and its number of rows.
      skips: boolean scalar, whether to skip the update; None if it is never skipped.
    """
    dtypes = [x.dtype for x in leaf.arrays]
    leaf = leaf.with_arrays(list(map(_to_slice, leaf.arrays)))
    written = {
        place: leaf.arrays[place]
        if place < len(dtypes)
        else _to_slice(jnp.zeros(leaf.stored_shape(result), result.dtype))
        for place, result in zip(_places(leaf), leaf.results, strict=True)
    }
    update = functools.partial(_update_part, body, leaf, dtypes, parts, arguments)

    def advance(number, written):
        number = _in_parallel_loop(number, parts.count)
        return update(number, parts.length, written)

    def finish(_, written):
        return update(parts.count, parts.last, written)

    turns = 1 if skips is None else 1 - skips.astype(jnp.int32)
    if parts.count > 1 or skips is not None:
        written = lax.fori_loop(0, turns * parts.count, advance, written)
    else:
        written = update(0, parts.length, written)
    if parts.last and skips is None:
        written = finish(0, written)
    elif parts.last:
        written = lax.fori_loop(0, turns, finish, written)
    # If XLA fused the writes with a later reshape or bitcast, it would use new memory.
    results = _barrier([written[place] for place in _places(leaf)])
    return [
        _from_slice(x, result.dtype)
        for x, result in zip(results, leaf.results, strict=True)
    ]


def _places(leaf: Leaf) -> list[int]:
    """Returns the index of the operand that each result overwrites, or a new index."""
    return [
        len(leaf.operands) + number if result.overwrites is None else result.overwrites
        for number, result in enumerate(leaf.results)
    ]


def _update_part(
    body: Body | BlockBody,
    leaf: Leaf,
    dtypes: Sequence,
    parts: Parts,
    arguments: Callable,
    number: jax.Array | int,
    length: int,
    written: dict[int, jax.Array],
) -> dict[int, jax.Array]:
    """Returns ``written`` after adding the results of one part.

    Args:
      body, leaf, parts, arguments: see :func:`over_parts`.
      dtypes: dtypes of the leaf's arrays before :func:`_to_slice`.
      number: index of the part.
      length: number of rows of the part.
      written: the results of the whole leaf, keyed by :func:`_places`.
    """
    row = parts.shape[1:]
    part = dataclasses.replace(leaf, shape=(length, *row))
    whole = dataclasses.replace(leaf, shape=(parts.length, *row))

    def compute() -> list[jax.Array]:
        arrays = [
            lax.dynamic_slice_in_dim(
                written.get(place, operand.array),
                number * whole.stored_shape(operand)[0],
                part.stored_shape(operand)[0],
            )
            for place, operand in enumerate(leaf.operands)
        ]
        own = part.with_arrays(list(map(_from_slice, arrays, dtypes)))
        scalars, index = arguments(number * parts.length, length)
        apart = functools.partial(_apart, leaf.arrays[0])
        new = xla.update(body, own, scalars, index=index, barrier=apart)
        return list(map(_to_slice, new))

    shapes = [(part.stored_shape(x), x.dtype) for x in leaf.results]
    new = _unfused(compute, shapes, leaf.arrays[0])
    return {
        place: lax.dynamic_update_slice_in_dim(
            written[place], value, number * whole.stored_shape(result)[0], 0
        )
        for place, value, result in zip(_places(leaf), new, leaf.results, strict=True)
    }


DROPS_BARRIERS = jax.__version_info__ < (0, 11)
"""Whether XLA:CPU removes barriers before it fuses operations, as in JAX 0.10.

This version also converts a whole array of narrow floats to float32 in every iteration
of a loop that slices the array or writes to it.
"""


def _to_slice(x: jax.Array) -> jax.Array:
    """Returns the array, or its bits as integers if XLA would convert slices of it."""
    is_narrow = x.dtype.itemsize < 4 and jnp.issubdtype(x.dtype, jnp.floating)
    if not (DROPS_BARRIERS and is_narrow):
        return x
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def _from_slice(x: jax.Array, dtype) -> jax.Array:
    """Inverts :func:`_to_slice`."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def _unfused(
    compute: Callable[[], list[jax.Array]],
    results: Sequence[tuple[tuple[int, ...], jnp.dtype]],
    array: jax.Array,
) -> list[jax.Array]:
    """Returns the results of ``compute``, and keeps XLA from fusing it with other code.

    JAX 0.10 drops barriers, so ``compute`` runs in a branch that is always taken. XLA
    keeps the branch, because it cannot prove that no element is below minus infinity.
    """
    first = array[(0,) * array.ndim].astype(jnp.float32)
    # If zeros were defined outside the branch, every iteration would copy them.
    zeros = lambda: [_to_slice(jnp.zeros(*each)) for each in results]
    return lax.cond(first < -jnp.inf, zeros, compute)


def _apart(array: jax.Array, values: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the values, computed once and before any operation that uses them."""
    if not DROPS_BARRIERS:
        return _barrier(values)
    values = list(values)
    bits = list(map(_to_slice, values))
    kept = _unfused(lambda: bits, [(x.shape, x.dtype) for x in values], array)
    return [_from_slice(x, y.dtype) for x, y in zip(kept, values, strict=True)]


def _barrier(values: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the values, and keeps operations from using one before all are computed.

    No element of a part is then overwritten while it is read, so XLA does not copy it.
    """
    return list(lax.optimization_barrier(tuple(values)))


def _in_parallel_loop(number: jax.Array, count: int) -> jax.Array:
    """Returns ``number`` by sorting it with ``count``, which keeps the loop parallel.

    XLA:CPU in JAX 0.12 compiles a loop into one function, which runs in one thread,
    unless the loop contains a sort. XLA cannot remove this sort, because it cannot
    prove that ``number`` is less than ``count``.
    """
    return lax.sort(jnp.stack([number, jnp.asarray(count, number.dtype)]))[0]


MAX_ELEMENTS = 2**19
"""Leaves of at least this size are not joined, because copying costs more."""

MAX_JOINED = 2**20
"""Maximum number of elements in a joined leaf, which is a copy of its leaves."""

_COLUMNS = 128
_MANY_PARTS = 4


def accepts(leaf: Leaf) -> bool:
    """Return whether a leaf is small and consists of whole words and blocks."""
    size = math.prod(leaf.shape)
    if leaf.stacked or not 0 < size < MAX_ELEMENTS:
        return False
    if not leaf.has_words_or_blocks:
        return True
    layout, (rows, columns) = leaf.layout, _unit(leaf)
    if layout.is_folded:
        return leaf.shape[-1] % (FOLD * rows) == 0
    return layout.rows % rows == 0 and leaf.shape[-1] % columns == 0


def divided(numbers: Sequence[int], leaves: Mapping[int, Leaf]) -> Iterable[list[int]]:
    """Yield lists of the indices of leaves that should be joined."""
    some: list[int] = []
    total = 0
    for number in numbers:
        size = math.prod(leaves[number].shape)
        if some and total + size > MAX_JOINED:
            yield some
            some, total = [], 0
        some.append(number)
        total += size
    yield some


def update_joined(
    body: Body | BlockBody,
    leaves: Sequence[Leaf],
    keys: Sequence[jax.Array],
    scalars: Sequence[jax.Array],
    when: int | None = None,
) -> list[list[jax.Array]]:
    """Run :func:`pallas_kernels.fused_update.xla.update` on joined leaves.

    Args:
      body, when: see :func:`.xla.update`.
      leaves: accepted leaves with the same kinds of operands and results.
      keys: the first scalars of the body, as vectors with one element for each leaf.
      scalars: the remaining scalars; see :func:`update`.
    """

    def joined(keys, scalars, leaves):
        return _Joined(leaves).updated(body, keys, scalars, when)

    def one_by_one(keys, scalars, leaves):
        return [
            xla.update(body, leaf, [*(k[i] for k in keys), *scalars], when=when)
            for i, leaf in enumerate(leaves)
        ]

    return transformable(joined, one_by_one)(list(keys), list(scalars), list(leaves))


def _unit(leaf: Leaf) -> tuple[int, int]:
    """Returns the rows of a band, and the number that must divide a strip's columns."""
    rows, columns = block_shape(max(leaf.block_sizes, default=TILE_SIZE))
    rows = math.lcm(rows, *(period(bits)[0] for bits in leaf.packed))
    return rows, columns if leaf.block_sizes else 1


@dataclasses.dataclass(frozen=True)
class _Bands:
    """The bands of leaves that have the same shape.

    Args:
      leaf: the first leaf.
      numbers: indices of the leaves among all joined leaves.
      rows: number of rows in a band.
    """

    leaf: Leaf
    numbers: Sequence[int]
    rows: int

    @functools.cached_property
    def strips(self) -> tuple[int, int]:
        """Number of strips in a leaf, and number of columns in a strip."""
        size = math.prod(self.leaf.shape)
        if not self.leaf.has_words_or_blocks:
            # Plain elements are read in memory order, and each strip is a band.
            return math.ceil(size / (self.rows * _COLUMNS)), _COLUMNS
        layout = self.leaf.layout
        columns = math.prod(layout.matrix_shape[layout.row_axis + 1 :])
        return size // (self.rows * columns), columns

    @property
    def each(self) -> int:
        """Number of bands in each leaf."""
        return math.ceil(math.prod(self.strips) / _COLUMNS)

    @property
    def count(self) -> int:
        """Number of bands in all leaves together."""
        return self.each * len(self.numbers)

    def band_shape(self, like: Operand | Result) -> tuple[int, int]:
        """Return the rows and columns of a band of an operand or result."""
        if like.bits is not None:
            return self.rows * like.bits // WORD, _COLUMNS
        if like.block_size is not None:
            height, width = block_shape(like.block_size)
            return self.rows // height, _COLUMNS // width
        return self.rows, _COLUMNS

    def of(self, arrays: Sequence[jax.Array], like: Operand | Result) -> jax.Array:
        """Convert arrays, one for each leaf, to bands ``[count, *band_shape]``."""
        height, width = self.band_shape(like)
        x = jnp.stack(arrays).reshape(len(arrays), -1)
        strips, columns = self.strips
        missing = strips * height * columns * width // _COLUMNS - x.shape[1]
        x = jnp.pad(x, ((0, 0), (0, missing)))
        return self._from_strips(x.reshape(len(arrays), strips, height, -1), width)

    def leaves_of(self, bands: jax.Array, like: Result) -> list[jax.Array]:
        """Invert :meth:`of`."""
        height, width = self.band_shape(like)
        strips, columns = self.strips
        columns = columns * width // _COLUMNS
        x = bands.reshape(-1, self.each, height, width)
        if columns != width:
            x = x.transpose(0, 2, 1, 3).reshape(-1, height, self.each * width)
            x = x[..., : strips * columns].reshape(-1, height, strips, columns)
            x = x.transpose(0, 2, 1, 3)
        shape = self.leaf.stored_shape(like)
        x = x.reshape(x.shape[0], -1)[:, : math.prod(shape)]
        return [each.reshape(shape) for each in x]

    def _from_strips(self, x: jax.Array, width: int) -> jax.Array:
        """Converts arrays ``[leaves, strips, rows, columns]`` to bands."""
        leaves, strips, height, columns = x.shape
        if columns == width:
            return x.reshape(self.count, height, width)
        x = x.transpose(0, 2, 1, 3).reshape(leaves, height, strips * columns)
        missing = self.each * width - strips * columns
        x = jnp.pad(x, ((0, 0), (0, 0), (0, missing)))
        x = x.reshape(leaves, height, self.each, width).transpose(0, 2, 1, 3)
        return x.reshape(self.count, height, width)

    def first_rows(self) -> jax.Array:
        """Return the indices in the leaf of the elements in each band's first row."""
        strips, columns = self.strips
        strip = lax.iota(jnp.uint32, strips) * np.uint32(self.rows * columns)
        index = strip[:, None, None] + lax.iota(jnp.uint32, columns)[None, None]
        shape = (len(self.numbers), *index.shape)
        return self._from_strips(jnp.broadcast_to(index, shape), _COLUMNS)


@dataclasses.dataclass(frozen=True)
class _Joined:
    """Several leaves with the same kinds of operands and results, as one leaf."""

    leaves: Sequence[Leaf]

    @functools.cached_property
    def bands(self) -> list[_Bands]:
        """The bands of the leaves of each shape."""
        rows, _ = _unit(self.leaves[0])
        shapes: dict[tuple[int, ...], list[int]] = {}
        for number, leaf in enumerate(self.leaves):
            shapes.setdefault(leaf.shape, []).append(number)
        return [_Bands(self.leaves[some[0]], some, rows) for some in shapes.values()]

    @functools.cached_property
    def parts(self) -> Parts:
        """Parts with the same number of bands; the last part may contain padding."""
        rows, count = self.bands[0].rows, sum(b.count for b in self.bands)
        parts = max(1, round(count * rows * _COLUMNS / PART))
        length = math.ceil(count / parts)
        if parts >= _MANY_PARTS:
            # XLA compiles equal parts of different joined leaves once.
            length = math.ceil(PART / (rows * _COLUMNS))
            parts = math.ceil(count / length)
        return Parts((parts * length * rows, _COLUMNS), length * rows)

    @property
    def leaf(self) -> Leaf:
        """The joined leaf."""
        arrays = [
            self.array(
                b.of([self.leaves[i].arrays[n] for i in b.numbers], operand)
                for b in self.bands
            )
            for n, operand in enumerate(self.leaves[0].operands)
        ]
        leaf = dataclasses.replace(self.leaves[0], shape=self.parts.shape)
        return leaf.with_arrays(arrays)

    def array(self, bands: Iterable[jax.Array]) -> jax.Array:
        """Join the bands of all leaves into one array, padded to whole parts."""
        x = jnp.concatenate(list(bands))
        missing = self.parts.shape[0] // self.bands[0].rows - x.shape[0]
        return jnp.pad(x, ((0, missing), (0, 0), (0, 0))).reshape(-1, x.shape[-1])

    def per_band(self, values: jax.Array) -> jax.Array:
        """Repeat the value of each leaf for all bands of the leaf."""
        numbers = [i for b in self.bands for i in b.numbers]
        counts = [b.each for b in self.bands for _ in b.numbers]
        numbers = np.repeat(numbers, counts)
        missing = self.parts.shape[0] // self.bands[0].rows - numbers.size
        return values[np.pad(numbers, (0, missing))]

    def results(self, joined: Sequence[jax.Array]) -> list[list[jax.Array]]:
        """Return the results of each leaf from the results of the joined leaf."""
        results: list[list[jax.Array]] = [[] for _ in self.leaves]
        for x, like in zip(joined, self.leaves[0].results, strict=True):
            begin = 0
            for b in self.bands:
                bands = x.reshape(-1, *b.band_shape(like))[begin : begin + b.count]
                begin += b.count
                for i, each in zip(b.numbers, b.leaves_of(bands, like), strict=True):
                    results[i].append(each)
        return results

    def updated(
        self, body: Body | BlockBody, keys: Sequence, scalars: Sequence, when
    ) -> list[list[jax.Array]]:
        """Return the results of each leaf; see :func:`update_joined`."""
        rows = self.bands[0].rows
        first_rows = self.array(b.first_rows() for b in self.bands)
        strides = np.zeros(len(self.leaves), np.uint32)
        for b in self.bands:
            strides[b.numbers] = b.strips[1]
        per_band = [self.per_band(x) for x in (*keys, jnp.asarray(strides))]

        def arguments(first, length):
            """Returns the scalars, with keys as columns, and the elements' indices."""
            at, bands = first // rows, length // rows
            sliced = lambda x: lax.dynamic_slice_in_dim(x, at, bands)
            *keys, stride = (jnp.repeat(sliced(x), rows)[:, None] for x in per_band)
            row = jnp.tile(lax.iota(jnp.uint32, rows), bands)[:, None]
            index = jnp.repeat(sliced(first_rows), rows, axis=0) + row * stride
            return [*keys, *scalars], index

        skips = None if when is None else scalars[when - len(keys)] == jnp.uint32(0)
        new = over_parts(body, self.leaf, self.parts, arguments, skips)
        return self.results(new)
