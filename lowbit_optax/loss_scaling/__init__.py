"""Loss scaling: keep float16 gradients within float16's range, and skip overflows.

    scaled_value_and_grad ---> gradients of loss * scale
    with_loss_scale ---------> grads / scale in float32; the update, unless a gradient
                               is not finite; the next scale
    static_scale, backoff_scale, log_normal_scale ---> rules for the next scale

References:
  Micikevicius et al. 2018, "Mixed Precision Training".
  Kuchaiev et al. 2018, "OpenSeq2Seq", automatic loss scaling.
"""

from lowbit_optax.loss_scaling.log_normal import log_normal_scale
from lowbit_optax.loss_scaling.scales import Scaling, backoff_scale, static_scale
from lowbit_optax.loss_scaling.transformation import (
    LossScaleState,
    current_loss_scale,
    scaled_value_and_grad,
    with_loss_scale,
)

__all__ = [
    "LossScaleState",
    "Scaling",
    "backoff_scale",
    "current_loss_scale",
    "log_normal_scale",
    "scaled_value_and_grad",
    "static_scale",
    "with_loss_scale",
]
