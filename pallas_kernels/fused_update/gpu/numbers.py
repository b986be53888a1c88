"""The numbers of a leaf's shape that its kernel needs, such as sizes and strides.

They are constants if all leaves of a kernel are equal. Leaves with different shapes
share a kernel that reads each leaf's numbers from a table. The text of such a kernel
does not depend on any shape, and XLA compiles equal texts once. The kernel does not
divide, because the table has a multiplier and a shift for each divisor, the ones that
compilers use to divide by a constant.
"""

import dataclasses
import itertools
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.gpu.instructions import Instructions

Scalar = jax.Array | np.int32


@dataclasses.dataclass(frozen=True)
class Number:
    """A number of a shape, from 0 to 2^32 - 1; a divisor is from 1 to 2^31 - 1.

    Args:
      value: the number.
      multiple: a common factor of this number in all leaves of the kernel. It is
        static, so that the compiler can use it.
      divides: whether kernels divide by the number.
    """

    value: int
    multiple: int = 1
    divides: bool = False

    @property
    def words(self) -> tuple[int, ...]:
        """The number's words in a table."""
        word = self.value // self.multiple
        return (word, *_reciprocal(self.value)) if self.divides else (word,)


def _reciprocal(by: int) -> tuple[int, int]:
    """``(m, s)``: ``x // by == (2 * x * m >> 32) >> s`` for x from 0 to 2^31 - 1."""
    shift = (by - 1).bit_length()
    return -(-(2 ** (31 + shift)) // by), shift


@dataclasses.dataclass(frozen=True)
class Divisor:
    """A number that divides arrays of non-negative int32.

    Args:
      by: the number.
      reciprocal: uint32 scalars, see :func:`_reciprocal`; None to divide by ``by``.
      instructions: the launcher's, needed if there is a reciprocal.
    """

    by: Scalar
    reciprocal: tuple[jax.Array, jax.Array] | None = None
    instructions: Instructions | None = None

    def divide(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The quotient and the remainder."""
        if not isinstance(self.by, jax.Array) and self.by == 1:
            return x, jnp.zeros_like(x)
        by = jnp.full_like(x, self.by)
        if self.reciprocal is None or self.instructions is None:
            return lax.div(x, by), lax.rem(x, by)
        multiplier, shift = (jnp.full_like(x, y, jnp.uint32) for y in self.reciprocal)
        twice = x.astype(jnp.uint32) << jnp.uint32(1)
        quotient = self.instructions.high_product(twice, multiplier) >> shift
        quotient = quotient.astype(jnp.int32)
        return quotient, x - quotient * by


class FlatNumbers(typing.NamedTuple):
    """The numbers of a flat tiling; see :class:`BlockNumbers`.

    Args:
      size: elements of the array; None if every lane has an element.
    """

    size: typing.Any


class SizeNumbers(typing.NamedTuple):
    """The numbers for blocks of one size; see :class:`BlockNumbers`.

    Args:
      rows: rows of blocks in one matrix; None if nothing depends on them.
      blocks: blocks in one piece of a row.
    """

    rows: typing.Any
    blocks: typing.Any


class BlockNumbers(typing.NamedTuple):
    """The numbers of a :class:`.tiling.BlockTiling`, which defines steps and pieces.

    Each field is a :class:`Number`; in a kernel, it is a scalar or a :class:`Divisor`.
    It is None if it is not needed, so that kernels neither read nor compare it.

    Args:
      blocks: largest blocks in one piece of a row.
      all_blocks: largest blocks in all pieces, steps and matrices; None if all programs
        have their full number of blocks.
      row_stride: elements from one row to the next; None for a folded vector.
      pieces: pieces in a row; None if there is one.
      columns: columns in a piece; None if no lane needs them.
      steps: steps in one matrix; None if all matrices count as one.
      lead_stride: elements from one matrix to the next; None if all matrices count as
        one.
      rows: rows in one matrix, or elements of a folded vector; None if the last step
        has all its rows.
      word_rows: rows of words in one matrix, for each width of fields.
      by_size: :class:`SizeNumbers` for each size of blocks.
      row_index, lead_index, piece_index: the distances between the indices of
        consecutive rows, matrices and pieces, modulo 2^32; None if indices follow from
        offsets.
    """

    blocks: typing.Any
    all_blocks: typing.Any
    row_stride: typing.Any
    pieces: typing.Any
    columns: typing.Any
    steps: typing.Any
    lead_stride: typing.Any
    rows: typing.Any
    word_rows: dict[int, typing.Any]
    by_size: dict[int, SizeNumbers]
    row_index: typing.Any
    lead_index: typing.Any
    piece_index: typing.Any


Numbers = FlatNumbers | BlockNumbers


def constants(numbers: Numbers) -> Numbers:
    """The numbers of equal leaves as constants, which speed up divisions.

    Numbers above 2^31 - 1, such as indices, keep their 32 bits as int32.
    """

    def constant(number: Number) -> Scalar | Divisor:
        value = np.uint32(number.value).view(np.int32)
        return Divisor(value) if number.divides else value

    return jax.tree.map(constant, numbers)


class Entry(typing.NamedTuple):
    """How a table stores a number of every leaf; see :class:`Number`."""

    multiple: int
    divides: bool


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of the leaves' numbers, in which a program finds its leaf.

    Args:
      entries: how the numbers of a leaf are stored, in their order.
      structure: the tree structure of a leaf's numbers.
      leaves: the number of leaves.
    """

    entries: tuple[Entry, ...]
    structure: typing.Any
    leaves: int

    @classmethod
    def of(cls, numbers: Sequence[Numbers]) -> "Table":
        """The table for leaves with these numbers, which have the same structure."""
        first, structure = jax.tree.flatten(numbers[0])
        entries = tuple(Entry(x.multiple, x.divides) for x in first)
        return cls(entries, structure, len(numbers))

    @staticmethod
    def words(numbers: Sequence[Numbers], programs: Sequence[int]) -> jax.Array:
        """uint32: the program at which each leaf ends, and then each leaf's numbers."""
        rows = [word for x in jax.tree.leaves(list(numbers)) for word in x.words]
        words = [*itertools.accumulate(programs), *rows]
        # A custom_partitioning only supports scalar constants. XLA joins them here.
        return lax.concatenate([lax.full((1,), x, jnp.uint32) for x in words], 0)

    def find(self, ref, program: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """``(leaf, program, exists)``: a program's leaf, its number there, and a flag.

        Args:
          ref: reference to the words.
          program: int32 scalar, the program's number in the kernel.
        """
        ends = [ref[np.int32(i)].astype(jnp.int32) for i in range(self.leaves)]
        leaf, first = jnp.int32(0), jnp.int32(0)
        for end in ends[:-1]:
            is_beyond = program >= end
            leaf = leaf + is_beyond.astype(jnp.int32)
            first = jnp.where(is_beyond, end, first)
        return leaf, program - first, program < ends[-1]

    def read(self, ref, leaf: jax.Array, instructions: Instructions | None) -> Numbers:
        """The numbers of a leaf."""
        width = sum(3 if entry.divides else 1 for entry in self.entries)
        first = np.int32(self.leaves) + leaf * np.int32(width)
        words = (ref[first + np.int32(i)] for i in range(width))
        found = []
        for entry in self.entries:
            value = next(words).astype(jnp.int32) * np.int32(entry.multiple)
            if entry.divides:
                value = Divisor(value, (next(words), next(words)), instructions)
            found.append(value)
        return jax.tree.unflatten(self.structure, found)
