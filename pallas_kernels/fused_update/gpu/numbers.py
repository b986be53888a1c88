"""The sizes and strides of a leaf that its kernel needs, called *numbers* here.

They are constants if all leaves of a kernel have equal shapes. Leaves with different
shapes share a kernel that reads each leaf's numbers from a table. The text of such a
kernel does not depend on any shape, and XLA compiles kernels with equal texts once. For
each divisor, the table has a multiplier and a shift, so the kernel needs no division
instruction. Compilers use the same method to divide by constants.
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
    """A size or stride. Divisors are from 1 to 2^31 - 1, other numbers below 2^32.

    Args:
      value: the size or stride.
      multiple: a common divisor of this number in all leaves of the kernel. It is
        static, so the compiler can use it.
      divides: whether kernels divide by the number.
    """

    value: int
    multiple: int = 1
    divides: bool = False

    @property
    def words(self) -> tuple[int, ...]:
        """The words that store the number in a table."""
        word = self.value // self.multiple
        return (word, *_reciprocal(self.value)) if self.divides else (word,)


def _reciprocal(by: int) -> tuple[int, int]:
    """Return ``(m, s)`` with ``x // by == (2 * x * m >> 32) >> s`` if 0 <= x < 2^31."""
    shift = (by - 1).bit_length()
    return -(-(2 ** (31 + shift)) // by), shift


@dataclasses.dataclass(frozen=True)
class Divisor:
    """A divisor of non-negative int32 arrays.

    Args:
      by: the divisor.
      reciprocal: uint32 scalars, see :func:`_reciprocal`; None to divide by ``by``.
      instructions: the launcher's instructions, which the reciprocal needs.
    """

    by: Scalar
    reciprocal: tuple[jax.Array, jax.Array] | None = None
    instructions: Instructions | None = None

    def divide(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the quotient and the remainder."""
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


class SizeNumbers(typing.NamedTuple):
    """The numbers for blocks of one size; see :class:`BlockNumbers`.

    Args:
      rows: number of rows of blocks in a matrix; None if the kernel does not need it.
      blocks: number of blocks in a piece of a row.
    """

    rows: typing.Any
    blocks: typing.Any


class BlockNumbers(typing.NamedTuple):
    """The numbers of a :class:`.tiling.BlockTiling`, which defines steps and pieces.

    Each field is a :class:`Number` outside of kernels, and a scalar or a
    :class:`Divisor` in a kernel. Fields that a kernel does not need are None.

    Args:
      blocks: number of largest blocks in a piece of a row.
      all_blocks: number of largest blocks in the whole array; None if all programs have
        their full number of blocks.
      row_stride: distance between consecutive rows, in elements; None for a folded
        vector.
      pieces: number of pieces in a row; None if it is 1.
      columns: number of columns in a piece; None if no lane needs it.
      steps: number of steps in a matrix; None if all matrices count as one.
      lead_stride: distance between consecutive matrices, in elements; None if all
        matrices count as one.
      rows: number of rows in a matrix, or of elements in a folded vector; None if the
        last step has all its rows.
      word_rows: number of rows of words in a matrix, keyed by field width.
      by_size: :class:`SizeNumbers`, keyed by block size.
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


Numbers = Number | Scalar | None | BlockNumbers
"""The numbers of a leaf. In a flat tiling, this is the number of elements in the array,
or None if every lane has an element."""


def constants(numbers: Numbers) -> Numbers:
    """Return the sizes and strides of equal leaves as constants, for fast divisions.

    Numbers of 2^31 or more, such as indices, are reinterpreted as int32.
    """

    def constant(number: Number) -> Scalar | Divisor:
        value = np.uint32(number.value).view(np.int32)
        return Divisor(value) if number.divides else value

    return jax.tree.map(constant, numbers)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table with the numbers of several leaves, in which a program finds its leaf.

    Args:
      entries: for each number of a leaf, a :class:`Number` with value 0 that describes
        how the table stores it.
      structure: the tree structure of a leaf's numbers.
      leaves: the number of leaves.
    """

    entries: tuple[Number, ...]
    structure: typing.Any
    leaves: int

    @classmethod
    def of(cls, numbers: Sequence[Numbers]) -> "Table":
        """Return a table for leaves whose numbers have the same tree structure."""
        first, structure = jax.tree.flatten(numbers[0])
        entries = tuple(dataclasses.replace(x, value=0) for x in first)
        return cls(entries, structure, len(numbers))

    @staticmethod
    def words(numbers: Sequence[Numbers], programs: Sequence[int]) -> jax.Array:
        """Return the uint32 words of the table.

        They are the index at which each leaf's programs end, followed by all numbers.
        """
        rows = [word for x in jax.tree.leaves(list(numbers)) for word in x.words]
        words = [*itertools.accumulate(programs), *rows]
        # Functions with custom_partitioning only support scalar constants, so XLA
        # concatenates them.
        return lax.concatenate([lax.full((1,), x, jnp.uint32) for x in words], 0)

    def find(self, ref, program: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return ``(leaf, program, exists)``, with the program's index in its leaf.

        Args:
          ref: reference to the words of the table.
          program: int32 scalar, the index of the program in the kernel.
        """
        ends = [ref[np.int32(i)].astype(jnp.int32) for i in range(self.leaves)]
        leaf, first = jnp.int32(0), jnp.int32(0)
        for end in ends[:-1]:
            is_beyond = program >= end
            leaf = leaf + is_beyond.astype(jnp.int32)
            first = jnp.where(is_beyond, end, first)
        return leaf, program - first, program < ends[-1]

    def read(self, ref, leaf: jax.Array, instructions: Instructions | None) -> Numbers:
        """Read the numbers of a leaf from the table."""
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
