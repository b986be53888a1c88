"""SGD with momentum and an L2 penalty in each weight format."""

from __future__ import annotations

import typing

import optax

from lowbit_optax import formats
from lowbit_optax._step.moments import Moments
from lowbit_optax.aliases.common import (
    BFLOAT16_MOMENTS,
    ThreeRoundings,
    TwoRoundings,
    sgd,
    without_none,
)
from lowbit_optax.transformations.lowbit import lowbit
from lowbit_optax.transformations.options import Options, takes_options


@takes_options
def kahan_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: typing.Any = None,
    *,
    weight_decay: float | None = None,
    rounding: TwoRoundings = None,
    residual_rounding: TwoRoundings = None,
    moments: Moments = None,
    **options: typing.Unpack[Options],
) -> optax.GradientTransformationExtraArgs:
    """SGD with Kahan summation for weights, and with bfloat16 momentum.

    The master weight is w - c: the parameter w minus its compensation c.

        g_t = grad(w) + d (w - c)
        m_t = beta m_{t-1} + g_t
        y   = -eta_t m_t - c
        s   = round(w + y);  c = round_c((s - w) - y);  w = s

    Without momentum, m_t is g_t. A bfloat16 parameter and its state need 6 bytes, or 4
    without momentum.

    Args:
      learning_rate: the learning rate eta, a number or a schedule.
      momentum: the decay rate beta, or None for SGD without momentum.
      nesterov, accumulator_dtype: see ``optax.sgd``.
      weight_decay: the factor d of an L2 penalty, which is not decoupled; 0 if None.
      rounding, residual_rounding: how w and c are rounded; see
        :func:`lowbit_optax.kahan`.
      moments: format for the momentum. If None, it is stored in bfloat16 and rounded
        stochastically.
      **options: ``seed``, ``min_size``, ``implementation``, ``param_shardings``,
        ``warn`` and ``match_grad_dtype``; see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation. Apply it with :func:`lowbit_optax.step`, or as in optax.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value.

    References:
      Zamirai et al. 2020, Algorithm 3.

    Plain bfloat16 weights near 1 would lose updates of 1e-5:

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> tx = kahan_sgd(1e-5)
    >>> w = jnp.ones(2, jnp.bfloat16)
    >>> @jax.jit
    ... def train_step(w, state):
    ...     grads = jax.grad(lambda w: jnp.sum(w))(w)
    ...     return lowbit_optax.step(tx, w, state, grads)
    >>> state = tx.init(w)
    >>> for _ in range(1000):
    ...     w, state = train_step(w, state)
    >>> w
    Array([0.988281, 0.988281], dtype=bfloat16)
    """
    moments = BFLOAT16_MOMENTS if moments is None else moments
    arguments = learning_rate, momentum, nesterov, accumulator_dtype
    inner = sgd("kahan_sgd", moments, *arguments, weight_decay=weight_decay)
    given = without_none(rounding=rounding, residual_rounding=residual_rounding)
    weights = formats.kahan(**given)
    return lowbit(inner, weights=weights, moments=moments, **options)


@takes_options
def sr_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: typing.Any = None,
    *,
    weight_decay: float | None = None,
    error_feedback: str | None = None,
    moments: Moments = None,
    **options: typing.Unpack[Options],
) -> optax.GradientTransformationExtraArgs:
    """SGD with stochastically rounded weights and bfloat16 momentum.

        g_t = grad(w) + d w
        m_t = beta m_{t-1} + g_t
        w   = SR(w - eta_t m_t)

    SR rounds up or down at random, such that the expected value is exact. Without
    momentum, m_t is g_t. A bfloat16 parameter and its state need 4 bytes, or 2 without
    momentum. With ``error_feedback="trace"``, the rounding error of SR is added to m,
    which needs no extra memory.

    Args:
      learning_rate: the learning rate eta, a number or a schedule.
      momentum: the decay rate beta, or None for SGD without momentum.
      nesterov, accumulator_dtype: see ``optax.sgd``.
      weight_decay: the factor d of an L2 penalty, which is not decoupled; 0 if None.
      error_feedback: ``"trace"`` or None. ``"trace"`` needs momentum; see
        :func:`lowbit_optax.stochastic_rounding`.
      moments: format for the momentum. If None, it is stored in bfloat16 and rounded
        stochastically.
      **options: ``seed``, ``min_size``, ``implementation``, ``param_shardings``,
        ``warn`` and ``match_grad_dtype``; see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation. Apply it with :func:`lowbit_optax.step`, or as in optax.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value.

    References:
      Zamirai et al. 2020, Algorithm 2. Error feedback: ECO, 2026 (arXiv
      2601.22101).

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> tx = sr_sgd(1e-3, 0.9, seed=1)
    >>> w = jnp.ones(1000, jnp.bfloat16)
    >>> @jax.jit
    ... def train_step(w, state):
    ...     grads = jax.grad(lambda w: jnp.sum(w))(w)
    ...     return lowbit_optax.step(tx, w, state, grads)
    >>> state = tx.init(w)
    >>> for _ in range(3):
    ...     w, state = train_step(w, state)
    >>> round(float(jnp.mean(w.astype(jnp.float32))), 2)  # exact: 0.9944
    0.99
    """
    moments = BFLOAT16_MOMENTS if moments is None else moments
    arguments = learning_rate, momentum, nesterov, accumulator_dtype
    inner = sgd("sr_sgd", moments, *arguments, weight_decay=weight_decay)
    weights = formats.stochastic_rounding(error_feedback=error_feedback)
    return lowbit(inner, weights=weights, moments=moments, **options)


