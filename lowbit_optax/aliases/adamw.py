"""AdamW in each weight format, and Lion with 8 extra bits."""

from __future__ import annotations

import typing

import optax

from lowbit_optax import formats
from lowbit_optax._step.moments import Moments
from lowbit_optax.aliases.common import (
    BFLOAT16_MOMENTS,
    Mask,
    ThreeRoundings,
    TwoRoundings,
    checked,
    without_none,
)
from lowbit_optax.transformations.lowbit import lowbit
from lowbit_optax.transformations.options import Options, takes_options


@takes_options
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
    rounding: TwoRoundings = None,
    residual_rounding: TwoRoundings = None,
    moments: Moments = None,
    **options: typing.Unpack[Options],
) -> optax.GradientTransformationExtraArgs:
    """AdamW with Kahan summation for weights, and with bfloat16 moments.

    The master weight is w - c: the parameter w minus its compensation c.

        m_t = b1 m_{t-1} + (1 - b1) g_t
        v_t = b2 v_{t-1} + (1 - b2) g_t^2
        a   = (m_t / (1 - b1^t)) / (sqrt(v_t / (1 - b2^t) + eps_root) + eps)
        y   = -eta_t (a + d (w - c)) - c
        s   = round(w + y);  c = round_c((s - w) - y);  w = s

    A bfloat16 parameter and its state need 8 bytes.

    Args:
      learning_rate: the learning rate eta, a number or a schedule.
      b1, b2, eps, eps_root, mu_dtype, mask, nesterov: see ``optax.adamw``.
      weight_decay: the decoupled weight decay d.
      rounding, residual_rounding: how w and c are rounded; see
        :func:`lowbit_optax.kahan`.
      moments: formats for m (``mu``) and v (``nu``). If None, both are stored in
        bfloat16 and rounded stochastically.
      **options: ``seed``, ``min_size``, ``implementation``, ``param_shardings``,
        ``warn`` and ``match_grad_dtype``; see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation. Apply it with :func:`lowbit_optax.step`, or as in optax.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value.

    References:
      Zamirai et al. 2020, Algorithm 5; Loshchilov and Hutter 2019.

    >>> import jax, jax.numpy as jnp, lowbit_optax, optax
    >>> tx = kahan_adamw(optax.cosine_decay_schedule(1e-3, decay_steps=100))
    >>> w = jnp.ones(2, jnp.bfloat16)
    >>> @jax.jit
    ... def train_step(w, state):
    ...     grads = jax.grad(lambda w: jnp.sum(w**2))(w)
    ...     return lowbit_optax.step(tx, w, state, grads)
    >>> state = tx.init(w)
    >>> for _ in range(100):
    ...     w, state = train_step(w, state)
    >>> w
    Array([0.949219, 0.949219], dtype=bfloat16)
    """
    moments = BFLOAT16_MOMENTS if moments is None else moments
    arguments = learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask
    inner = checked("kahan_adamw", moments, optax.adamw, *arguments, nesterov=nesterov)
    given = without_none(rounding=rounding, residual_rounding=residual_rounding)
    weights = formats.kahan(**given)
    return lowbit(inner, weights=weights, moments=moments, **options)


