"""What a fused update reads and writes, and what a launcher is asked for."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from pallas_kernels.layout import TILE_ROWS, Layout, block_shape, layout_of, period

MAX_ELEMENTS_OF_SMALL_LEAF = 4 * 4096
"""Up to so many elements, leaves without words and blocks share smaller programs."""

MultiplyAdd = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

Body = Callable[
    [Sequence[jax.Array], Sequence[jax.Array], jax.Array | None, MultiplyAdd],
    Sequence[jax.Array],
]
"""``body(values, scalars, index, multiply_add) -> results``, elementwise.

``values`` has one array per operand: the elements of a plain one in its own dtype, the
fields of a packed one as uint32. All have one shape, which the implementation chooses.
``scalars`` are uint32 scalars. ``index`` holds the elements' row-major indices in the
leaf as uint32, or is None where the values are the whole leaf.
``multiply_add(a, b, c)`` is ``a * b + c``, rounded once or twice: Triton does not
contract a product and a sum unless it is told to.

A body may have an attribute ``differentiable``, the same body with rules for its
derivatives (``jax.custom_jvp``). XLA runs it in place of the body, and differentiates
it where the kernel is differentiated. Kernels cannot contain such rules.
"""


class BlockBody(typing.Protocol):
    """The body of an update with per-block operands or results, such as scales.

    First maxima over each block are taken of what :meth:`statistics` returns, then the
    elements are written. If some maxima can only be taken once others are known,
    :meth:`statistics` returns the values for the first maxima. It is then called again
    with the result of :meth:`after` as one more argument, until all maxima are known,
    and :meth:`after` is called with all maxima known so far.

    Values of blocks have one element per block, or are repeated for each element of the
    block; the body must not depend on which. So it must not mix values of blocks of
    different sizes, except in :meth:`statistics` and :meth:`__call__`. What these both
    compute from the same values, a kernel computes once.
    """

    block_sizes: Sequence[int]
    """For each maximum the size of its blocks."""

    @property
    def kept(self) -> int:
        """How many numbers of an element wait for the maxima, to be written then.

        By it a launcher chooses how many registers a thread may have.
        """
        ...

    def before(self, block_values: Sequence[jax.Array]) -> tuple:
        """What decoding needs from the values of per-block operands; any tuple."""
        ...

    def statistics(
        self, values, scalars, index, multiply_add, before, /
    ) -> Sequence[jax.Array]:
        """For each maximum int32 values of the elements; below 0 they count as 0."""
        ...

    def after(
        self,
        maxima: Sequence[jax.Array],
        block_values: Sequence[jax.Array],
    ) -> tuple[Sequence[jax.Array], tuple]:
        """``(values of the per-block results, what encoding needs of the maxima)``."""
        ...

    def __call__(
        self, values, scalars, index, multiply_add, before, after, /
    ) -> Sequence[jax.Array]:
        """The elements' results, as :data:`Body`."""
        ...


_STATIC: typing.Any = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operand:
    """One array that is read.

    Args:
      array: of the leaf's shape, or uint32 words of its ``words_shape``.
      bits: width of the packed fields, None for a plain array.
      block_size: elements of a block, for an array with one element per block.
      repeated: axes along which a plain array has one element, which all of the leaf's
        elements along them read.
    """

    array: jax.Array
    bits: int | None = dataclasses.field(default=None, metadata=_STATIC)
    block_size: int | None = dataclasses.field(default=None, metadata=_STATIC)
    repeated: tuple[int, ...] = dataclasses.field(default=(), metadata=_STATIC)


