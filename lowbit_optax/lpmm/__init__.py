"""LPMM: training with low-bit weights, momentum and gradient accumulators.

    quantize_params ---> parameters as QuantizedTensors, which contain uint32 arrays
    value_and_grad  ---> loss of the dequantized parameters, and its gradients
    lpmm_sgd, ...   ---> dequantize, run optax's update in float32, quantize again
    accumulate_gradients ---> low-bit sum of N gradients, then one update

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
