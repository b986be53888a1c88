"""How a kernel walks over a leaf: lanes side by side, rows one after the other.

A program of the kernel holds a vector of lanes and visits rows; on one row every lane
has one element. In the *grouped* view the rows run down the pack axis: a lane is one
group of 32 elements, so that a group's words belong to one lane, bit offsets are
static, and neighbouring lanes are neighbouring columns. In the *flat* view, for leaves
of which nothing is packed, rows and lanes are consecutive pieces of memory.

A group that is measured before it is written is visited twice, unless its new values
stay in registers. Those of 32 rows are too many for one thread. In the *split* view a
lane is a part of a group, and a program's lanes are an array [parts, width]: a group's
parts are above each other.

Offsets into arrays are int32, so an array has fewer than 2^31 elements. The *index* of
an element is its row-major place in the whole leaf, modulo 2^32. Where the array is a
shard, the whole's strides count, from the index of the shard's first element.
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
_ROWS_OF_PART = MAX_PERIOD
_WIDTH_OF_PARTS = 128  # a warp's, with four lanes a thread
# A part is a warp's, and a block has at most 1024 threads with 64 registers each; of
# 512 each has 128.
_MOST_PARTS = 16


@dataclasses.dataclass(frozen=True)
class View:
    """The lanes and rows of a leaf, or of a shard of it.

    Args:
      shape: of the array at hand.
      whole: shape of the leaf that it is a shard of.
      packed: widths of the packed fields, empty if nothing is packed.
      unsplit_width: lanes of a program, unless the view is split.
      group: elements of a group; None if nothing is packed or per group.
      measured: whether anything is per group.
    """

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    packed: tuple[int, ...]
    unsplit_width: int
    group: int | None = GROUP
    measured: bool = False

    @functools.cached_property
    def flat(self) -> bool:
        """Whether rows may be cut anywhere: nothing is in groups, and the shard is one
        piece of the whole.
        """
        return self.group is None and self.shape[1:] == self.whole[1:]

    @functools.cached_property
    def axis(self) -> int:
        return pack_axis(self.whole)

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
        """Parts of a group, 1 unless the view is split."""
        if not self.measured or not all(map(is_unrolled, self.packed)):
            return 1
        parts = self.group_rows // _ROWS_OF_PART
        return parts if parts <= _MOST_PARTS else 1

    @property
    def width(self) -> int:
        """Lanes side by side in a program."""
        return self.unsplit_width if self.parts == 1 else _WIDTH_OF_PARTS

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
    def chunk(self) -> int:
        """Rows that a loop's body unrolls; see :mod:`.words`."""
        if self.parts > 1:
            return self.rows
        unrolled = [period(bits)[0] for bits in self.packed if is_unrolled(bits)]
        return math.lcm(_MIN_CHUNK, *unrolled)

    def stride(self, axis: int) -> int:
        """The whole's row-major stride, modulo 2^32."""
        return math.prod(self.whole[axis + 1 :]) % 2**32


