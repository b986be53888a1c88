"""Storage formats for weights and moments."""

from lowbit_optax.formats.base import MomentFormat, WeightFormat
from lowbit_optax.formats.block_quantized import block_quantized
from lowbit_optax.formats.cast import cast
from lowbit_optax.formats.extra_bits import extra_bits
from lowbit_optax.formats.kahan import kahan
from lowbit_optax.formats.moment_fields import register_moments
from lowbit_optax.formats.plain import master_copy, nearest, stochastic_rounding
from lowbit_optax.formats.quantized_weights import quantized_weights

__all__ = [
    "MomentFormat",
    "WeightFormat",
    "block_quantized",
    "cast",
    "extra_bits",
    "kahan",
    "master_copy",
    "nearest",
    "quantized_weights",
    "register_moments",
    "stochastic_rounding",
]
