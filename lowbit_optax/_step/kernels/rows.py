"""Convert rows of a leaf's weights and moments between float32 and storage.

:class:`.body.LeafBody` calls these methods with rows of a leaf's arrays.
"""

import dataclasses
import typing

import jax

from lowbit_optax._numerics.landing import Landing
from lowbit_optax._numerics.linear_code import QuantizedFields
from lowbit_optax._numerics.random_bits import Draws, RandomBits
from lowbit_optax._step.leaf import StoredLeaf
from lowbit_optax.formats.base import MomentFormat, WeightFormat
from lowbit_optax.formats.block_quantized import BlockQuantized
from lowbit_optax.formats.quantized_weights import QuantizedWeights


@dataclasses.dataclass(frozen=True)
class WeightRows:
    """How the weight of a leaf is stored.

    Args:
      format: the format for unpacked residuals; None for a leaf without a format and
        for a QuantizedTensor.
      quantized: functions that encode and decode the fields of a QuantizedTensor; None
        for other leaves.
      has_residual: whether the operands contain a residual after the parameter.
      spare_stream: see :class:`.StoredLeaf`.
    """

    format: WeightFormat | None
    quantized: QuantizedFields | None
    has_residual: bool
    spare_stream: int | None

    @classmethod
    def of(cls, leaf: StoredLeaf) -> "WeightRows":
        """Return how the weight of this leaf is stored."""
        if isinstance(leaf.format, QuantizedWeights):
            fields = leaf.format.fields_of(leaf.param)
            return cls(None, fields, False, leaf.spare_stream)
        format_ = leaf.format and leaf.format.on_fields()
        return cls(format_, None, leaf.residual is not None, leaf.spare_stream)

    @property
    def is_packed(self) -> bool:
        """Whether the parameter or the residual is packed."""
        return self.quantized is not None or bool(self.format and self.format.width)

    @property
    def has_scales(self) -> bool:
        """Whether each block is stored with a scale."""
        return self.quantized is not None

    @property
    def blocks(self) -> QuantizedFields:
        """The functions that encode and decode a weight with scales."""
        return typing.cast(QuantizedFields, self.quantized)

    def master(self, param: jax.Array, residual, prepared) -> jax.Array:
        """Return the float32 weight that the inner transformation sees.

        ``prepared`` contains the scales of a QuantizedTensor, from ``blocks.prepare``.
        """
        if self.quantized is not None:
            return self.quantized.decode(param, prepared)
        return self.format.inner_weight(param, residual) if self.format else param

    def stored(
        self,
        landing: Landing,
        result: jax.Array,
        param: jax.Array,
        residual,
        random: RandomBits,
        prepared,
        ahead: jax.Array | None,
    ) -> tuple[jax.Array, typing.Any]:
        """Return the new parameter and residual, from the result of the program.

        ``prepared`` contains the new scales of a QuantizedTensor. For ``ahead``, see
        :meth:`WeightFormat.advance`.
        """
        if self.quantized is not None:
            fields = self.quantized.encode(result, prepared, random)
            return fields, None
        if self.format is None:
            return result, residual
        if self.format.stores_sum:
            return self.format.store(param, result, random, landing)[:2]
        return self.format.advance(param, residual, result, random, landing, ahead)[:2]


@dataclasses.dataclass(frozen=True)
class MomentRows:
    """How a moment of a leaf is stored.

    Args:
      format: its format; None if it is not encoded.
      number: its index among the leaf's moments with a format.
    """

    format: MomentFormat | None = None
    number: int = 0

    @property
    def has_scales(self) -> bool:
        """Whether each block is stored with a scale."""
        return self.format is not None and self.format.has_scales

    @property
    def blocks(self) -> BlockQuantized:
        """The format of a moment with scales."""
        return typing.cast(BlockQuantized, self.format)

    def decoded(self, stored: jax.Array, prepared) -> jax.Array:
        """Return the float32 value of a moment.

        ``prepared`` contains its scales, from ``blocks.prepare``; None without scales.
        """
        if self.format is None:
            return stored
        if self.has_scales:
            return self.blocks.codec.decode_fields(stored, prepared)
        return self.format.decode(stored, stored.shape)

    def encoded(self, moment: jax.Array, prepared, draws: Draws) -> jax.Array:
        """Return the stored form of a moment."""
        if self.format is None:
            return moment
        if self.has_scales:
            return self.blocks.encode_fields(moment, prepared, draws, self.number)
        return self.format.encode(moment, draws, self.number)