@dataclasses.dataclass(frozen=True)
class Result:
    """One array that is written.

    Args:
      dtype: of a plain array's elements; uint32 for packed fields.
      bits: width of the packed fields, None for a plain array.
      overwrites: number of the operand, of the same dtype and bits, in whose place it
        is written; None for a new array.
      block_size: as of an operand.
    """

    dtype: typing.Any
    bits: int | None = None
    overwrites: int | None = None
    block_size: int | None = None
    repeated: typing.ClassVar[tuple[int, ...]] = ()

    def __post_init__(self):
        object.__setattr__(self, "dtype", np.dtype(self.dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scalars:
    """The scalars of one update, or of many.

    Args:
      table: uint32 vector for the body, or a table with one in each row.
      rows: which row of the table each leaf has; uint32 vector, or a number for the
        only leaf. None where the table is a vector.
      values: what the last scalars of every row are, in any dtypes that the body takes
        as well. Kernels read the words; derivatives are taken by the values.
      when: number of a scalar that switches the update off: where it is 0, operands
        that are overwritten keep their values, and other results are undefined.
    """

    table: jax.Array
    rows: typing.Any = None
    values: Sequence[jax.Array] = ()
    when: int | None = dataclasses.field(default=None, metadata=_STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf, or a layer of a stack of leaves, and what its update reads and writes.

    It is a tree of its operands' arrays.

    Args:
      operands, results: of its update.
      shape: of the whole leaf; of one layer, where results go into a stack.
      stacked: whether the operands that are overwritten have an axis of layers in
        front, of which one is updated.
      sharding: where it lies on a mesh of automatic axes, if the user says so; of one
        layer, where results go into a stack.
    """

    operands: tuple[Operand, ...]
    results: tuple[Result, ...] = dataclasses.field(metadata=_STATIC)
    shape: tuple[int, ...] = dataclasses.field(metadata=_STATIC)
    stacked: bool = dataclasses.field(default=False, metadata=_STATIC)
    sharding: NamedSharding | None = dataclasses.field(default=None, metadata=_STATIC)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Sizes of blocks for which an operand or a result has an element each."""
        both = (*self.operands, *self.results)
        return tuple(sorted({x.block_size for x in both if x.block_size is not None}))

    @property
    def has_words_or_blocks(self) -> bool:
        """Whether anything in it is packed or per block."""
        return bool(self.packed or self.block_sizes)

    @functools.cached_property
    def layout(self) -> Layout:
        """The layout of its words and blocks; a scalar has none."""
        return layout_of(self.shape)

    def stored_shape(self, like: Operand | Result) -> tuple[int, ...]:
        """The shape of an operand or result of the leaf, or of one layer of it."""
        if like.bits is not None:
            return self.layout.words_shape(like.bits)
        if like.block_size is not None:
            return self.layout.blocks_shape(like.block_size)
        return tuple(1 if a in like.repeated else n for a, n in enumerate(self.shape))

    def unit(self, axis: int) -> int:
        """A shard's length along this axis must be a multiple of it."""
        if not self.has_words_or_blocks:
            return 1
        return self.layout.unit(axis, self.packed, max(self.block_sizes, default=None))

    @property
    def arrays(self) -> list[jax.Array]:
        """The operands' arrays."""
        return [operand.array for operand in self.operands]

    @property
    def packed(self) -> tuple[int, ...]:
        """Widths of the packed fields in it."""
        both = (*self.operands, *self.results)
        return tuple(sorted({x.bits for x in both if x.bits is not None}))

    @property
    def overwritten(self) -> frozenset[int]:
        """Numbers of the operands that are overwritten."""
        numbers = (result.overwrites for result in self.results)
        return frozenset(n for n in numbers if n is not None)

    @property
    def in_stacks(self) -> frozenset[int]:
        """Numbers of the operands that are stacks of layers."""
        return self.overwritten if self.stacked else frozenset()

    def with_arrays(self, arrays: Sequence) -> "Leaf":
        """The same leaf with other arrays, such as shards."""
        operands = tuple(
            dataclasses.replace(operand, array=array)
            for operand, array in zip(self.operands, arrays, strict=True)
        )
        return dataclasses.replace(self, operands=operands)


def has_tiling(packed: Sequence[int], block_sizes: Sequence[int]) -> bool:
    """Whether kernels can walk over leaves with such fields and blocks.

    A lane has the words of its fields. Where their period is longer than a tile, blocks
    must not be higher than one.
    """
    longest = max((period(bits)[0] for bits in packed), default=1)
    highest = max((block_shape(size)[0] for size in block_sizes), default=TILE_ROWS)
    return highest == TILE_ROWS or longest <= TILE_ROWS


@dataclasses.dataclass(frozen=True)
class Shard:
    """A leaf's part on one device.

    Args:
      leaf: with the arrays at hand; its ``shape`` is still the whole one.
      shape: of the part.
      base: uint32 scalar, index of its first element in the whole; None for 0.
    """

    leaf: Leaf
    shape: tuple[int, ...]
    base: jax.Array | None = None

    def after(self, first: jax.Array) -> "Shard":
        """The same of a leaf whose first element has this index."""
        base = first if self.base is None else self.base + first
        return dataclasses.replace(self, base=base)


@dataclasses.dataclass(frozen=True)
class Call:
    """What one kernel is asked to update: a leaf, a shard, a layer, or many leaves.

    Args:
      body: see :data:`Body`.
      shards: the arrays on this device, of leaves that can share a kernel.
      table: uint32, rows of scalars; or one row, for one leaf.
      rows: uint32 vector, each leaf's row of the table.
      layer: int32 vector of one element, which layer of the stacks; for one leaf.
      when: as of :class:`Scalars`.
      room: how many programs the whole leaves need, and how many a kernel over
        different leaves should have for them: as many as over other parts of these.
      interpret: run the kernel's operations with XLA, on any platform.
    """

    body: Body | BlockBody
    shards: Sequence[Shard]
    table: jax.Array
    rows: jax.Array | None = None
    layer: jax.Array | None = None
    when: int | None = None
    room: tuple[int, int] = (1, 1)
    interpret: bool = False


class Launcher(typing.Protocol):
    """What a launcher's module defines, for one of Pallas' backends."""

    def max_leaves(self, leaves: Sequence[Leaf]) -> int:
        """How many of these leaves a kernel should update at most."""
        ...

    def programs(self, leaves: Sequence[Leaf]) -> int:
        """How many programs a kernel over these leaves needs."""
        ...

    def groups(self, shards: Sequence[Shard]) -> list[list[int]]:
        """Which of these leaves, or shards of leaves, share a kernel, by number."""
        ...

    def update(self, call: Call) -> list[jax.Array]:
        """The results of a call's kernel, of one leaf after the other."""
        ...


def result_shapes(shard: Shard) -> list[tuple[int, ...]]:
    """The shapes of a shard's results, with which a launcher returns them."""
    leaf = shard.leaf
    return [
        _share(leaf.stored_shape(r), shard)
        if r.overwrites is None
        else leaf.operands[r.overwrites].array.shape
        for r in leaf.results
    ]


def _share(stored: tuple[int, ...], shard: Shard) -> tuple[int, ...]:
    """The shard's share of an array's shape."""
    return tuple(
        n * part // whole if whole else n
        for n, part, whole in zip(stored, shard.shape, shard.leaf.shape, strict=True)
    )


def manual_axes(result: Result, operands: Sequence[Operand]):
    """How a result varies over a ``jax.shard_map``'s mesh: like what it replaces."""
    if result.overwrites is not None:
        return jax.typeof(operands[result.overwrites].array).manual_axis_type
    types = [jax.typeof(o.array).manual_axis_type for o in operands]
    return max(types, key=lambda each: len(each.varying))