@takes_options
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
    error_feedback: str | None = None,
    moments: Moments = None,
    **options: typing.Unpack[Options],
) -> optax.GradientTransformationExtraArgs:
    """AdamW with stochastically rounded weights and bfloat16 moments.

        m_t = b1 m_{t-1} + (1 - b1) g_t
        v_t = b2 v_{t-1} + (1 - b2) g_t^2
        a   = (m_t / (1 - b1^t)) / (sqrt(v_t / (1 - b2^t) + eps_root) + eps)
        w   = SR(w - eta_t (a + d w))

    SR rounds up or down at random, such that the expected value is exact. A bfloat16
    parameter and its state need 6 bytes. With ``error_feedback="mu"``, the rounding
    error of SR is added to m, which needs no extra memory.

    Args:
      learning_rate: the learning rate eta, a number or a schedule.
      b1, b2, eps, eps_root, mu_dtype, mask, nesterov: see ``optax.adamw``.
      weight_decay: the decoupled weight decay d.
      error_feedback: ``"mu"`` or None; see :func:`lowbit_optax.stochastic_rounding`.
      moments: formats for m (``mu``) and v (``nu``). If None, both are stored in
        bfloat16 and rounded stochastically.
      **options: ``seed``, ``min_size``, ``implementation``, ``param_shardings``,
        ``warn`` and ``match_grad_dtype``; see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation. Apply it with :func:`lowbit_optax.step`, or as in optax.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value.

    References:
      Zamirai et al. 2020, Algorithm 4; Loshchilov and Hutter 2019. Error feedback:
      ECO, 2026 (arXiv 2601.22101).

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> tx = sr_adamw(1e-3)
    >>> w = jnp.ones(1000, jnp.bfloat16)
    >>> @jax.jit
    ... def train_step(w, state):
    ...     grads = jax.grad(lambda w: jnp.sum(w**2))(w)
    ...     return lowbit_optax.step(tx, w, state, grads)
    >>> state = tx.init(w)
    >>> for _ in range(10):
    ...     w, state = train_step(w, state)
    >>> round(float(jnp.mean(w.astype(jnp.float32))), 2)
    0.99
    """
    moments = BFLOAT16_MOMENTS if moments is None else moments
    arguments = learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask
    inner = checked("sr_adamw", moments, optax.adamw, *arguments, nesterov=nesterov)
    weights = formats.stochastic_rounding(error_feedback=error_feedback)
    return lowbit(inner, weights=weights, moments=moments, **options)


