"""How a kernel walks over a leaf: lanes side by side, rows one after the other.

A program of the kernel holds a vector of lanes and visits rows; on one row every lane
has one element. There are three tilings:

- *Grouped*: rows run down the pack axis. A lane is one group, so that a group's words
  belong to one lane, bit offsets are static, and neighbouring lanes are neighbouring
  columns.
- *Flat*, for leaves of which nothing is packed: a row is consecutive in memory.
- *Split*, for groups of which a maximum is taken before they are written. Such a group
  is read twice, unless its new values stay in registers, and 32 of them are too many
  for one thread. So a lane is a part of a group, and a program's lanes are an array
  [parts, width]: the parts of a group are above each other.

Offsets into arrays are int32, so an array has fewer than 2^31 elements. The *index* of
an element is its row-major place in the leaf, modulo 2^32. For a shard it is counted by
the leaf's strides from the index of the shard's first element.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bitfields.fields import GROUP, period
from pallas_kernels.bitfields.xla import pack_axis
from pallas_kernels.fused_update.words import MAX_PERIOD, is_unrolled

MAX_ELEMENTS = 2**31 - 1
_MIN_CHUNK = 4
_FLAT_ROWS = 4
_PART_ROWS = MAX_PERIOD
_SPLIT_WIDTH = 128  # one warp's, with four lanes per thread
# Each part takes a warp. A block of 512 threads leaves 128 registers to each of them; a
# block of 1024 leaves only 64.
_MAX_PARTS = 16


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The lanes and rows of a leaf, or of a shard of it.

    Args:
      shape: of the array on this device.
      leaf_shape: shape of the leaf that it is a shard of.
      packed: widths of the packed fields, empty if nothing is packed.
      unsplit_width: lanes of a program, unless the tiling is split.
      group: elements of a group; None if nothing is packed or per group.
      per_group: whether anything has one element per group.
    """

    shape: tuple[int, ...]
    leaf_shape: tuple[int, ...]
    packed: tuple[int, ...]
    unsplit_width: int
    group: int | None = GROUP
    per_group: bool = False

    @functools.cached_property
    def flat(self) -> bool:
        """Whether a row may be any piece of memory: nothing is in groups, and the shard
        is consecutive in the leaf.
        """
        return self.group is None and self.shape[1:] == self.leaf_shape[1:]

    @functools.cached_property
    def axis(self) -> int:
        return pack_axis(self.leaf_shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def length(self) -> int:
        """Elements along the pack axis."""
        return self.shape[self.axis]

    @property
    def groups(self) -> int:
        return math.ceil(self.length / self.group_rows)

    @property
    def columns(self) -> int:
        return math.prod(self.shape[self.axis + 1 :])

    @property
    def lanes(self) -> int:
        if self.flat:
            return math.ceil(self.size / _FLAT_ROWS)
        return math.prod(self.shape[: self.axis]) * self.groups * self.columns

    @property
    def programs(self) -> int:
        return math.ceil(self.lanes / self.width)

    @functools.cached_property
    def parts(self) -> int:
        """Parts of a group, 1 unless the tiling is split."""
        if not self.per_group or not all(map(is_unrolled, self.packed)):
            return 1
        parts = self.group_rows // _PART_ROWS
        return parts if parts <= _MAX_PARTS else 1

    @property
    def width(self) -> int:
        """Lanes side by side in a program."""
        return self.unsplit_width if self.parts == 1 else _SPLIT_WIDTH

    @property
    def lanes_shape(self) -> tuple[int, ...]:
        return (self.width,) if self.parts == 1 else (self.parts, self.width)

    @property
    def group_rows(self) -> int:
        return self.group or GROUP

    @property
    def rows(self) -> int:
        """Rows of a lane."""
        return _FLAT_ROWS if self.flat else self.group_rows // self.parts

    @functools.cached_property
    def chunk_rows(self) -> int:
        """Rows that a loop's body unrolls; see :mod:`.words`."""
        if self.parts > 1:
            return self.rows
        unrolled = [period(bits)[0] for bits in self.packed if is_unrolled(bits)]
        return math.lcm(_MIN_CHUNK, *unrolled)

    def stride(self, axis: int) -> int:
        """The row-major stride of an axis in the leaf, modulo 2^32."""
        return math.prod(self.leaf_shape[axis + 1 :]) % 2**32


@dataclasses.dataclass(frozen=True)
class Lanes:
    """One program's lanes: where their rows and words are, and which of them exist.

    Args:
      tiling: static description.
      first: int32 vector, offset of row 0.
      index: uint32 vector, index of row 0.
      lane: int32 vector, the lane's number, which is its group's place in per-group
        arrays; None if flat, as all that follow.
      lead, column: int32 vectors, places along the axes before and after the pack axis.
      position: int32 vector, place of row 0 along the pack axis.
      inside: bool vector, or None where every lane exists.
    """

    tiling: Tiling
    first: jax.Array
    index: jax.Array
    lane: jax.Array | None = None
    lead: jax.Array | None = None
    column: jax.Array | None = None
    position: jax.Array | None = None
    inside: jax.Array | None = None

    def offset(self, start: jax.Array, row: int) -> jax.Array:
        """Where the elements of the row ``start + row`` are."""
        tiling = self.tiling
        stride = tiling.width if tiling.flat else tiling.columns
        first = _bounded(self.first + start * jnp.int32(stride), tiling.size)
        return first + jnp.int32(row * stride)

    def word_offset(self, bits: int, start: jax.Array, word: int) -> jax.Array:
        """Where the lane's word ``start + word`` is, of fields of ``bits`` bits."""
        tiling = self.tiling
        words = math.ceil(tiling.length / GROUP) * bits
        row = self.lead * jnp.int32(words) + self._first_word(bits) + start
        first = row * jnp.int32(tiling.columns) + self.column
        if tiling.parts > 1:  # in a loop it would take registers
            first = _bounded(first, tiling.lanes * tiling.group_rows // GROUP * bits)
        return first + jnp.int32(word * tiling.columns)

    def has_word(self, bits: int, word: jax.Array) -> jax.Array | None:
        """Which lanes have this word; None if all have."""
        tiling = self.tiling
        words = math.ceil(tiling.length / GROUP)
        if tiling.groups * tiling.group_rows == words * GROUP:
            return self.inside
        there = self._first_word(bits) + word < jnp.int32(words * bits)
        return there if self.inside is None else there & self.inside

    def _first_word(self, bits: int) -> jax.Array:
        """Which of the words along the pack axis is the lane's first."""
        group = self.position >> jnp.int32(GROUP.bit_length() - 1)
        word = group * jnp.int32(bits)
        if self.tiling.parts == 1:
            return word
        row = self.position & jnp.int32(GROUP - 1)
        return word + (row * jnp.int32(bits) >> jnp.int32(5))

    def element(self, row: jax.Array) -> jax.Array:
        """The index of a row's elements."""
        tiling = self.tiling
        stride = tiling.width if tiling.flat else tiling.stride(tiling.axis)
        return self.index + row.astype(jnp.uint32) * jnp.uint32(stride)

    def exists(self, start: jax.Array, row: int) -> jax.Array | None:
        """Which lanes have an element on the row ``start + row``; None if all have."""
        tiling = self.tiling
        if tiling.flat:
            if tiling.size % (tiling.width * tiling.rows) == 0:
                return None
            return self.offset(start, row) < jnp.int32(tiling.size)
        if tiling.length % tiling.group_rows == 0:
            return self.inside
        short = self.position + (start + jnp.int32(row)) < jnp.int32(tiling.length)
        return short if self.inside is None else short & self.inside


def lanes_of(tiling: Tiling, program: jax.Array, base: jax.Array) -> Lanes:
    """The lanes of one program.

    Args:
      tiling: of the array.
      program: int32 scalar, which program.
      base: uint32 scalar, index of the array's first element.
    """
    shape = tiling.lanes_shape
    start = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    if tiling.flat:
        first = program * jnp.int32(tiling.width * tiling.rows) + start
        return Lanes(tiling, first, first.astype(jnp.uint32) + base)
    lane = program * jnp.int32(tiling.width) + start
    inside = lane < jnp.int32(tiling.lanes) if tiling.lanes % tiling.width else None
    if tiling.parts == 1 or tiling.columns % tiling.width:
        column, group = _rem(lane, tiling.columns), _div(lane, tiling.columns)
    else:
        # The program's lanes are in one row of groups: its numbers are scalars.
        blocks = tiling.columns // tiling.width
        column = _rem(program, blocks) * jnp.int32(tiling.width) + start
        group = jnp.broadcast_to(_div(program, blocks), shape)
    in_axis, lead = _rem(group, tiling.groups), _div(group, tiling.groups)
    position = in_axis * jnp.int32(tiling.group_rows)
    if tiling.parts > 1:
        part = lax.broadcasted_iota(jnp.int32, shape, 0)
        position = position + part * jnp.int32(tiling.rows)
    first = (lead * jnp.int32(tiling.length) + position) * jnp.int32(tiling.columns)
    index = base + _index(tiling, lead, position, column)
    return Lanes(tiling, first + column, index, lane, lead, column, position, inside)


def _index(tiling: Tiling, lead, position, column) -> jax.Array:
    """The index in the leaf, from the shard's first element, of places in the shard."""

    def part(axis, coordinate):
        return coordinate.astype(jnp.uint32) * jnp.uint32(tiling.stride(axis))

    total = part(tiling.axis, position)
    if tiling.axis + 1 < len(tiling.shape):
        total = total + part(tiling.axis + 1, column)
    for axis in range(tiling.axis - 1, -1, -1):
        size = tiling.shape[axis]
        total = total + part(axis, _rem(lead, size) if axis else lead)
        lead = _div(lead, size)
    return total


def _bounded(offset: jax.Array, size: int) -> jax.Array:
    """The same offset, known to the compiler to be below 2^30.

    A constant that is added to it then cannot wrap around, and becomes a part of the
    instructions that load and store.
    """
    if size > 2**30:
        return offset
    return lax.rem(
        offset.astype(jnp.uint32), jnp.full(offset.shape, 2**30, jnp.uint32)
    ).astype(jnp.int32)


def _div(x: jax.Array, by: int) -> jax.Array:
    return x if by == 1 else lax.div(x, jnp.full_like(x, by))


def _rem(x: jax.Array, by: int) -> jax.Array:
    return jnp.zeros_like(x) if by == 1 else lax.rem(x, jnp.full_like(x, by))
