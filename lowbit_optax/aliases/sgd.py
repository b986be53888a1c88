"""SGD with momentum and weight decay, in each weight format."""

from __future__ import annotations

import typing

import optax

from lowbit_optax import formats
from lowbit_optax._step.moment_slots import Moments
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
    """SGD with momentum, weights by Kahan summation and momentum in bfloat16.

    The float32 weight is w - c, a parameter w and its compensation c.

        g_t = grad(w) + d (w - c)
        m_t = beta m_{t-1} + g_t
        y   = -eta_t m_t - c
        s   = round(w + y);  c = round_c((s - w) - y);  w = s

    Without momentum m_t is g_t. Parameters and state take 6 bytes per bfloat16
    parameter, 4 without momentum.

    Args:
      learning_rate: eta, a number or a schedule.
      momentum: beta, or None for no momentum.
      nesterov, accumulator_dtype: as in ``optax.sgd``.
      weight_decay: d, added to the gradient (not decoupled); 0 if None.
      rounding, residual_rounding: of w and of c, see :func:`lowbit_optax.kahan`.
      moments: format of the momentum; ``cast(jnp.bfloat16)``, rounded stochastically,
        if None.
      **options: ``seed``, ``min_size``, ``implementation``, ``param_shardings``,
        ``warn`` and ``match_grad_dtype`` of :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation, for :func:`lowbit_optax.step` or as usual.

    Raises:
      TypeError, ValueError: for arguments that are not as above.

    References:
      Zamirai et al. 2020, Algorithm 3.

    Updates of 1e-5 would be lost in bfloat16 weights near 1:

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
    """SGD with momentum, weights rounded stochastically and momentum in bfloat16.

        g_t = grad(w) + d w
        m_t = beta m_{t-1} + g_t
        w   = SR(w - eta_t m_t)

    SR rounds to one of the two nearest numbers, so that the mean is right. Without
    momentum m_t is g_t. Parameters and state take 4 bytes per bfloat16 parameter, 2
    without momentum. With ``error_feedback="trace"``, m takes what SR has lost, and
    gives it back, in no byte more.

    Args:
      learning_rate: eta, a number or a schedule.
      momentum: beta, or None for no momentum.
      nesterov, accumulator_dtype: as in ``optax.sgd``.
      weight_decay: d, added to the gradient (not decoupled); 0 if None.
      error_feedback: None, or ``"trace"``, which needs a momentum; see
        :func:`lowbit_optax.stochastic_rounding`.
      moments: format of the momentum; ``cast(jnp.bfloat16)``, rounded stochastically,
        if None.
      **options: ``seed``, ``min_size``, ``implementation``, ``param_shardings``,
        ``warn`` and ``match_grad_dtype`` of :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation, for :func:`lowbit_optax.step` or as usual.

    Raises:
      TypeError, ValueError: for arguments that are not as above.

    References:
      Zamirai et al. 2020, Algorithm 2. ECO, 2026 (arXiv 2601.22101), for errors in the
      momentum.

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
    >>> round(float(jnp.mean(w.astype(jnp.float32))), 2)  # in exact arithmetic 0.9944
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
    """SGD with momentum, weights with k extra bits and momentum in float32.

    The weight W is a parameter and the next k bits, so 16 + k bits for bfloat16.

        g_t = grad(param) + d W
        m_t = beta m_{t-1} + g_t
        W   = round(W - eta_t m_t)

    Without momentum m_t is g_t. Parameters and state take 6 + k/8 bytes per bfloat16
    parameter, 2 + k/8 without momentum.

    Args:
      learning_rate: eta, a number or a schedule.
      momentum: beta, or None for no momentum.
      nesterov, accumulator_dtype: as in ``optax.sgd``.
      weight_decay: d, added to the gradient (not decoupled); 0 if None.
      bits: k; if None the most that the parameter's dtype holds: 16 for bfloat16, which
        then stores every bit of W. Two compiled programs may still differ in their last
        bits, as two of optax do.
      rounding, residual_rounding: of the parameter and of W, see
        :func:`lowbit_optax.extra_bits`.
      moments: format of the momentum; ``"float32"`` if None.
      **options: ``seed``, ``min_size``, ``implementation``, ``param_shardings``,
        ``warn`` and ``match_grad_dtype`` of :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation, for :func:`lowbit_optax.step` or as usual.

    Raises:
      TypeError, ValueError: for arguments that are not as above.

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
    >>> state.residual.tree.shape  # 8 bits of 128 rows, in words of 32
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

    The weight W is a bfloat16 parameter and the next 8 bits; Q is 8-bit codes.

        g_t = grad(param) + d W
        m_t = beta Q(m_{t-1}) + g_t
        W   = round(W - eta_t m_t)

    Without momentum m_t is g_t, and parameters and state take 3 bytes per parameter.

    Args:
      learning_rate: eta, a number or a schedule.
      momentum: beta, or None for no momentum.
      nesterov, accumulator_dtype: as in ``optax.sgd``.
      weight_decay: d, added to the gradient (not decoupled); 0 if None.
      bits: extra bits of the weights; 8 if None.
      moments: format of the momentum; ``block_quantized(8)`` if None.
      **options: ``seed``, ``min_size``, ``implementation``, ``param_shardings``,
        ``warn`` and ``match_grad_dtype`` of :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation, for :func:`lowbit_optax.step` or as usual.

    Raises:
      TypeError, ValueError: for arguments that are not as above.

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
    >>> state.residual.tree.shape  # 8 bits of 128 rows, in words of 32
    (32, 64)
    """
    arguments = learning_rate, momentum, nesterov, accumulator_dtype
    inner = sgd("lowbit_sgd", moments, *arguments, weight_decay=weight_decay)
    weights = formats.extra_bits(8 if bits is None else bits)
    return lowbit(inner, weights=weights, moments=moments, **options)
