"""SGD with momentum and weight decay, in each weight format."""

import functools
import typing

import optax

from lowbit_optax import emulation, formats
from lowbit_optax._step.moment_slots import Moments
from lowbit_optax.aliases import common
from lowbit_optax.transformation import lowbit


def kahan_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: typing.Any = None,
    *,
    weight_decay: float = 0.0,
    rounding: typing.Literal["nearest", "stochastic"] = "nearest",
    residual_rounding: typing.Literal["nearest", "stochastic"] | None = None,
    arithmetic: common.Arithmetic = "float32",
    moments: Moments = common.BFLOAT16,
    seed: int | None = None,
    min_size: int | None = None,
    implementation: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """SGD with momentum and weight decay, weights by Kahan summation.

        g = grad + d w;  m = mu m + g;  y = -eta m - c
        s = round(w + y);  c = (s - w) - y;  w = s

    Args:
      learning_rate, momentum, nesterov, accumulator_dtype: as in ``optax.sgd``.
      weight_decay: d, added to the gradient (not decoupled).
      rounding, residual_rounding: see :func:`lowbit_optax.kahan`.
      arithmetic: ``"float32"``, or ``"param"`` for the paper's bfloat16 unit, where
        every operation rounds (no ``nesterov``, ``accumulator_dtype`` or ``moments``).
      moments, seed, min_size, implementation: see :func:`lowbit_optax.lowbit`. Momentum
        is bfloat16, rounded stochastically, unless told otherwise.

    Returns:
      An optax transformation. Parameters and state: 6 bytes a bfloat16 parameter.

    References:
      Zamirai et al. 2020, Algorithm 3.

    >>> import jax.numpy as jnp, optax
    >>> tx = kahan_sgd(1e-5)
    >>> w = jnp.ones(2, jnp.bfloat16); state = tx.init(w)
    >>> for _ in range(1000):
    ...     updates, state = tx.update(jnp.ones(2, jnp.bfloat16), state, w)
    ...     w = optax.apply_updates(w, updates)
    >>> w
    Array([0.988281, 0.988281], dtype=bfloat16)
    """
    weights = formats.kahan(
        rounding=rounding, residual_rounding=residual_rounding, arithmetic=arithmetic
    )
    options = dict(seed=seed, min_size=min_size, implementation=implementation)
    if arithmetic == "param":
        common.only_float32(
            moments, nesterov=nesterov, accumulator_dtype=accumulator_dtype
        )
        return _unit_sgd(learning_rate, momentum, weight_decay, weights, options)
    inner = plain_sgd(
        learning_rate, momentum, nesterov, accumulator_dtype, weight_decay
    )
    return lowbit(inner, weights=weights, moments=moments, **options)


def sr_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: typing.Any = None,
    *,
    weight_decay: float = 0.0,
    arithmetic: common.Arithmetic = "float32",
    moments: Moments = common.BFLOAT16,
    seed: int | None = None,
    min_size: int | None = None,
    implementation: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """SGD with momentum and weight decay, weights rounded stochastically.

        g = grad + d w;  m = mu m + g;  w = SR(w - eta m)

    Args:
      learning_rate, momentum, nesterov, accumulator_dtype: as in ``optax.sgd``.
      weight_decay, arithmetic, moments, seed, min_size, implementation: as in
        :func:`kahan_sgd`.

    Returns:
      An optax transformation. Parameters and state: 4 bytes a bfloat16 parameter.

    References:
      Zamirai et al. 2020, Algorithm 2.

    >>> import jax.numpy as jnp, optax
    >>> tx = sr_sgd(1e-3, seed=1)
    >>> w = jnp.ones(2, jnp.bfloat16)
    >>> updates, state = tx.update(jnp.ones(2), tx.init(w), w)
    """
    weights = formats.stochastic_rounding()
    options = dict(seed=seed, min_size=min_size, implementation=implementation)
    if common.is_param(arithmetic):
        common.only_float32(
            moments, nesterov=nesterov, accumulator_dtype=accumulator_dtype
        )
        return _unit_sgd(learning_rate, momentum, weight_decay, weights, options)
    inner = plain_sgd(
        learning_rate, momentum, nesterov, accumulator_dtype, weight_decay
    )
    return lowbit(inner, weights=weights, moments=moments, **options)


def extra_bits_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: typing.Any = None,
    *,
    weight_decay: float = 0.0,
    bits: int | None = None,
    rounding: typing.Literal["nearest", "toward_zero", "stochastic"] = "nearest",
    residual_rounding: typing.Literal["nearest", "stochastic"] = "stochastic",
    moments: Moments = "float32",
    seed: int | None = None,
    min_size: int | None = None,
    implementation: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """SGD with momentum and weight decay, weights with k extra bits.

    Args:
      learning_rate, momentum, nesterov, accumulator_dtype: as in ``optax.sgd``.
      weight_decay: d, added to the gradient (not decoupled).
      bits: k, 16 if None (the float32 master, bit for bit).
      rounding, residual_rounding: see :func:`lowbit_optax.extra_bits`.
      moments, seed, min_size, implementation: see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation. Parameters and state: 6 + k/8 bytes a bfloat16
      parameter with momentum.

    References:
      Lewandowski and Kosson 2023, section 3.1.

    >>> import jax.numpy as jnp
    >>> extra_bits_sgd(0.1, 0.9, bits=8).update.__self__.weights.bits
    8
    """
    return lowbit(
        plain_sgd(learning_rate, momentum, nesterov, accumulator_dtype, weight_decay),
        weights=common.extra_bits(bits, rounding, residual_rounding),
        moments=moments,
        seed=seed,
        min_size=min_size,
        implementation=implementation,
    )


def plain_sgd(learning_rate, momentum, nesterov, accumulator_dtype, weight_decay):
    """Optax's SGD with weight decay added to the gradient, after checks."""
    common.wide(
        learning_rate=learning_rate, momentum=momentum, weight_decay=weight_decay
    )
    inner = optax.sgd(learning_rate, momentum, nesterov, accumulator_dtype)
    # A traced weight decay (inject_hyperparams) cannot be compared with zero.
    if isinstance(weight_decay, (int, float)) and weight_decay == 0:
        return inner
    return optax.chain(optax.add_decayed_weights(weight_decay), inner)


def _unit_sgd(learning_rate, momentum, weight_decay, weights, options):
    common.wide(learning_rate=learning_rate)
    common.static(momentum=momentum, weight_decay=weight_decay)
    build = functools.partial(
        emulation.sixteen_bit_sgd, learning_rate, momentum or 0.0, weight_decay
    )
    return common.unit(build, weights, options)
