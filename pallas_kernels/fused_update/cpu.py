"""Fused updates of large leaves on CPUs part by part, and of many small ones together.

XLA's CPU compiler makes one loop for each result of an update, and cannot overwrite an
array that another loop still reads. For a whole leaf, it therefore writes every result
to new memory, whose pages the system must clear, and then copies the result. Here, a
loop updates parts of :data:`PART` elements. The results of a part stay in a few MiB of
memory until all of them are computed, and the next iteration reuses that memory.

XLA's CPU compiler takes as long for a small leaf as for a large one. Therefore, large
leaves share a loop if their parts have the same shape; each turn updates a part of one
of them. Small leaves of different shapes are copied into one *joined* leaf. It is
updated part by part, and the results are copied back. The joined leaf consists of
*bands* of 128 columns. The height of a band is the smallest number of rows that
contains whole words and blocks. Each leaf is cut into *strips* of this height, which
are concatenated along the columns, padded with zeros and cut into bands.

:mod:`pallas_kernels.fused_update.xla` updates each part, so the results are equal.
"""

import dataclasses
import functools
import math
import typing
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

SIDE = 256
"""Rows and columns of the parts of matrices whose columns are a multiple of it.

They are the same for many matrices, which therefore share a loop."""


def divided(numbers: Sequence[int], leaves: Mapping[int, Leaf]) -> Iterable[list[int]]:
    """Yield lists of the indices of leaves that :func:`update` updates together.

    Args:
      numbers: indices of leaves with the same kinds of operands and results.
      leaves: dict from index to leaf.
    """
    large: dict[typing.Hashable, list[int]] = {}
    joined: list[int] = []
    total = 0
    for number in numbers:
        leaf = leaves[number]
        if not is_joined(leaf):
            large.setdefault(_parts(leaf).kind, []).append(number)
            continue
        size = math.prod(leaf.shape)
        if joined and total + size > MAX_JOINED:
            yield joined
            joined, total = [], 0
        joined.append(number)
        total += size
    if joined:
        yield joined
    for some in large.values():
        together = MAX_LARGE if len(some) >= MIN_LARGE else 1
        for begin in range(0, len(some), together):
            yield some[begin : begin + together]


def update(
    body: Body | BlockBody,
    leaves: Sequence[Leaf],
    keys: Sequence[jax.Array],
    scalars: Sequence[jax.Array],
    when: int | None = None,
) -> list[list[jax.Array]]:
    """Run :func:`pallas_kernels.fused_update.xla.update` on leaves, part by part.

    Args:
      body, when: see :func:`.xla.update`.
      leaves: small leaves, or large leaves with parts of the same kind; see
        :func:`divided`. They must not be stacked.
      keys: the first scalars of the body, as vectors with one element for each leaf.
      scalars: the remaining scalars, in any dtypes that the body accepts. The results
        can be differentiated with respect to them.
    """

    def by_parts(keys, scalars, leaves):
        if is_joined(leaves[0]):
            return _Joined(leaves).updated(body, keys, scalars, when)
        return _in_place(body, leaves, keys, scalars, when)

    def one_by_one(keys, scalars, leaves):
        return [
            xla.update(body, leaf, [*(k[i] for k in keys), *scalars], when=when)
            for i, leaf in enumerate(leaves)
        ]

    return transformable(by_parts, one_by_one)(list(keys), list(scalars), list(leaves))


