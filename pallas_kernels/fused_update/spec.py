"""The description of a fused update, and the interface of launchers.

A :class:`Leaf` has operands to read and results to write. A :data:`Body` or a
:class:`BlockBody` computes the results. A :class:`KernelCall` combines a body with the
shards of leaves on one device, and a :class:`Launcher` runs it as one kernel.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from pallas_kernels.layout import TILE_ROWS, Layout, block_shape, layout_of, period

MAX_ELEMENTS_OF_SMALL_LEAF = 4 * 4096
"""Largest size of a leaf without words and blocks that counts as small."""

Body = Callable[
    [Sequence[jax.Array], Sequence[jax.Array], jax.Array | None],
    Sequence[jax.Array],
]
"""Elementwise function ``body(values, scalars, index) -> results``.

``values`` has one array per operand. A plain operand's array contains elements in the
dtype of the operand, and a packed operand's array contains fields in uint32. All arrays
have the same shape, which the implementation chooses. ``scalars`` are uint32 scalars.
``index`` contains the row-major indices of the elements in the leaf as uint32, or is
None if the values are the whole leaf. Bodies may use the functions in
:mod:`pallas_kernels.operations`, which kernels compute with fewer instructions.

A body may have an attribute ``differentiable``, an equivalent body with derivative
rules (``jax.custom_jvp``). XLA runs the equivalent body instead, and JAX differentiates
it if the kernel is differentiated. Kernels cannot contain such rules. It may also have
an attribute ``in_parts``, an equivalent body for parts of a leaf on a CPU. The results
of its ``before`` and ``after`` for each element are one tree per per-block operand.
"""


class BlockBody(typing.Protocol):
    """Body of an update with per-block operands or results, such as scales.

    An update has two steps. First, :meth:`statistics` returns values for each element,
    and the implementation computes their maximum over each block. Then, :meth:`after`
    computes the per-block results from the maxima, and :meth:`__call__` computes the
    results for each element. If some maxima depend on other maxima, :meth:`statistics`
    returns only the values for the first maxima. The implementation calls :meth:`after`
    with all maxima that are known, and :meth:`statistics` again with the result as an
    additional argument, until all maxima are known.

    Per-block values have one element per block, or are repeated for each element of the
    block, and the body must work with both. Therefore, only :meth:`statistics` and
    :meth:`__call__` may combine values of blocks that have different sizes. If both
    compute the same expression from the same values, a kernel computes it once.
    """

    block_sizes: Sequence[int]
    """The size of the blocks for each maximum."""

    @property
    def kept(self) -> int:
        """Number of values that are kept for each element until the maxima are known.

        Launchers use it to choose the number of registers of a thread.
        """
        ...

    def before(self, block_values: Sequence[jax.Array]) -> tuple:
        """Return a tuple of values for decoding, computed from per-block operands."""
        ...

    def statistics(self, values, scalars, index, before, /) -> Sequence[jax.Array]:
        """Return an int32 array for each maximum; negative values count as 0."""
        ...

    def after(
        self,
        maxima: Sequence[jax.Array],
        block_values: Sequence[jax.Array],
    ) -> tuple[Sequence[jax.Array], tuple]:
        """Return the per-block results, and a tuple of values for encoding."""
        ...

    def __call__(self, values, scalars, index, before, after, /) -> Sequence[jax.Array]:
        """Return the results for each element, like a :data:`Body`."""
        ...


_STATIC: typing.Any = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operand:
    """An array that an update reads.

    Args:
      array: an array of the leaf's shape, or the leaf's uint32 words, or an array with
        one element per block.
      bits: width of the packed fields; None for a plain array.
      block_size: number of elements in a block, for an array with one element per
        block.
      repeated: axes along which a plain array has only one element, which is used for
        all elements of the leaf along these axes.
    """

    array: jax.Array
    bits: int | None = dataclasses.field(default=None, metadata=_STATIC)
    block_size: int | None = dataclasses.field(default=None, metadata=_STATIC)
    repeated: tuple[int, ...] = dataclasses.field(default=(), metadata=_STATIC)


@dataclasses.dataclass(frozen=True)
class Result:
    """An array that an update writes.

    Args:
      dtype: dtype of a plain array; uint32 for packed fields, and uint8 for a bitmap.
      bits: width of the packed fields; None for a plain array. A bitmap of fields 0 and
        1 has 4 bits here, because 8 rows share a byte, like a word of 4-bit fields.
      overwrites: index of the operand that the result replaces, which must have the
        same dtype and bits; None for a new array.
      block_size: see :class:`Operand`.
    """

    dtype: typing.Any
    bits: int | None = None
    overwrites: int | None = None
    block_size: int | None = None
    repeated: typing.ClassVar[tuple[int, ...]] = ()

    def __post_init__(self):
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    @property
    def is_bitmap(self) -> bool:
        """Whether 8 rows of fields 0 and 1 share a byte."""
        return self.bits is not None and self.dtype == np.uint8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scalars:
    """Scalars of the updates of one or more leaves.

    Args:
      table: uint32 vector of the body's scalars, or a table with one such row per leaf.
      rows: uint32 vector with the index of each leaf's row in the table, or one index
        for a single leaf. None if the table is a vector.
      values: the last scalars of every row, in other dtypes that the body also accepts.
        Kernels read the table instead. Derivatives are with respect to ``values``.
      when: index of a scalar that can switch the update off. If the scalar is 0,
        operands that are overwritten keep their values, and new arrays are undefined.
    """

    table: jax.Array
    rows: typing.Any = None
    values: Sequence[jax.Array] = ()
    when: int | None = dataclasses.field(default=None, metadata=_STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf, or a layer of a stack of leaves, with its operands and results.

    As a pytree, it contains the arrays of its operands.

    Args:
      operands, results: the arrays that the update reads and writes.
      shape: shape of the whole leaf, or of one layer if results are written to stacks.
      stacked: whether the operands that are overwritten are stacks with a leading axis
        of layers. The update writes one layer.
      sharding: sharding of the leaf or layer on a mesh with automatic axes, if the user
        passed it.
    """

    operands: tuple[Operand, ...]
    results: tuple[Result, ...] = dataclasses.field(metadata=_STATIC)
    shape: tuple[int, ...] = dataclasses.field(metadata=_STATIC)
    stacked: bool = dataclasses.field(default=False, metadata=_STATIC)
    sharding: NamedSharding | None = dataclasses.field(default=None, metadata=_STATIC)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """The block sizes of all operands and results with one element per block."""
        both = (*self.operands, *self.results)
        return tuple(sorted({x.block_size for x in both if x.block_size is not None}))

    @property
    def has_words_or_blocks(self) -> bool:
        """Whether an operand or result is packed or per block."""
        return bool(self.packed or self.block_sizes)

    @functools.cached_property
    def layout(self) -> Layout:
        """The layout of words and blocks, which is undefined for scalars."""
        return layout_of(self.shape)

    def stored_shape(self, like: Operand | Result) -> tuple[int, ...]:
        """Return the shape of an operand or result of the leaf, or of one layer."""
        if like.bits is not None:
            return self.layout.words_shape(like.bits)
        if like.block_size is not None:
            return self.layout.blocks_shape(like.block_size)
        return tuple(1 if a in like.repeated else n for a, n in enumerate(self.shape))

    def unit(self, axis: int) -> int:
        """Return the number that must divide a shard's length along this axis."""
        if not self.has_words_or_blocks:
            return 1
        return self.layout.unit(axis, self.packed, max(self.block_sizes, default=None))

    @property
    def arrays(self) -> list[jax.Array]:
        """The arrays of the operands."""
        return [operand.array for operand in self.operands]

    @property
    def packed(self) -> tuple[int, ...]:
        """The widths of all packed fields."""
        both = (*self.operands, *self.results)
        return tuple(sorted({x.bits for x in both if x.bits is not None}))

    @property
    def overwritten(self) -> frozenset[int]:
        """The indices of the operands that are overwritten."""
        numbers = (result.overwrites for result in self.results)
        return frozenset(n for n in numbers if n is not None)

    @property
    def in_stacks(self) -> frozenset[int]:
        """The indices of the operands that are stacks of layers."""
        return self.overwritten if self.stacked else frozenset()

    def with_arrays(self, arrays: Sequence) -> "Leaf":
        """Return the leaf with other arrays, such as shards."""
        operands = tuple(
            dataclasses.replace(operand, array=array)
            for operand, array in zip(self.operands, arrays, strict=True)
        )
        return dataclasses.replace(self, operands=operands)


