"""The numbers of a leaf's shape that its kernel counts by.

They are constants where all leaves of a kernel are equal. Leaves of different shapes
share a kernel that reads each leaf's numbers from a table: nothing of a shape is then
left in its text, and XLA compiles equal texts once. No thread divides: a divisor comes
with the product and the shift by which compilers divide by constants.
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
      value: of it.
      multiple: what it is a multiple of in every leaf of the kernel, which the compiler
        then knows.
      divides: whether other numbers are divided by it.
    """

    value: int
    multiple: int = 1
    divides: bool = False

    @property
    def words(self) -> tuple[int, ...]:
        """What a table has of it."""
        word = self.value // self.multiple
        return (word, *_reciprocal(self.value)) if self.divides else (word,)


def _reciprocal(by: int) -> tuple[int, int]:
    """``(m, s)``: from 0 to 2^31 - 1, ``x // by`` is ``(2 * x * m >> 32) >> s``."""
    shift = (by - 1).bit_length()
    return -(-(2 ** (31 + shift)) // by), shift


@dataclasses.dataclass(frozen=True)
class Divisor:
    """A number by which arrays of int32, none of them negative, are divided.

    Args:
      by: the number.
      reciprocal: uint32 scalars, see :func:`_reciprocal`; None to divide by ``by``.
      instructions: of the launcher, if there is a reciprocal.
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
    """What the lanes of a flat tiling count by; see :class:`BlockNumbers`.

    Args:
      size: of the array; None where every lane has an element.
    """

    size: typing.Any


class SizeNumbers(typing.NamedTuple):
    """What lanes count blocks of one size by; see :class:`BlockNumbers`.

    Args:
      rows: of blocks of one matrix; None where nothing depends on them.
      blocks: of one piece of a row.
    """

    rows: typing.Any
    blocks: typing.Any


class BlockNumbers(typing.NamedTuple):
    """What the lanes of a tiling by blocks count by.

    Each field is a :class:`Number` of the leaf's shape, or what that is in a kernel: a
    scalar, or a :class:`Divisor`. It is None where there is nothing to count, so that
    kernels neither read nor compare it.

    Args:
      blocks: the largest blocks of one piece of a row.
      all_blocks: those of all pieces, steps and matrices; None where programs have as
        many blocks as they can hold.
      row_stride: elements from one row to the next; None for a folded vector.
      pieces: of a row; None for one.
      columns: of a piece; None where no lane needs them.
      steps: down one matrix; None where all matrices are one.
      lead_stride: elements from one matrix to the next, likewise.
      rows: of one matrix, or elements of a folded vector; None where the last step has
        all its rows.
      word_rows: rows of words of one matrix, by the width of the fields.
      by_size: what there is for each size of blocks.
      row_index, lead_index, piece_index: how far apart rows, matrices and pieces are in
        the leaf, modulo 2^32; None where offsets say it.
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
    """The numbers of equal leaves as constants, with whose divisors compilers divide.

    Those above 2^31 - 1, such as indices, keep their 32 bits as int32.
    """

    def constant(number: Number) -> Scalar | Divisor:
        value = np.uint32(number.value).view(np.int32)
        return Divisor(value) if number.divides else value

    return jax.tree.map(constant, numbers)


class Entry(typing.NamedTuple):
    """What a number of a table is for every leaf; see :class:`Number`."""

    multiple: int
    divides: bool


@dataclasses.dataclass(frozen=True)
class Table:
    """The table from which a kernel's programs read which leaf is theirs.

    Args:
      entries: what each leaf's numbers are, in their order.
      structure: the tree of a leaf's numbers.
      leaves: how many there are.
    """

    entries: tuple[Entry, ...]
    structure: typing.Any
    leaves: int

    @classmethod
    def of(cls, numbers: Sequence[Numbers]) -> "Table":
        """The table of leaves with these numbers, whose kinds are the same."""
        first, structure = jax.tree.flatten(numbers[0])
        entries = tuple(Entry(x.multiple, x.divides) for x in first)
        return cls(entries, structure, len(numbers))

    @staticmethod
    def words(numbers: Sequence[Numbers], programs: Sequence[int]) -> jax.Array:
        """uint32: at which program each leaf ends, and then each leaf's numbers."""
        rows = [word for x in jax.tree.leaves(list(numbers)) for word in x.words]
        words = [*itertools.accumulate(programs), *rows]
        # A custom_partitioning accepts no constants but scalars. XLA makes this one.
        return lax.concatenate([lax.full((1,), x, jnp.uint32) for x in words], 0)

    def find(self, ref, program: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """``(leaf, program, exists)`` of a program: its leaf, and its number there.

        Args:
          ref: to the words.
          program: int32 scalar, its number among all.
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
