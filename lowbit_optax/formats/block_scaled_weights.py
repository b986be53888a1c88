"""Weight formats that apply a format of float8 weights to BlockScaledTensors.

    e from the new master's blocks,    master / 2^e --split--> codes, residual
    (codes, residual) --join--> master / 2^e

The quotients are exact. Therefore, residuals are in units of the scale, and everything
that is exact for float8_e4m3fn is exact for BlockScaledTensors too.
"""

import dataclasses
import typing

from lowbit_optax._numerics.landing import REPLACE, Landing
from lowbit_optax.formats import block_scaled_tensor as tensors
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.block_scaled_tensor import E4M3, BlockScaledTensor
from lowbit_optax.formats.kahan import KahanFormat
from lowbit_optax.formats.plain import Nearest, StochasticRounding
from lowbit_optax.formats.quantized_weights import QuantizedWeights, result_of


@dataclasses.dataclass(frozen=True)
class BlockScaledWeights(WeightFormat):
    """Updates BlockScaledTensors.

    Args:
      format: a weight format for float8_e4m3fn.
      axis: the axis of the blocks.
    """

    format: WeightFormat
    axis: int

    @property
    def residual_name(self):
        return self.format.residual_name

    @property
    def stores_sum(self) -> bool:
        return self.format.stores_sum

    @property
    def error_feedback(self):
        return self.format.error_feedback

    def sum_stream(self, dtype):
        return self.format.sum_stream(E4M3)

    def is_exact(self, dtype):
        return self.format.is_exact(E4M3)

    def widen(self, param: typing.Any):
        return param.dequantize()

    def init(self, param: typing.Any):
        return self.format.init(param.codes)

    def join(self, param: typing.Any, residual):
        units = self.format.join(param.codes, residual)
        return tensors.scaled(units, tensors.exponents(param), self.axis)

    def round(self, master, dtype, random) -> typing.Any:
        return self.split(master, dtype, random)[0]

    def residual(self, master, param: typing.Any, random):
        units = tensors.scaled(master, -tensors.exponents(param), self.axis)
        return self.format.residual(units, param.codes, random)

    def split(self, master, dtype, random) -> tuple[typing.Any, typing.Any]:
        exponents = tensors.exponents_of(master, self.axis)
        units = tensors.scaled(master, -exponents, self.axis)
        codes, residual = self.format.split(units, E4M3, random)
        return tensors.of_codes(codes, exponents, self.axis), residual

    def advance(
        self, param: typing.Any, residual, update, random, landing=REPLACE, ahead=None
    ) -> tuple[typing.Any, typing.Any, typing.Any]:
        if ahead is None:
            return super().advance(param, residual, update, random, landing)
        master = self.sum(param, residual, update, random)
        exponents = tensors.exponents_of(master, self.axis)
        over = lambda x: tensors.scaled(x, -exponents, self.axis)
        format_ = typing.cast(StochasticRounding, self.format)
        codes = format_.toward(over(master), over(ahead), E4M3, random)
        new: typing.Any = tensors.of_codes(codes, exponents, self.axis)
        return new, None, result_of(param, new, landing)

    def store(
        self, param: typing.Any, master, random, landing: Landing = REPLACE
    ) -> tuple[typing.Any, typing.Any, typing.Any]:
        new, residual = self.split(master, E4M3, random)
        return new, residual, result_of(param, new, landing)


def for_tensor(
    weights: WeightFormat, param: BlockScaledTensor, min_size: int
) -> BlockScaledWeights:
    """Return the format that updates a tensor in a transformation with ``weights``.

    Args:
      weights: see :func:`lowbit_optax.lowbit`.
      param: a tensor of arrays or shapes.
      min_size: see :meth:`.WeightFormat.for_leaf`.

    Raises:
      ValueError: if the format does not support the tensor.
    """
    if isinstance(weights, QuantizedWeights):
        is_random = weights.rounding == "stochastic"
        weights = StochasticRounding() if is_random else Nearest()
    # Kahan summation would add updates and codes with different scales.
    if isinstance(weights, KahanFormat):
        raise ValueError(
            "weights must be extra_bits, stochastic_rounding, master_copy or nearest "
            f"for a BlockScaledTensor, got {weights}"
        )
    why_not = weights.check(E4M3)
    if why_not:
        raise ValueError(why_not)
    return BlockScaledWeights(weights.for_leaf(param.shape, E4M3, min_size), param.axis)