def has_tiling(packed: Sequence[int], block_sizes: Sequence[int]) -> bool:
    """Return whether GPU kernels support these fields and blocks in one leaf.

    Each lane processes all fields of whole words. If the period of the fields has more
    rows than a tile, blocks must not have more rows than a tile.
    """
    longest = max((period(bits)[0] for bits in packed), default=1)
    highest = max((block_shape(size)[0] for size in block_sizes), default=TILE_ROWS)
    return highest == TILE_ROWS or longest <= TILE_ROWS


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of a leaf on one device.

    Args:
      leaf: the leaf with its local arrays, and with the shape of the whole leaf.
      shape: shape of the part.
      base: uint32 scalar, the index of the part's first element in the whole leaf; 0 if
        None.
    """

    leaf: Leaf
    shape: tuple[int, ...]
    base: jax.Array | None = None

    def after(self, first: jax.Array) -> "Shard":
        """Return the shard for a leaf whose first element has the index ``first``."""
        base = first if self.base is None else self.base + first
        return dataclasses.replace(self, base=base)


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """The arguments of one kernel, which updates one shard or layer, or many leaves.

    Args:
      body: see :data:`Body`.
      shards: local arrays of leaves that can share a kernel.
      scalars: see :class:`Scalars`, without ``values``.
      layer: int32 vector with one element, the index of the layer to update in stacks.
      room: number of programs that the whole leaves need, and number of programs that a
        kernel over different leaves should have. Kernels with equal numbers of programs
        can be compiled once.
      interpret: if True, XLA runs the kernel's operations, on any platform.
    """

    body: Body | BlockBody
    shards: Sequence[Shard]
    scalars: Scalars
    layer: jax.Array | None = None
    room: tuple[int, int] = (1, 1)
    interpret: bool = False


class Launcher(typing.Protocol):
    """The functions of a launcher, a module that runs kernels of one Pallas backend."""

    def parts(self, leaves: Sequence[Leaf]) -> list[tuple[list[int], tuple[int, int]]]:
        """Return the indices of the leaves for each kernel, and ``KernelCall.room``.

        The leaves have the same kinds of operands and results, and are sorted by size.
        """
        ...

    def groups(self, shards: Sequence[Shard]) -> list[list[int]]:
        """Return the indices of the leaves or shards that share each kernel."""
        ...

    def update(self, call: KernelCall) -> list[jax.Array]:
        """Run a kernel and return the results of all leaves in one list."""
        ...


def result_shapes(shard: Shard) -> list[tuple[int, ...]]:
    """Return the shapes of a shard's results, in the order of ``leaf.results``.

    A result that overwrites an operand has the shape of that operand, which may be a
    stack. Other results have the shape of the shard, in words or blocks if they are
    stored so.
    """
    leaf = shard.leaf
    return [
        _share(leaf.stored_shape(r), shard)
        if r.overwrites is None
        else leaf.operands[r.overwrites].array.shape
        for r in leaf.results
    ]


def shaped(written: Sequence[jax.Array], shards: Sequence[Shard]) -> list[jax.Array]:
    """Return the results, reshaped to the shapes of the leaves' arrays."""
    shapes = [shape for shard in shards for shape in result_shapes(shard)]
    return [x.reshape(shape) for x, shape in zip(written, shapes, strict=True)]


def _share(stored: tuple[int, ...], shard: Shard) -> tuple[int, ...]:
    """Returns the shape of a shard's part of an array that has shape ``stored``."""
    return tuple(
        n * part // whole if whole else n
        for n, part, whole in zip(stored, shard.shape, shard.leaf.shape, strict=True)
    )


def manual_axes(result: Result, operands: Sequence[Operand]):
    """Return how a result varies over the mesh of a ``jax.shard_map``."""
    if result.overwrites is not None:
        return jax.typeof(operands[result.overwrites].array).manual_axis_type
    types = [jax.typeof(o.array).manual_axis_type for o in operands]
    return max(types, key=lambda each: len(each.varying))
