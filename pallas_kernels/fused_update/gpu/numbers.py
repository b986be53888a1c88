"""The numbers of a leaf's shape that its kernel counts by.

They are constants where all leaves of a kernel are equal. Leaves of different shapes
share a kernel that reads each leaf's numbers from a table: nothing of a shape is then
left in its text, and XLA compiles equal texts once. No thread divides: a divisor comes
with the product and the shift by which compilers divide by constants.
"""

import dataclasses
import itertools
import typing
from collections.abc import Mapping, Sequence

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


Numbers = Mapping[str, typing.Any]
"""Scalars and divisors by name; see :meth:`.tiling.Tiling.numbers`."""


def constants(numbers: Mapping[str, Number]) -> Numbers:
    """The numbers of equal leaves as constants, with whose divisors compilers divide.

    Those above 2^31 - 1, such as indices, keep their 32 bits as int32.
    """
    found: dict[str, Scalar | Divisor] = {}
    for name, x in numbers.items():
        value = np.uint32(x.value).view(np.int32)
        found[name] = Divisor(value) if x.divides else value
    return found


@dataclasses.dataclass(frozen=True)
class Table:
    """The table from which a kernel's programs read which leaf is theirs.

    Args:
      kinds: the names of the numbers, what they are multiples of, and whether they
        divide.
      leaves: how many there are.
    """

    kinds: tuple[tuple[str, int, bool], ...]
    leaves: int

    @classmethod
    def of(cls, numbers: Sequence[Mapping[str, Number]]) -> "Table":
        """The table of leaves with these numbers, whose kinds are the same."""
        kinds = tuple((n, x.multiple, x.divides) for n, x in numbers[0].items())
        return cls(kinds, len(numbers))

    @staticmethod
    def words(
        numbers: Sequence[Mapping[str, Number]], programs: Sequence[int]
    ) -> jax.Array:
        """uint32: at which program each leaf ends, and then each leaf's numbers."""
        rows = [word for row in numbers for x in row.values() for word in x.words]
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
        width = sum(3 if divides else 1 for *_, divides in self.kinds)
        first = np.int32(self.leaves) + leaf * np.int32(width)
        words = (ref[first + np.int32(i)] for i in range(width))
        found = {}
        for name, multiple, divides in self.kinds:
            value = next(words).astype(jnp.int32) * np.int32(multiple)
            if divides:
                value = Divisor(value, (next(words), next(words)), instructions)
            found[name] = value
        return found