@takes_options
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
    rounding: ThreeRoundings = None,
    residual_rounding: ThreeRoundings = None,
    moments: Moments = None,
    **options: typing.Unpack[Options],
) -> optax.GradientTransformationExtraArgs:
    """AdamW with k extra bits per weight, and with float32 moments.

    The master weight W consists of the parameter and k extra bits: 16 + k bits for
    bfloat16.

        m_t = b1 m_{t-1} + (1 - b1) g_t
        v_t = b2 v_{t-1} + (1 - b2) g_t^2
        a   = (m_t / (1 - b1^t)) / (sqrt(v_t / (1 - b2^t) + eps_root) + eps)
        W   = round(W - eta_t (a + d W))

    A bfloat16 parameter and its state need 10 + k/8 bytes.

    Args:
      learning_rate: the learning rate eta, a number or a schedule.
      b1, b2, eps, eps_root, mu_dtype, mask, nesterov: see ``optax.adamw``.
      weight_decay: the decoupled weight decay d.
      bits: the number k of extra bits. If None, it is the largest for the dtype, which
        is 16 for bfloat16. Then every bit of W is stored, and results are as close to
        optax's as two compilations of optax are to each other.
      rounding, residual_rounding: how the parameter and W are rounded; see
        :func:`lowbit_optax.extra_bits`.
      moments: formats for m (``mu``) and v (``nu``); ``"float32"`` if None.
      **options: ``seed``, ``min_size``, ``implementation``, ``param_shardings``,
        ``warn`` and ``match_grad_dtype``; see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation. Apply it with :func:`lowbit_optax.step`, or as in optax.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value.

    References:
      Lewandowski and Kosson 2023, section 3.1; Loshchilov and Hutter 2019.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> tx = extra_bits_adamw(1e-4, bits=8)
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
    moments = "float32" if moments is None else moments
    arguments = learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask
    inner = checked(
        "extra_bits_adamw", moments, optax.adamw, *arguments, nesterov=nesterov
    )
    given = without_none(rounding=rounding, residual_rounding=residual_rounding)
    weights = formats.extra_bits(bits, **given)
    return lowbit(inner, weights=weights, moments=moments, **options)


@takes_options
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
    bits: int | None = None,
    moments: Moments = None,
    **options: typing.Unpack[Options],
) -> optax.GradientTransformationExtraArgs:
    """AdamW in 5.125 bytes per parameter, instead of the usual 14.

    The master weight W consists of a bfloat16 parameter and 8 extra bits. Q rounds to
    8-bit codes with a scale per block.

        m_t = b1 Q(m_{t-1}) + (1 - b1) g_t
        v_t = b2 Q(v_{t-1}) + (1 - b2) g_t^2
        a   = (m_t / (1 - b1^t)) / (sqrt(v_t / (1 - b2^t) + eps_root) + eps)
        W   = round(W - eta_t (a + d W))

    Args:
      learning_rate: the learning rate eta, a number or a schedule.
      b1, b2, eps, eps_root, mu_dtype, mask, nesterov: see ``optax.adamw``.
      weight_decay: the decoupled weight decay d.
      bits: the number of extra bits per weight; 8 if None.
      moments: formats for m (``mu``) and v (``nu``); ``block_quantized(8)`` if None.
      **options: ``seed``, ``min_size``, ``implementation``, ``param_shardings``,
        ``warn`` and ``match_grad_dtype``; see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation. Apply it with :func:`lowbit_optax.step`, or as in optax.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value.

    References:
      Lewandowski and Kosson 2023, section 3.1; Dettmers et al. 2022, section 2;
      Loshchilov and Hutter 2019.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> tx = lowbit_adamw(1e-3)
    >>> w = jnp.ones((128, 64), jnp.bfloat16)
    >>> @jax.jit
    ... def train_step(w, state):
    ...     grads = jax.grad(lambda w: jnp.sum(w**2))(w)
    ...     return lowbit_optax.step(tx, w, state, grads)
    >>> state = tx.init(w)
    >>> for _ in range(10):
    ...     w, state = train_step(w, state)
    >>> w[0, 0], state.inner_state[0].nu.codes.dtype
    (Array(0.988281, dtype=bfloat16), dtype('uint32'))
    """
    arguments = learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask
    inner = checked("lowbit_adamw", moments, optax.adamw, *arguments, nesterov=nesterov)
    weights = formats.extra_bits(8 if bits is None else bits)
    return lowbit(inner, weights=weights, moments=moments, **options)


@takes_options
def lowbit_lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.99,
    mu_dtype: typing.Any = None,
    weight_decay: float = 1e-3,
    mask: Mask = None,
    *,
    bits: int | None = None,
    moments: Moments = None,
    **options: typing.Unpack[Options],
) -> optax.GradientTransformationExtraArgs:
    """Lion in 4.06 bytes per parameter, instead of the usual 10.

    The master weight W consists of a bfloat16 parameter and 8 extra bits. Q rounds to
    8-bit codes with a scale per block.

        a   = sign(b1 Q(m_{t-1}) + (1 - b1) g_t)
        m_t = b2 Q(m_{t-1}) + (1 - b2) g_t
        W   = round(W - eta_t (a + d W))

    Args:
      learning_rate: the learning rate eta, a number or a schedule.
      b1, b2, mu_dtype, mask: see ``optax.lion``.
      weight_decay: the decoupled weight decay d.
      bits: the number of extra bits per weight; 8 if None.
      moments: format for m (``mu``); ``block_quantized(8)`` if None.
      **options: ``seed``, ``min_size``, ``implementation``, ``param_shardings``,
        ``warn`` and ``match_grad_dtype``; see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation. Apply it with :func:`lowbit_optax.step`, or as in optax.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value.

    References:
      Lewandowski and Kosson 2023, section 3.1; Chen et al. 2023, Algorithm 2.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> tx = lowbit_lion(1e-3)
    >>> w = jnp.ones((128, 64), jnp.bfloat16)
    >>> @jax.jit
    ... def train_step(w, state):
    ...     grads = jax.grad(lambda w: jnp.sum(w**2))(w)
    ...     return lowbit_optax.step(tx, w, state, grads)
    >>> state = tx.init(w)
    >>> for _ in range(10):
    ...     w, state = train_step(w, state)
    >>> w[0, 0]
    Array(0.988281, dtype=bfloat16)
    """
    arguments = learning_rate, b1, b2, mu_dtype, weight_decay, mask
    inner = checked("lowbit_lion", moments, optax.lion, *arguments)
    weights = formats.extra_bits(8 if bits is None else bits)
    return lowbit(inner, weights=weights, moments=moments, **options)