@dataclasses.dataclass(frozen=True)
class Lanes:
    """One program's lanes: where their rows and words are, and which of them exist.

    Args:
      view: static description.
      first: int32 vector, offset of row 0.
      index: uint32 vector, index of row 0.
      lane: int32 vector, the lane's number, which is its group's place in per-group
        arrays; None if flat, as all that follow.
      lead, column: int32 vectors, places along the axes before and after the pack axis.
      position: int32 vector, place of row 0 along the pack axis.
      inside: bool vector, or None where every lane exists.
    """

    view: View
    first: jax.Array
    index: jax.Array
    lane: jax.Array | None = None
    lead: jax.Array | None = None
    column: jax.Array | None = None
    position: jax.Array | None = None
    inside: jax.Array | None = None

    def offset(self, start: jax.Array, row: int) -> jax.Array:
        """Where the elements of the row ``start + row`` are."""
        view = self.view
        stride = view.width if view.flat else view.columns
        first = _bounded(self.first + start * jnp.int32(stride), view.size)
        return first + jnp.int32(row * stride)

    def word_offset(self, bits: int, start: jax.Array, word: int) -> jax.Array:
        """Where the lane's word ``start + word`` is, of fields of ``bits`` bits."""
        view = self.view
        words = math.ceil(view.length / GROUP) * bits
        row = self.lead * jnp.int32(words) + self._first_word(bits) + start
        first = row * jnp.int32(view.columns) + self.column
        if view.parts > 1:  # in a loop it would take registers
            first = _bounded(first, view.lanes * view.group_rows // GROUP * bits)
        return first + jnp.int32(word * view.columns)

    def has_word(self, bits: int, word: jax.Array) -> jax.Array | None:
        """Which lanes have this word; None if all have."""
        view = self.view
        words = math.ceil(view.length / GROUP)
        if view.groups * view.group_rows == words * GROUP:
            return self.inside
        there = self._first_word(bits) + word < jnp.int32(words * bits)
        return there if self.inside is None else there & self.inside

    def _first_word(self, bits: int) -> jax.Array:
        """Which of the words along the pack axis is the lane's first."""
        group = self.position >> jnp.int32(GROUP.bit_length() - 1)
        word = group * jnp.int32(bits)
        if self.view.parts == 1:
            return word
        row = self.position & jnp.int32(GROUP - 1)
        return word + (row * jnp.int32(bits) >> jnp.int32(5))

    def element(self, row: jax.Array) -> jax.Array:
        """The index of a row's elements."""
        view = self.view
        stride = view.width if view.flat else view.stride(view.axis)
        return self.index + row.astype(jnp.uint32) * jnp.uint32(stride)

    def exists(self, start: jax.Array, row: int) -> jax.Array | None:
        """Which lanes have an element on the row ``start + row``; None if all have."""
        view = self.view
        if view.flat:
            if view.size % (view.width * view.rows) == 0:
                return None
            return self.offset(start, row) < jnp.int32(view.size)
        if view.length % view.group_rows == 0:
            return self.inside
        short = self.position + (start + jnp.int32(row)) < jnp.int32(view.length)
        return short if self.inside is None else short & self.inside


def lanes_of(view: View, program: jax.Array, base: jax.Array) -> Lanes:
    """The lanes of one program.

    Args:
      view: of the array.
      program: int32 scalar, which program.
      base: uint32 scalar, index of the array's first element.
    """
    shape = view.lanes_shape
    start = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    if view.flat:
        first = program * jnp.int32(view.width * view.rows) + start
        return Lanes(view, first, first.astype(jnp.uint32) + base)
    lane = program * jnp.int32(view.width) + start
    inside = lane < jnp.int32(view.lanes) if view.lanes % view.width else None
    if view.parts == 1 or view.columns % view.width:
        column, group = _rem(lane, view.columns), _div(lane, view.columns)
    else:
        # The program's lanes are in one row of groups: its numbers are scalars.
        blocks = view.columns // view.width
        column = _rem(program, blocks) * jnp.int32(view.width) + start
        group = jnp.broadcast_to(_div(program, blocks), shape)
    in_axis, lead = _rem(group, view.groups), _div(group, view.groups)
    position = in_axis * jnp.int32(view.group_rows)
    if view.parts > 1:
        part = lax.broadcasted_iota(jnp.int32, shape, 0)
        position = position + part * jnp.int32(view.rows)
    first = (lead * jnp.int32(view.length) + position) * jnp.int32(view.columns)
    index = base + _index(view, lead, position, column)
    return Lanes(view, first + column, index, lane, lead, column, position, inside)


def _index(view: View, lead, position, column) -> jax.Array:
    """The index in the whole of coordinates in the shard, without the shard's base."""

    def part(axis, coordinate):
        return coordinate.astype(jnp.uint32) * jnp.uint32(view.stride(axis))

    total = part(view.axis, position)
    if view.axis + 1 < len(view.shape):
        total = total + part(view.axis + 1, column)
    for axis in range(view.axis - 1, -1, -1):
        size = view.shape[axis]
        total = total + part(axis, _rem(lead, size) if axis else lead)
        lead = _div(lead, size)
    return total


def _bounded(offset: jax.Array, size: int) -> jax.Array:
    """The offset, from which a compiler can tell that a sum with it does not wrap.

    Then the constant parts of offsets become those of instructions that load and store.
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