def _in_place(
    body: Body | BlockBody, leaves: Sequence[Leaf], keys, scalars, when: int | None
) -> list[list[jax.Array]]:
    """Returns the results of large leaves, which overwrite the operands."""
    # One leaf has parts of whole rows, which need less time.
    parts = list(map(_parts, leaves)) if len(leaves) > 1 else [_rows(leaves[0])]
    strides = jnp.array([math.prod(p.shape[1:]) for p in parts], jnp.uint32)

    def arguments(which, at, shape):
        row, column = (jnp.asarray(x).astype(jnp.uint32) for x in at)
        stride = strides[which]
        first = row * stride + column

        def index() -> jax.Array:
            columns = xla.index_of((1, *shape[1:]), parts[0].shape, first)
            rows = lax.broadcasted_iota(jnp.uint32, (shape[0], *columns.shape[1:]), 0)
            return columns + rows * stride

        return [*(k[which] for k in keys), *scalars], index

    views = []
    for leaf, p in zip(leaves, parts, strict=True):
        seen = dataclasses.replace(leaf, shape=p.shape)
        arrays = [o.array.reshape(seen.stored_shape(o)) for o in leaf.operands]
        views.append(seen.with_arrays(arrays))
    skips = None if when is None else scalars[when - len(keys)] == jnp.uint32(0)
    new = over_parts(body, views, parts, arguments, skips)
    return [
        [
            x.reshape(leaf.stored_shape(result))
            for x, result in zip(each, leaf.results, strict=True)
        ]
        for leaf, each in zip(leaves, new, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Parts:
    """A division of a leaf into parts along its first and last axis.

    Args:
      shape: shape of the leaf, or of a reshaped view of it.
      part: shape of a part. All axes but the first and the last are whole.
      last: number of rows of an additional last part, which has whole rows; 0 if there
        is none.
    """

    shape: tuple[int, ...]
    part: tuple[int, ...]
    last: int = 0

    @property
    def grid(self) -> tuple[int, int]:
        """Number of parts along the first and along the last axis, without the last."""
        rows = (self.shape[0] - self.last) // self.part[0]
        return rows, self.shape[-1] // self.part[-1] if len(self.shape) > 1 else 1

    @property
    def kind(self) -> typing.Hashable:
        """A value that is equal for leaves whose parts can be updated in one loop."""
        is_matrix = len(self.shape) == 2 and not self.last
        return self.part, None if is_matrix else self.shape


def _parts(leaf: Leaf) -> Parts:
    """Returns square parts of a matrix if it consists of them, and otherwise rows."""
    shape = _view(leaf)
    if len(shape) != 2 or shape[1] % SIDE or any(o.repeated for o in leaf.operands):
        return _rows(leaf)
    rest = shape[0] % SIDE
    if shape[0] < (2 * SIDE if rest else SIDE):
        return _rows(leaf)
    # The last part gets the remainder, because few rows could change the layout.
    return Parts(shape, (SIDE, SIDE), SIDE + rest if rest else 0)


def _view(leaf: Leaf) -> tuple[int, ...]:
    """Returns the shape of a matrix with the leaf's layout, or the leaf's shape."""
    shape, axis = leaf.shape, len(leaf.shape) - 2
    size, columns = math.prod(shape), shape[-1]
    if not leaf.has_words_or_blocks:
        return (size // columns, columns) if columns <= PART else (size,)
    is_matrix = leaf.layout.row_axis == axis and shape[axis] % leaf.unit(axis) == 0
    return (size // columns, columns) if is_matrix else shape


def _rows(leaf: Leaf) -> Parts:
    """Returns parts of whole rows, or one part if several would change the layout."""
    shape, is_plain = _view(leaf), not leaf.has_words_or_blocks
    unit = dataclasses.replace(leaf, shape=shape).unit(0)
    parts = _divided(shape, unit)
    if is_plain and parts.last:
        # The number of elements may have a divisor that the number of rows lacks.
        return _divided((math.prod(shape),), 1)
    lengths = shape[0], parts.part[0], parts.last
    axes = {layout_of((n, *shape[1:])).axis for n in lengths if n}
    return parts if is_plain or len(axes) == 1 else Parts(shape, shape)


def _divided(shape: tuple[int, ...], unit: int) -> Parts:
    """Returns parts whose number of rows is a multiple of ``unit``."""
    rows, row = shape[0], math.prod(shape[1:])
    parts = max(1, round(rows * row / PART))
    for count in range(parts, 2 * parts):
        if rows % (count * unit) == 0:
            return Parts(shape, (rows // count, *shape[1:]))
    length = max(PART // (unit * row), 1) * unit
    if rows < 2 * length:
        return Parts(shape, shape)
    return Parts(shape, (length, *shape[1:]), length + rows % length)


def over_parts(
    body: Body | BlockBody,
    leaves: Sequence[Leaf],
    parts: Sequence[Parts],
    arguments: Callable,
    skips: jax.Array | None,
) -> list[list[jax.Array]]:
    """Update leaves part by part and return their results.

    Args:
      body: body of the update.
      leaves: leaves with the same kinds of operands and results.
      parts: the parts of each leaf, which have the same kind.
      arguments: a function that returns the scalars for the body and a function that
        returns the index, given the position of the leaf, the first row and column of a
        part, and its shape.
      skips: boolean scalar, whether to skip the update; None if it is never skipped.
    """
    first, one = leaves[0], parts[0]
    dtypes = [x.dtype for x in first.arrays]
    leaves = [leaf.with_arrays(list(map(_to_slice, leaf.arrays))) for leaf in leaves]
    written = [_written_arrays(leaf) for leaf in leaves]
    update = _Update(body, leaves, dtypes, one.part, arguments).of_part
    counts = [math.prod(p.grid) for p in parts]
    starts = np.cumsum([0, *counts[:-1]], dtype=np.int32)
    widths = jnp.array([p.grid[1] for p in parts], jnp.int32)

    def advance(turn, written):
        which = jnp.sum(turn >= starts[1:], dtype=jnp.int32)
        at = jnp.divmod(turn - jnp.asarray(starts)[which], widths[which])
        return update(which, at, one.part, written)

    def finish(turn, written):
        return update(turn, (one.grid[0], 0), (one.last, *one.shape[1:]), written)

    written = _repeated(advance, sum(counts), skips, written)
    if one.last:
        written = _repeated(finish, len(leaves), skips, written)
    # If XLA fused the writes with a later reshape or bitcast, it would use new memory.
    dtypes = [x.dtype for x in first.results]
    ordered = [[arrays[place] for place in _places(first)] for arrays in written]
    return [list(map(_from_slice, arrays, dtypes)) for arrays in _barrier(ordered)]


def _repeated(
    part: Callable, turns: int, skips: jax.Array | None, written: list
) -> list:
    """Returns ``written`` after ``turns`` parts, or unchanged if ``skips`` is true."""
    if turns == 1 and skips is None:
        return part(jnp.int32(0), written)

    def turn(number, written):
        return part(_in_parallel_loop(number, turns), written)

    end = turns if skips is None else jnp.where(skips, 0, turns)
    return lax.fori_loop(0, end, turn, written)


def _written_arrays(leaf: Leaf) -> dict[int, jax.Array]:
    """Returns the arrays that a leaf's results overwrite, keyed by their places."""
    return {
        place: leaf.arrays[place]
        if place < len(leaf.operands)
        else _to_slice(jnp.zeros(leaf.stored_shape(result), result.dtype))
        for place, result in zip(_places(leaf), leaf.results, strict=True)
    }


def _places(leaf: Leaf) -> list[int]:
    """Returns the index of the operand that each result overwrites, or a new index."""
    return [
        len(leaf.operands) + number if result.overwrites is None else result.overwrites
        for number, result in enumerate(leaf.results)
    ]


@dataclasses.dataclass(frozen=True)
class _Update:
    """An update of leaves, part by part.

    Args:
      body, leaves, arguments: see :func:`over_parts`.
      dtypes: dtypes of a leaf's arrays before :func:`_to_slice`.
      unit: shape of each part before the last one.
    """

    body: Body | BlockBody
    leaves: Sequence[Leaf]
    dtypes: Sequence
    unit: tuple[int, ...]
    arguments: Callable

    def of_part(
        self,
        which: jax.Array,
        place: tuple,
        shape: tuple[int, ...],
        written: list[dict[int, jax.Array]],
    ) -> list[dict[int, jax.Array]]:
        """Return ``written`` after adding the results of one part.

        Args:
          which: position of the leaf.
          place: number of parts before this part along the first and the last axis.
          shape: shape of the part.
          written: the results of each leaf, keyed by :func:`_places`.
        """
        part = dataclasses.replace(self.leaves[0], shape=shape)
        # XLA would compute scalars for each element if a fused loop contained them.
        starts = self._starts(part.operands, place)
        at = place[0] * self.unit[0], place[1] * self.unit[-1]
        given = self.arguments(which, at, shape)
        new = _unfused(
            lambda: self._results(
                part, self._read(part, which, starts, written), given
            ),
            [(part.stored_shape(x), x.dtype) for x in part.results],
            self.leaves[0].arrays[0],
        )
        starts = self._starts(part.results, place)

        def write(written: dict[int, jax.Array]) -> dict[int, jax.Array]:
            triples = zip(_places(part), new, starts, strict=True)
            return {
                n: lax.dynamic_update_slice(written[n], value, start)
                for n, value, start in triples
            }

        if len(self.leaves) == 1:
            return [write(written[0])]
        # XLA writes in place in each of these branches. In one branch for each leaf, it
        # would have to pass through the arrays of all others.
        return [
            lax.cond(which == n, write, lambda x: x, each)
            for n, each in enumerate(written)
        ]

    def _starts(self, likes: Sequence[Operand | Result], place: tuple) -> list:
        """Returns the indices of the first element of a part in each stored array."""
        unit, found = dataclasses.replace(self.leaves[0], shape=self.unit), []
        for like in likes:
            sizes = unit.stored_shape(like)
            start: list = [jnp.uint32(0)] * len(sizes)
            for axis, number in ((-1, place[1]), (0, place[0])):
                start[axis] = jnp.uint32(number) * jnp.uint32(sizes[axis])
            found.append(start)
        return _barrier(found)

    def _read(self, part: Leaf, which, starts: list, written: list) -> list[jax.Array]:
        """Returns the arrays of a part, from the leaf at position ``which``."""

        def read(leaf: Leaf, written: dict[int, jax.Array]) -> list[jax.Array]:
            pairs = zip(leaf.operands, starts, strict=True)
            return [
                lax.dynamic_slice(
                    written.get(n, like.array), start, part.stored_shape(like)
                )
                for n, (like, start) in enumerate(pairs)
            ]

        pairs = zip(self.leaves, written, strict=True)
        reads = [functools.partial(read, *pair) for pair in pairs]
        arrays = lax.switch(which, reads) if len(reads) > 1 else reads[0]()
        return list(map(_from_slice, arrays, self.dtypes))

    def _results(self, part: Leaf, arrays: list, given: tuple) -> list[jax.Array]:
        """Returns the results of a part."""
        scalars, index = given
        apart = functools.partial(_apart, self.leaves[0].arrays[0])
        own = part.with_arrays(arrays)
        new = xla.update(self.body, own, scalars, index=index(), barrier=apart)
        return list(map(_to_slice, new))


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
        return _barrier(list(values))
    values = list(values)
    bits = list(map(_to_slice, values))
    kept = _unfused(lambda: bits, [(x.shape, x.dtype) for x in values], array)
    return [_from_slice(x, y.dtype) for x, y in zip(kept, values, strict=True)]


def _barrier(values: typing.Any) -> typing.Any:
    """Returns a tree of arrays, and keeps operations from using one before all exist.

    No element of a part is then overwritten while it is read, so XLA does not copy it.
    """
    return lax.optimization_barrier(values)


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

MIN_LARGE = 8
"""Minimum number of large leaves that share loops. A shared loop is compiled once, but
it copies each part before updating it, because XLA must know which array a loop reads.
"""

MAX_LARGE = 16
"""Maximum number of large leaves in one loop. Each turn tests which leaf to write."""

_COLUMNS = 128
_MANY_PARTS = 4


def is_joined(leaf: Leaf) -> bool:
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
        # XLA compiles one slice for all indices that it does not know.
        x = _barrier(x)
        numbers = _apart(x, [jnp.int32(n) for n in range(len(self.numbers))])
        each = [lax.dynamic_index_in_dim(x, n, keepdims=False) for n in numbers]
        return [x.reshape(shape) for x in each]

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
        shape = (parts * length * rows, _COLUMNS)
        return Parts(shape, (length * rows, _COLUMNS))

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
        """Return the results of each leaf; see :func:`update`."""
        rows = self.bands[0].rows
        first_rows = self.array(b.first_rows() for b in self.bands)
        strides = np.zeros(len(self.leaves), np.uint32)
        for b in self.bands:
            strides[b.numbers] = b.strips[1]
        per_band = [self.per_band(x) for x in (*keys, jnp.asarray(strides))]

        def arguments(_, at, shape):
            """Returns the scalars, with keys as columns, and the elements' indices."""
            band, bands = at[0] // rows, shape[0] // rows
            sliced = lambda x: lax.dynamic_slice_in_dim(x, band, bands)
            *keys, stride = (jnp.repeat(sliced(x), rows)[:, None] for x in per_band)

            def index() -> jax.Array:
                row = jnp.tile(lax.iota(jnp.uint32, rows), bands)[:, None]
                return jnp.repeat(sliced(first_rows), rows, axis=0) + row * stride

            return [*keys, *scalars], index

        skips = None if when is None else scalars[when - len(keys)] == jnp.uint32(0)
        (new,) = over_parts(body, [self.leaf], [self.parts], arguments, skips)
        return self.results(new)
