"""AdamW, in each weight format."""

import functools
import typing
from collections.abc import Callable

import optax

from lowbit_optax import emulation, formats
from lowbit_optax._step.moment_slots import Moments
from lowbit_optax.aliases import common
from lowbit_optax.transformation import lowbit

Mask = typing.Any | Callable[[optax.Params], typing.Any] | None


def kahan_adamw(
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
    rounding: typing.Literal["nearest", "stochastic"] = "nearest",
    residual_rounding: typing.Literal["nearest", "stochastic"] | None = None,
    arithmetic: common.Arithmetic = "float32",
    moments: Moments = common.BFLOAT16,
    seed: int | None = None,
    min_size: int | None = None,
    implementation: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW, weights by Kahan summation and moments in bfloat16.

    Args:
      learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov: as
        in ``optax.adamw``.
      rounding, residual_rounding: see :func:`lowbit_optax.kahan`.
      arithmetic: ``"float32"``, or ``"param"`` for the paper's bfloat16 unit, where
        every operation rounds and b2 must not round to 1 (no ``eps_root``,
        ``mu_dtype``, ``mask``, ``nesterov`` or ``moments``).
      moments, seed, min_size, implementation: see :func:`lowbit_optax.lowbit`. Moments
        are bfloat16, rounded stochastically, unless told otherwise.

    Returns:
      An optax transformation. Parameters and state: 8 bytes a bfloat16 parameter.

    References:
      Zamirai et al. 2020, Algorithm 5.

    >>> import jax.numpy as jnp, optax
    >>> tx = kahan_adamw(optax.cosine_decay_schedule(1e-3, 100))
    >>> tx.init(jnp.ones(2, jnp.bfloat16)).inner_state[0].mu.dtype
    dtype(bfloat16)
    """
    weights = formats.kahan(
        rounding=rounding, residual_rounding=residual_rounding, arithmetic=arithmetic
    )
    options = dict(seed=seed, min_size=min_size, implementation=implementation)
    if arithmetic == "param":
        common.only_float32(
            moments, eps_root=eps_root, mu_dtype=mu_dtype, mask=mask, nesterov=nesterov
        )
        return _unit_adamw(learning_rate, b1, b2, eps, weight_decay, weights, options)
    inner = plain_adamw(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov
    )
    return lowbit(inner, weights=weights, moments=moments, **options)


def sr_adamw(
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
    arithmetic: common.Arithmetic = "float32",
    moments: Moments = common.BFLOAT16,
    seed: int | None = None,
    min_size: int | None = None,
    implementation: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW, weights rounded stochastically and moments in bfloat16.

    Args:
      learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov: as
        in ``optax.adamw``.
      arithmetic, moments, seed, min_size, implementation: as in :func:`kahan_adamw`.

    Returns:
      An optax transformation. Parameters and state: 6 bytes a bfloat16 parameter.

    References:
      Zamirai et al. 2020, Algorithm 4.

    >>> import jax.numpy as jnp
    >>> sr_adamw(1e-3).init(jnp.ones(2, jnp.bfloat16)).residual
    NoResidual()
    """
    weights = formats.stochastic_rounding()
    options = dict(seed=seed, min_size=min_size, implementation=implementation)
    if common.is_param(arithmetic):
        common.only_float32(
            moments, eps_root=eps_root, mu_dtype=mu_dtype, mask=mask, nesterov=nesterov
        )
        return _unit_adamw(learning_rate, b1, b2, eps, weight_decay, weights, options)
    inner = plain_adamw(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov
    )
    return lowbit(inner, weights=weights, moments=moments, **options)


def extra_bits_adamw(
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
    bits: int | None = None,
    rounding: typing.Literal["nearest", "toward_zero", "stochastic"] = "nearest",
    residual_rounding: typing.Literal["nearest", "stochastic"] = "stochastic",
    moments: Moments = "float32",
    seed: int | None = None,
    min_size: int | None = None,
    implementation: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW, weights with k extra bits and float32 moments.

    Args:
      learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov: as
        in ``optax.adamw``.
      bits: k, 16 if None (the float32 master, bit for bit).
      rounding, residual_rounding: see :func:`lowbit_optax.extra_bits`.
      moments, seed, min_size, implementation: see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation. Parameters and state: 10 + k/8 bytes a bfloat16
      parameter.

    References:
      Lewandowski and Kosson 2023, section 3.1.

    >>> import jax.numpy as jnp
    >>> tx = extra_bits_adamw(1e-3, bits=8)
    >>> tx.init(jnp.ones((128, 64), jnp.bfloat16)).residual.words.shape
    (32, 64)
    """
    inner = plain_adamw(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov
    )
    return lowbit(
        inner,
        weights=common.extra_bits(bits, rounding, residual_rounding),
        moments=moments,
        seed=seed,
        min_size=min_size,
        implementation=implementation,
    )


def plain_adamw(
    learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov
):
    """AdamW as optax has it, refusing hyperparameters that arrive in 16 bits."""
    common.wide(
        learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay
    )
    return optax.adamw(
        learning_rate,
        b1,
        b2,
        eps,
        eps_root,
        mu_dtype,
        weight_decay,
        mask,
        nesterov=nesterov,
    )


def _unit_adamw(learning_rate, b1, b2, eps, weight_decay, weights, options):
    common.wide(learning_rate=learning_rate)
    common.static(b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    build = functools.partial(
        emulation.sixteen_bit_adamw, learning_rate, b1, b2, eps, weight_decay
    )
    return common.unit(build, weights, options)
