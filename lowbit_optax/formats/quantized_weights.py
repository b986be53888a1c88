"""The weight format of QuantizedTensors: dequantise, update and quantise again.

    theta_t = Q(theta_{t-1} + u_t),  u_t from the inner transformation

References:
  LPMM, Algorithm 1 and section 5.2, "Dynamic quantization".
"""

import dataclasses
import typing

import jax

from lowbit_optax._numerics.landing import REPLACE, Landing
from lowbit_optax.formats import quantized_tensor as tensors
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.plain import Nearest, NoResidual


@dataclasses.dataclass(frozen=True)
class QuantizedWeights(WeightFormat):
    """How QuantizedTensors are updated; see :func:`quantized_weights`."""

    container: typing.ClassVar[type] = NoResidual

    rounding: tensors.Rounding = "stochastic"

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
        if landing.is_direct:
            return new, None, new
        # Differences modulo 2^32 always land exactly.
        return new, None, jax.tree.map(lambda a, b: b - a, param, new)


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
