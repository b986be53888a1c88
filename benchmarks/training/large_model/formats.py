"""The optimizers of a run, each with its weight format, clipping and schedule."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

import lowbit_optax

MAX_GRAD_NORM = 1.0


class Format(NamedTuple):
    """How a run stores its weights, and how it computes a step.

    Attributes:
        alias: the optimizer, a function of the learning rate.
        dtype: the dtype of the matrices. Norms are always float32.
        is_released: whether updates are part of the backward pass.
        has_loss_scale: whether the loss is scaled, which float16 needs.
        options: further arguments of the alias.
    """

    alias: Callable
    dtype: Any = jnp.bfloat16
    is_released: bool = False
    has_loss_scale: bool = False
    options: dict = {}  # noqa: RUF012

    @property
    def is_plain(self) -> bool:
        """Whether the optimizer is optax's, with float32 weights."""
        return self.alias is optax.adamw

    def optimizer(self, steps: int, param_shardings) -> optax.GradientTransformation:
        """Return the optimizer of a run with this number of steps."""
        rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 4, decay_steps=steps)
        options = dict(self.options)
        if not self.is_plain:
            options["param_shardings"] = param_shardings
        tx = self.alias(rate, weight_decay=0.1, **options)
        if not self.is_released:  # max_grad_norm clips in a released step
            tx = optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), tx)
        if self.has_loss_scale:
            scaling = lowbit_optax.loss_scaling.backoff_scale()
            tx = lowbit_optax.with_loss_scale(tx, scaling)
        return tx


def _master_copy_adamw(learning_rate, weight_decay, **options):
    inner = optax.adamw(learning_rate, weight_decay=weight_decay)
    return lowbit_optax.lowbit(inner, weights=lowbit_optax.master_copy(), **options)


FORMATS = {
    "float32": Format(optax.adamw, jnp.float32),
    "lowbit_adamw": Format(lowbit_optax.lowbit_adamw),
    "kahan_adamw": Format(lowbit_optax.kahan_adamw),
    "lowbit_adamw_released": Format(
        lowbit_optax.lowbit_adamw, is_released=True, options={"bits": 16}
    ),
    "float16_master_copy": Format(_master_copy_adamw, jnp.float16, has_loss_scale=True),
}
