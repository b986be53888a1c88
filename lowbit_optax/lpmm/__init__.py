"""LPMM: training with weights, momentum and gradient accumulators all in few bits.

    quantize_params ---> parameters as QuantizedTensor leaves, which hold uint32 arrays
    value_and_grad  ---> dequantises them for the loss; gradients in their shapes
    lpmm_sgd, ...   ---> dequantise, inner optax update in float32, quantise again
    accumulate_gradients ---> sums N gradients in few bits before one update

References:
  "Training Neural Networks with Low-Precision Model Memory", Algorithm 1.
"""

from lowbit_optax.formats.quantized_tensor import QuantizedTensor, quantize
from lowbit_optax.lpmm.accumulation import AccumulationState, accumulate_gradients
from lowbit_optax.lpmm.gradients import value_and_grad
from lowbit_optax.lpmm.optimizers import lpmm_adam, lpmm_sgd
from lowbit_optax.lpmm.quantization import dequantize, quantize_params

__all__ = [
    "AccumulationState",
    "QuantizedTensor",
    "accumulate_gradients",
    "dequantize",
    "lpmm_adam",
    "lpmm_sgd",
    "quantize",
    "quantize_params",
    "value_and_grad",
]
