"""The weight format of QuantizedTensors: dequantise, update and quantise again.

    theta_t = Q(theta_{t-1} + u_t),  u_t from the inner transformation

References:
  LPMM, Algorithm 1 and section 5.2, "Dynamic quantization".
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax import lax

from lowbit_optax._numerics import linear_code
from lowbit_optax._numerics.codes import float_of
from lowbit_optax._numerics.landing import REPLACE, Landing
from lowbit_optax._numerics.random_bits import PARAM_STREAM, RandomBits
from lowbit_optax.formats import quantized_tensor as tensors
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.plain import Nearest, NoResidual


@dataclasses.dataclass(frozen=True)
class QuantizedWeights(WeightFormat):
    """How QuantizedTensors are updated; see :func:`quantized_weights`."""

    container: typing.ClassVar[type] = NoResidual

    rounding: tensors.Rounding = "stochastic"

    def fields_of(self, param: tensors.QuantizedTensor) -> "QuantizedFields":
        """The functions by which a kernel updates a leaf."""
        return QuantizedFields(param.bits, param.block_size, self.rounding)

    def for_leaf(self, shape, dtype, min_size):
        # For arrays among the quantised leaves, which are small and mostly float32.
        return Nearest()

    def widen(self, param: typing.Any):
        return param.dequantize()

    def store(
        self, param: typing.Any, master, random, landing: Landing = REPLACE
    ) -> tuple[typing.Any, None, typing.Any]:
        random = random if self.rounding == "stochastic" else None
        new = tensors.requantize(master, param, random)
        return new, None, result_of(param, new, landing)


def result_of(
    old: tensors.QuantizedTensor, new: tensors.QuantizedTensor, landing: Landing
) -> tensors.QuantizedTensor:
    """What a step returns for a QuantizedTensor: the new one, or the update to it."""
    if landing.is_direct:
        return new
    # Differences modulo 2^32 always land exactly.
    return jax.tree.map(lambda a, b: b - a, old, new)


@dataclasses.dataclass(frozen=True)
class QuantizedFields:
    """The elementwise functions of a QuantizedTensor's fields, for a kernel.

    It computes what :func:`quantized_tensor.requantize` does::

        magnitude_key(x) --> maximum over the block --> delta_of, with the old scale
        prepare(scale) --> once per block, what encode and decode take

    Args:
      bits, block_size: of the QuantizedTensor.
      rounding: as for :func:`quantized_weights`.
    """

    bits: int
    block_size: int
    rounding: tensors.Rounding

    def magnitude_key(self, x: jax.Array) -> jax.Array:
        """See :func:`lowbit_optax._numerics.linear_code.magnitude_key`."""
        return linear_code.magnitude_key(x)

    def scale_of(self, key: jax.Array, old: jax.Array) -> jax.Array:
        """The uint32 scales of blocks, from the maxima of keys and the old scales."""
        maximum, delta = linear_code.magnitude_of(key), float_of(old)
        kept = linear_code.kept_delta(maximum, delta, self.bits)
        return lax.bitcast_convert_type(kept, jnp.uint32)

    def prepare(self, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What the fields of a block with a uint32 scale are encoded by."""
        return linear_code.prepare(float_of(scale))

    def encode(self, x: jax.Array, prepared, random: RandomBits) -> jax.Array:
        """The fields of float32 values."""
        words = None
        if self.rounding == "stochastic":
            words = random.words(x.shape, PARAM_STREAM)
        return linear_code.encode(x, prepared, self.bits, words)

    def decode(self, fields: jax.Array, prepared) -> jax.Array:
        """The float32 values of fields."""
        return linear_code.decode(fields, prepared, self.bits)


def quantized_weights(
    *, rounding: typing.Literal["nearest", "stochastic"] = "stochastic"
) -> WeightFormat:
    """Update :class:`lowbit_optax.QuantizedTensor` leaves by quantising them again.

        theta' = Q(theta + u)

    ``lowbit`` uses this format for the QuantizedTensors of any tree. Give it as
    ``weights`` to choose its rounding; other leaves are then rounded to nearest.

    Args:
      rounding: ``"stochastic"``, for which E[Q(x)] = x, or ``"nearest"``, which loses
        updates below half a step.

    Returns:
      A weight format. State: 0 bytes per parameter.

    Raises:
      ValueError: if ``rounding`` is not one of these.

    References:
      LPMM, Algorithm 1 and section 5.2, "Dynamic quantization".

    >>> quantized_weights(rounding="nearest")
    QuantizedWeights(rounding='nearest')
    """
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(
            f"quantized_weights: rounding is {rounding!r}, not 'nearest' or "
            "'stochastic'"
        )
    return QuantizedWeights(rounding)
