"""A leaf's moments on the rows of a kernel, between float32 and what is stored."""

import dataclasses
import typing
from collections.abc import Mapping, Sequence

import jax

from lowbit_optax._numerics.codes import MultiplyAdd, Prepared
from lowbit_optax._numerics.random_bits import Draws
from lowbit_optax._numerics.relative import product, quotient
from lowbit_optax.formats.base import BlockMomentFormat, MomentFormat

MomentHow = tuple[MomentFormat, int] | None
"""A moment's format and number; None for a moment that is stored as it is."""


@dataclasses.dataclass(frozen=True)
class MomentCoder:
    """Decodes or encodes the moments of a leaf.

    Args:
      moments: per moment, how it is stored.
      relative: by the index of a moment, that of the one by whose root it is divided.
      prepared: by the indices of moments with scales, these, from :meth:`Code.prepare`.
      multiply_add: computes ``a * b + c`` of three arrays.
      draws: the random numbers; only encoding needs them.
    """

    moments: Sequence[MomentHow]
    relative: Mapping[int, int]
    prepared: Mapping[int, Prepared]
    multiply_add: MultiplyAdd
    draws: Draws | None = None

    def times(self, number: int, factor: float) -> "MomentCoder":
        """The same, by which a moment with scales is decoded times a factor."""
        how = typing.cast(tuple[BlockMomentFormat, int], self.moments[number])
        prepared = how[0].codec.times(self.prepared[number], factor)
        return dataclasses.replace(self, prepared={**self.prepared, number: prepared})

    def moments_of(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """All moments in float32, from what is stored."""
        decoded = [self.decoded(i, x) for i, x in enumerate(stored)]
        return [
            product(x, decoded[self.relative[i]]) if i in self.relative else x
            for i, x in enumerate(decoded)
        ]

    def all_of(self, moments: Sequence[jax.Array]) -> list[jax.Array]:
        """What is stored of all moments."""
        stored = [
            x if i in self.relative else self.encoded(i, x)
            for i, x in enumerate(moments)
        ]
        for i, j in self.relative.items():
            stored[i] = self.encoded(
                i, quotient(moments[i], self.decoded(j, stored[j]))
            )
        return stored

    def decoded(self, number: int, stored: jax.Array) -> jax.Array:
        """A moment, or its quotient if it is relative to another, from its fields."""
        how = self.moments[number]
        if how is None:
            return stored
        if number in self.prepared:
            codec = typing.cast(BlockMomentFormat, how[0]).codec
            return codec.decode_fields(stored, self.prepared[number], self.multiply_add)
        return how[0].decode(stored, stored.shape)

    def encoded(self, number: int, moment: jax.Array) -> jax.Array:
        """The fields of a moment, or of its quotient."""
        how, draws = self.moments[number], typing.cast(Draws, self.draws)
        if how is None:
            return moment
        if number in self.prepared:
            format_ = typing.cast(BlockMomentFormat, how[0])
            prepared = self.prepared[number]
            return format_.encode_fields(
                moment, prepared, draws, how[1], self.multiply_add
            )
        return how[0].encode(moment, draws, how[1])
