"""The weight format of QuantizedTensors: dequantize, update and quantize again.

    theta_t = Q(theta_{t-1} + u_t),  u_t the update of the inner transformation

References:
  LPMM, Algorithm 1 and section 5.2, "Dynamic quantization".
"""

import dataclasses
import math
import typing

import jax

from lowbit_optax._arguments import check_choice
from lowbit_optax._numerics.landing import REPLACE, Landing
from lowbit_optax._numerics.linear_code import QuantizedFields
from lowbit_optax._numerics.random_bits import PARAM_STREAM
from lowbit_optax.formats import quantized_tensor as tensors
from lowbit_optax.formats.base import Rounding, WeightFormat
from lowbit_optax.formats.plain import Nearest


@dataclasses.dataclass(frozen=True)
class QuantizedWeights(WeightFormat):
    """Updates QuantizedTensors; see :func:`quantized_weights`."""

    rounding: Rounding = "stochastic"

    reads_stored_moments: typing.ClassVar[bool] = True  # LPMM, Algorithm 1, line 8

    def fields_of(self, param: tensors.QuantizedTensor) -> QuantizedFields:
        """Return the elementwise functions for a kernel that updates a leaf."""
        return QuantizedFields(param.bits, param.block_size, self.rounding)

    def spare_stream(self, dtype):
        return PARAM_STREAM if self.rounding == "stochastic" else None

    def for_leaf(self, shape, dtype, min_size):
        # With nearest rounding, a large array would silently lose small updates.
        if math.prod(shape) >= min_size:
            raise ValueError(
                f"arrays with {min_size} or more elements must be quantized or "
                f"float32, got {dtype}{list(shape)}; call lpmm.quantize_params on the "
                "float32 weights before tx.init"
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
    """Return the new QuantizedTensor, or the update to it, depending on ``landing``."""
    if landing.is_direct:
        return new
    # Integers wrap around, so adding their differences is exact.
    return jax.tree.map(lambda a, b: b - a, old, new)


def quantized_weights(*, rounding: Rounding = "stochastic") -> WeightFormat:
    """Update QuantizedTensors, and quantize the results again.

        theta' = Q(theta + u)

    The update u is computed from the rounded moments that are stored. ``lowbit`` uses
    this format for every :class:`.lpmm.QuantizedTensor` in the parameters. Pass it as
    ``weights`` to choose its rounding. Other leaves with fewer than 32 bits are then
    rounded to nearest.

    Args:
      rounding: ``"stochastic"``, with E[Q(x)] = x, or ``"nearest"``, which loses
        updates below half a step.

    Returns:
      A weight format. It needs no memory besides the codes and scales.

    Raises:
      ValueError: if ``rounding`` has another value.

    References:
      LPMM, Algorithm 1 and section 5.2, "Dynamic quantization".

    >>> quantized_weights(rounding="nearest")
    QuantizedWeights(rounding='nearest')
    """
    check_choice("quantized_weights", "rounding", rounding, Rounding)
    return QuantizedWeights(rounding)
