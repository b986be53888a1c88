"""Fused updates of many small leaves on CPUs, as if they were one leaf.

XLA's CPU compiler takes as long for a small leaf as for a large one. Therefore, small
leaves of different shapes are copied into one *joined* leaf. :mod:`.blocked` updates it
block by block, and the results are copied back.

The joined leaf consists of *bands* of 128 columns. The height of a band is the smallest
number of rows that contains whole words and blocks. Each leaf is cut into *strips* of
this height, which are concatenated along the columns, padded with zeros and cut into
bands.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.fused_update import blocked, xla
from pallas_kernels.fused_update.spec import BlockBody, Body, Leaf, Operand, Result
from pallas_kernels.layout import FOLD, TILE_SIZE, WORD, block_shape, period
from pallas_kernels.platforms import transformable

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


def update(
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
      scalars: the remaining scalars; see :func:`.blocked.update`.
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
    def parts(self) -> blocked.Parts:
        """Parts with the same number of bands; the last part may contain padding."""
        rows, count = self.bands[0].rows, sum(b.count for b in self.bands)
        parts = max(1, round(count * rows * _COLUMNS / blocked.BLOCK))
        length = math.ceil(count / parts)
        if parts >= _MANY_PARTS:
            # XLA compiles equal parts of different joined leaves once.
            length = math.ceil(blocked.BLOCK / (rows * _COLUMNS))
            parts = math.ceil(count / length)
        return blocked.Parts((parts * length * rows, _COLUMNS), length * rows)

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

        def arguments(first, length):
            """Returns the scalars, with keys as columns, and the elements' indices."""
            at, bands = first // rows, length // rows
            sliced = lambda x: lax.dynamic_slice_in_dim(x, at, bands)
            *keys, stride = (jnp.repeat(sliced(x), rows)[:, None] for x in per_band)
            row = jnp.tile(lax.iota(jnp.uint32, rows), bands)[:, None]
            index = jnp.repeat(sliced(first_rows), rows, axis=0) + row * stride
            return [*keys, *scalars], index

        skips = None if when is None else scalars[when - len(keys)] == jnp.uint32(0)
        new = blocked.over_parts(body, self.leaf, self.parts, arguments, skips)
        return self.results(new)
