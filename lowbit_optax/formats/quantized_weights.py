"""The weight format of QuantizedTensors: dequantise, update and quantise again.

    theta_t = Q(theta_{t-1} + u_t),  u_t from the inner transformation

References:
  LPMM, Algorithm 1 and section 5.2, "Dynamic quantization".
"""

import dataclasses
import math
import typing

import jax

from lowbit_optax._numerics.landing import REPLACE, Landing
from lowbit_optax._numerics.random_bits import PARAM_STREAM
from lowbit_optax.formats import quantized_tensor as tensors
from lowbit_optax.formats.base import Rounding, WeightFormat, check_rounding
from lowbit_optax.formats.plain import Nearest
from lowbit_optax.formats.quantized_tensor import QuantizedFields


@dataclasses.dataclass(frozen=True)
class QuantizedWeights(WeightFormat):
    """How QuantizedTensors are updated; see :func:`quantized_weights`."""

    rounding: Rounding = "stochastic"

    reads_stored_moments: typing.ClassVar[bool] = True  # LPMM, Algorithm 1, line 8

    def fields_of(self, param: tensors.QuantizedTensor) -> QuantizedFields:
        """The elementwise functions with which a kernel updates a leaf."""
        return QuantizedFields(param.bits, param.block_size, self.rounding)

    def spare_stream(self, dtype):
        return PARAM_STREAM if self.rounding == "stochastic" else None

    def for_leaf(self, shape, dtype, min_size):
        # Rounded to nearest, a large array would silently lose its small updates.
        if math.prod(shape) >= min_size:
            raise ValueError(
                f"it is {dtype}{list(shape)}, but arrays of {min_size} elements or "
                "more must be quantised or float32; call "
                "lowbit_optax.lpmm.quantize_params(params, bits=12) on the float32 "
                "weights before tx.init"
            )
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


def quantized_weights(*, rounding: Rounding = "stochastic") -> WeightFormat:
    """Update leaves of :class:`.lpmm.QuantizedTensor` by quantising them again.

        theta' = Q(theta + u)

    The update u is computed from the rounded moments that are stored.

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
    check_rounding("quantized_weights: rounding", rounding)
    return QuantizedWeights(rounding)