@takes_options
def extra_bits_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: typing.Any = None,
    *,
    weight_decay: float | None = None,
    bits: int | None = None,
    rounding: ThreeRoundings = None,
    residual_rounding: ThreeRoundings = None,
    moments: Moments = None,
    **options: typing.Unpack[Options],
) -> optax.GradientTransformationExtraArgs:
    """SGD with k extra bits per weight, and with float32 momentum.

    The master weight W consists of the parameter and k extra bits: 16 + k bits for
    bfloat16.

        g_t = grad(param) + d W
        m_t = beta m_{t-1} + g_t
        W   = round(W - eta_t m_t)

    Without momentum, m_t is g_t. A bfloat16 parameter and its state need 6 + k/8 bytes,
    or 2 + k/8 without momentum.

    Args:
      learning_rate: the learning rate eta, a number or a schedule.
      momentum: the decay rate beta, or None for SGD without momentum.
      nesterov, accumulator_dtype: see ``optax.sgd``.
      weight_decay: the factor d of an L2 penalty, which is not decoupled; 0 if None.
      bits: the number k of extra bits. If None, it is the largest for the dtype, which
        is 16 for bfloat16. Then every bit of W is stored, and results are as close to
        optax's as two compilations of optax are to each other.
      rounding, residual_rounding: how the parameter and W are rounded; see
        :func:`lowbit_optax.extra_bits`.
      moments: format for the momentum; ``"float32"`` if None.
      **options: ``seed``, ``min_size``, ``implementation``, ``param_shardings``,
        ``warn`` and ``match_grad_dtype``; see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation. Apply it with :func:`lowbit_optax.step`, or as in optax.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value.

    References:
      Lewandowski and Kosson 2023, section 3.1.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> tx = extra_bits_sgd(1e-4, 0.9, bits=8)
    >>> w = jnp.ones((128, 64), jnp.bfloat16)
    >>> @jax.jit
    ... def train_step(w, state):
    ...     grads = jax.grad(lambda w: jnp.sum(w))(w)
    ...     return lowbit_optax.step(tx, w, state, grads)
    >>> state = tx.init(w)
    >>> for _ in range(3):
    ...     w, state = train_step(w, state)
    >>> state.residual.tree.shape  # 128 rows of 8 bits, in 32-bit words
    (32, 64)
    """
    moments = "float32" if moments is None else moments
    arguments = learning_rate, momentum, nesterov, accumulator_dtype
    inner = sgd("extra_bits_sgd", moments, *arguments, weight_decay=weight_decay)
    given = without_none(rounding=rounding, residual_rounding=residual_rounding)
    weights = formats.extra_bits(bits, **given)
    return lowbit(inner, weights=weights, moments=moments, **options)


@takes_options
def lowbit_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: typing.Any = None,
    *,
    weight_decay: float | None = None,
    bits: int | None = None,
    moments: Moments = None,
    **options: typing.Unpack[Options],
) -> optax.GradientTransformationExtraArgs:
    """SGD with momentum in 4.06 bytes per parameter, instead of the usual 10.

    The master weight W consists of a bfloat16 parameter and 8 extra bits. Q rounds to
    8-bit codes with a scale per block.

        g_t = grad(param) + d W
        m_t = beta Q(m_{t-1}) + g_t
        W   = round(W - eta_t m_t)

    Without momentum, m_t is g_t, and a parameter and its state need 3 bytes.

    Args:
      learning_rate: the learning rate eta, a number or a schedule.
      momentum: the decay rate beta, or None for SGD without momentum.
      nesterov, accumulator_dtype: see ``optax.sgd``.
      weight_decay: the factor d of an L2 penalty, which is not decoupled; 0 if None.
      bits: the number of extra bits per weight; 8 if None.
      moments: format for the momentum; ``block_quantized(8)`` if None.
      **options: ``seed``, ``min_size``, ``implementation``, ``param_shardings``,
        ``warn`` and ``match_grad_dtype``; see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation. Apply it with :func:`lowbit_optax.step`, or as in optax.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value.

    References:
      Lewandowski and Kosson 2023, section 3.1; Dettmers et al. 2022, section 2.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> tx = lowbit_sgd(1e-4, 0.9)
    >>> w = jnp.ones((128, 64), jnp.bfloat16)
    >>> @jax.jit
    ... def train_step(w, state):
    ...     grads = jax.grad(lambda w: jnp.sum(w**2))(w)
    ...     return lowbit_optax.step(tx, w, state, grads)
    >>> state = tx.init(w)
    >>> for _ in range(3):
    ...     w, state = train_step(w, state)
    >>> state.residual.tree.shape  # 128 rows of 8 bits, in 32-bit words
    (32, 64)
    """
    arguments = learning_rate, momentum, nesterov, accumulator_dtype
    inner = sgd("lowbit_sgd", moments, *arguments, weight_decay=weight_decay)
    weights = formats.extra_bits(8 if bits is None else bits)
    return lowbit(inner, weights=weights, moments=moments, **options)
