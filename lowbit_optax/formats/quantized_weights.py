"""The weight format of QuantizedTensors: dequantize, update and quantize again.

    theta_t = Q(theta_{t-1} + u_t),  u_t the update of the inner transformation

References:
  LPMM, Algorithm 1 and section 5.2, "Dynamic quantization". ECO, 2026 (arXiv
    2601.22101), for errors in the momentum.
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
from lowbit_optax.formats.plain import Nearest, check_field


@dataclasses.dataclass(frozen=True)
class QuantizedWeights(WeightFormat):
    """Updates QuantizedTensors; see :func:`quantized_weights`."""

    rounding: Rounding = "stochastic"
    # A field can override this property, because it is only read.
    error_feedback: str | None = None  # pyright: ignore[reportIncompatibleMethodOverride]

    @property
    def reads_stored_moments(self) -> bool:
        # LPMM, Algorithm 1, line 8. Errors enter a moment before it is stored.
        return self.error_feedback is None

    @property
    def stores_sum(self) -> bool:
        return self.error_feedback is None

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

    def advance(
        self,
        param: typing.Any,
        residual,
        update,
        random,
        landing: Landing = REPLACE,
        ahead=None,
    ) -> tuple[typing.Any, None, typing.Any]:
        master = self.sum(param, residual, update, random)
        return self.store(param, master, random, landing, ahead)

    def store(
        self,
        param: typing.Any,
        master,
        random,
        landing: Landing = REPLACE,
        ahead=None,
    ) -> tuple[typing.Any, None, typing.Any]:
        random = random if self.rounding == "stochastic" else None
        new = tensors.requantize(master, param, random, ahead)
        return new, None, result_of(param, new, landing)


def result_of(
    old: tensors.QuantizedTensor, new: tensors.QuantizedTensor, landing: Landing
) -> tensors.QuantizedTensor:
    """Return the new QuantizedTensor, or the update to it, depending on ``landing``."""
    if landing.is_direct:
        return new
    # Integers wrap around, so adding their differences is exact.
    return jax.tree.map(lambda a, b: b - a, old, new)


def quantized_weights(
    *, rounding: Rounding = "stochastic", error_feedback: str | None = None
) -> WeightFormat:
    """Update QuantizedTensors, and quantize the results again.

        theta' = Q(theta + u)

    The update u is computed from the rounded moments that are stored. ``lowbit`` uses
    this format for every :class:`.lpmm.QuantizedTensor` in the parameters. Pass it as
    ``weights`` to choose its rounding. Other leaves with fewer than 32 bits are then
    rounded to nearest if they have fewer than ``min_size`` elements, and refused
    otherwise.

    With ``error_feedback="mu"``, the rounding error is added to the first moment, as in
    :func:`lowbit_optax.stochastic_rounding`, and u is computed from the moments before
    they are rounded. QuantizedTensors also follow ``stochastic_rounding`` with this
    argument, so :func:`lowbit_optax.factored_adamw` with ``bits=0`` trains them.

    Args:
      rounding: ``"stochastic"``, with E[Q(x)] = x, or ``"nearest"``, which loses
        updates below half a step.
      error_feedback: the field of the inner state that receives the rounding error, or
        None; see :func:`lowbit_optax.stochastic_rounding`.

    Returns:
      A weight format. It needs no memory besides the codes and scales.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value.

    References:
      LPMM, Algorithm 1 and section 5.2, "Dynamic quantization". ECO, 2026 (arXiv
        2601.22101), for errors in the momentum.

    >>> quantized_weights(rounding="nearest")
    QuantizedWeights(rounding='nearest', error_feedback=None)
    """
    name = "quantized_weights"
    check_choice(name, "rounding", rounding, Rounding)
    check_field(name, error_feedback)
    return QuantizedWeights(rounding, error_feedback)
