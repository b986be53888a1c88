"""The recommended preset around optax's aliases, with the memory that each takes.

``lowbit_adamw(rate)`` is ``lowbit(optax.adamw(rate))``, and so on: weights with 8 extra
bits and moments of 8 bits. The aliases check their arguments, and are known to
``optax.inject_hyperparams``.
"""

import typing

import optax

from lowbit_optax import formats
from lowbit_optax._step.moment_slots import Moments
from lowbit_optax.aliases import common
from lowbit_optax.aliases.inner import AdamW, Lion, Sgd, in_formats


def lowbit_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: typing.Any = None,
    *,
    weight_decay: float | None = None,
    bits: int | None = None,
    moments: Moments = None,
    seed: int | None = None,
    min_size: int | None = None,
    implementation: common.Implementation = None,
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
      seed, min_size, implementation: see :func:`lowbit_optax.lowbit`.

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
    >>> state.residual.words.shape  # 8 bits of 128 rows, in words of 32
    (32, 64)
    """
    inner = Sgd(learning_rate, momentum, nesterov, accumulator_dtype, weight_decay)
    weights = formats.extra_bits(8 if bits is None else bits)
    return in_formats(
        "lowbit_sgd", inner, weights, moments, seed, min_size, implementation
    )


def lowbit_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: typing.Any = None,
    weight_decay: float = 1e-4,
    mask: common.Mask = None,
    *,
    nesterov: bool = False,
    bits: int | None = None,
    moments: Moments = None,
    seed: int | None = None,
    min_size: int | None = None,
    implementation: common.Implementation = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW in 5.125 bytes per parameter, instead of the usual 14.

    The weight W is a bfloat16 parameter and the next 8 bits; Q is 8-bit codes.

        m_t = b1 Q(m_{t-1}) + (1 - b1) g_t
        v_t = b2 Q(v_{t-1}) + (1 - b2) g_t^2
        a   = (m_t / (1 - b1^t)) / (sqrt(v_t / (1 - b2^t) + eps_root) + eps)
        W   = round(W - eta_t (a + d W))

    Args:
      learning_rate: eta, a number or a schedule.
      b1, b2, eps, eps_root, mu_dtype, mask, nesterov: as in ``optax.adamw``.
      weight_decay: d, decoupled.
      bits: extra bits of the weights; 8 if None.
      moments: formats of m (``mu``) and v (``nu``); ``block_quantized(8)`` if None.
      seed, min_size, implementation: see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation, for :func:`lowbit_optax.step` or as usual.

    Raises:
      TypeError, ValueError: for arguments that are not as above.

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
    inner = AdamW(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov
    )
    weights = formats.extra_bits(8 if bits is None else bits)
    return in_formats(
        "lowbit_adamw", inner, weights, moments, seed, min_size, implementation
    )


def lowbit_lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.99,
    mu_dtype: typing.Any = None,
    weight_decay: float = 1e-3,
    mask: common.Mask = None,
    *,
    bits: int | None = None,
    moments: Moments = None,
    seed: int | None = None,
    min_size: int | None = None,
    implementation: common.Implementation = None,
) -> optax.GradientTransformationExtraArgs:
    """Lion in 4.06 bytes per parameter, instead of the usual 10.

    The weight W is a bfloat16 parameter and the next 8 bits; Q is 8-bit codes.

        a   = sign(b1 Q(m_{t-1}) + (1 - b1) g_t)
        m_t = b2 Q(m_{t-1}) + (1 - b2) g_t
        W   = round(W - eta_t (a + d W))

    Args:
      learning_rate: eta, a number or a schedule.
      b1, b2, mu_dtype, mask: as in ``optax.lion``.
      weight_decay: d, decoupled.
      bits: extra bits of the weights; 8 if None.
      moments: format of m (``mu``); ``block_quantized(8)`` if None.
      seed, min_size, implementation: see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation, for :func:`lowbit_optax.step` or as usual.

    Raises:
      TypeError, ValueError: for arguments that are not as above.

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
    inner = Lion(learning_rate, b1, b2, mu_dtype, weight_decay, mask)
    weights = formats.extra_bits(8 if bits is None else bits)
    return in_formats(
        "lowbit_lion", inner, weights, moments, seed, min_size, implementation
    )
