"""The recommended presets: bfloat16 weights with 8 extra bits, moments in 8 bits."""

import typing
from collections.abc import Callable

import optax

from lowbit_optax import formats
from lowbit_optax._step.moment_slots import Moments
from lowbit_optax.aliases import adamw, common, sgd
from lowbit_optax.transformation import lowbit

Mask = typing.Any | Callable[[optax.Params], typing.Any] | None

EIGHT_BITS = formats.block_quantized(8)
"""8-bit codes with a bfloat16 scale for every 32 values, rounded stochastically."""


def lowbit_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: typing.Any = None,
    *,
    weight_decay: float = 0.0,
    bits: int = 8,
    moments: Moments = EIGHT_BITS,
    seed: int | None = None,
    min_size: int | None = None,
    implementation: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """SGD with momentum and weight decay in 4.06 bytes a parameter.

    Args:
      learning_rate, momentum, nesterov, accumulator_dtype: as in ``optax.sgd``.
      weight_decay: d, added to the gradient (not decoupled).
      bits: extra bits of the weights.
      moments: format of the momentum, see :func:`lowbit_optax.block_quantized`.
      seed, min_size, implementation: see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation.

    >>> import jax.numpy as jnp
    >>> tx = lowbit_sgd(0.1, 0.9)
    >>> tx.init(jnp.ones((64, 64), jnp.bfloat16)).residual.words.shape
    (16, 64)
    """
    inner = sgd.plain_sgd(
        learning_rate, momentum, nesterov, accumulator_dtype, weight_decay
    )
    return _preset(inner, bits, moments, seed, min_size, implementation)


def lowbit_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: typing.Any = None,
    weight_decay: float = 1e-4,
    mask: Mask = None,
    *,
    nesterov: bool = False,
    bits: int = 8,
    moments: Moments = EIGHT_BITS,
    seed: int | None = None,
    min_size: int | None = None,
    implementation: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW in 5.125 bytes a parameter, instead of the usual 14.

    Args:
      learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov: as
        in ``optax.adamw``.
      bits: extra bits of the weights.
      moments: formats of the moments, see :func:`lowbit_optax.block_quantized`.
      seed, min_size, implementation: see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation.

    >>> import jax.numpy as jnp
    >>> tx = lowbit_adamw(1e-3)
    >>> tx.init(jnp.ones((64, 64), jnp.bfloat16)).inner_state[0].nu.codes.dtype
    dtype('uint32')
    """
    inner = adamw.plain_adamw(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov
    )
    return _preset(inner, bits, moments, seed, min_size, implementation)


def lowbit_lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.99,
    mu_dtype: typing.Any = None,
    weight_decay: float = 1e-3,
    mask: Mask = None,
    *,
    bits: int = 8,
    moments: Moments = EIGHT_BITS,
    seed: int | None = None,
    min_size: int | None = None,
    implementation: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Lion in 4.06 bytes a parameter.

    Args:
      learning_rate, b1, b2, mu_dtype, weight_decay, mask: as in ``optax.lion``.
      bits: extra bits of the weights.
      moments: format of the momentum, see :func:`lowbit_optax.block_quantized`.
      seed, min_size, implementation: see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation.

    >>> import jax.numpy as jnp
    >>> tx = lowbit_lion(1e-4)
    >>> tx.init(jnp.ones((64, 64), jnp.bfloat16)).inner_state[0].mu.scales.shape
    (2, 64)
    """
    common.wide(learning_rate=learning_rate, b1=b1, b2=b2, weight_decay=weight_decay)
    inner = optax.lion(learning_rate, b1, b2, mu_dtype, weight_decay, mask)
    return _preset(inner, bits, moments, seed, min_size, implementation)


def _preset(inner, bits, moments, seed, min_size, implementation):
    return lowbit(
        inner,
        weights=formats.extra_bits(bits),
        moments=moments,
        seed=seed,
        min_size=min_size,
        implementation=implementation,
    )
