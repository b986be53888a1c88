"""The weight format of QuantizedTensors: dequantise, update, quantise with new steps.

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
        # Arrays beside the quantised leaves: small ones, mostly float32 already.
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
        # Integers modulo 2^32 always land.
        return new, None, jax.tree.map(lambda a, b: b - a, param, new)


def quantized_weights(
    *, rounding: typing.Literal["nearest", "stochastic"] = "stochastic"
) -> WeightFormat:
    """Update :class:`lowbit_optax.QuantizedTensor` leaves; other leaves to nearest.

    ``lowbit`` uses this format for the QuantizedTensors of any tree; give it as
    ``weights`` to choose its rounding.

    Args:
      rounding: ``"stochastic"``, with E[Q(x)] = x, or ``"nearest"``, under which
        updates below half a step are lost.

    Returns:
      A weight format. State: 0 bytes, the parameter is all there is.

    Raises:
      ValueError: if ``rounding`` is not one of these.

    >>> quantized_weights(rounding="nearest")
    QuantizedWeights(rounding='nearest')
    """
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(
            f"quantized_weights: rounding is {rounding!r}, not 'nearest' or "
            "'stochastic'"
        )
    return QuantizedWeights(rounding)
