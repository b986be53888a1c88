"""SGD with momentum and Adam, with low-bit weights and moments."""

from __future__ import annotations

import typing

import optax

from lowbit_optax import formats
from lowbit_optax._arguments import check_choice, check_static_int
from lowbit_optax.aliases.common import checked, sgd
from lowbit_optax.formats import MomentFormat
from lowbit_optax.formats.base import Rounding
from lowbit_optax.formats.quantized_weights import quantized_weights
from lowbit_optax.lpmm.quantization import PAPER_BLOCK_SIZE
from lowbit_optax.transformations.lowbit import lowbit
from lowbit_optax.transformations.options import Options, takes_options
from pallas_kernels.layout import check_block_size


@takes_options
def lpmm_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | None = None,
    nesterov: bool = False,
    *,
    weight_decay: float | None = None,
    momentum_bits: int | None = None,
    block_size: int | None = None,
    rounding: Rounding | None = None,
    **options: typing.Unpack[Options],
) -> optax.GradientTransformationExtraArgs:
    """SGD with momentum on quantized weights.

        g_t = grad(theta_{t-1}) + d theta_{t-1}
        m_t = Q(beta m_{t-1} + g_t)
        theta_t = Q(theta_{t-1} - eta_t m_t)

    Q quantizes an array. The update uses the rounded momentum that is stored. Gradients
    are not quantized. To quantize all gradients, as Algorithm 1 does, use
    ``accumulate_gradients(lpmm_sgd(...), every=N)``, even if N is 1.

    12-bit weights, 8-bit momentum and the 8-bit accumulators of
    :func:`lowbit_optax.accumulate_gradients` need 28 bits per parameter plus the
    scales, as in the paper. Weights and momentum alone need 2.5 bytes per parameter.

    Args:
      learning_rate: the learning rate eta, a number or a schedule.
      momentum: the decay rate beta. None means no momentum, so that m_t = g_t.
      nesterov: see ``optax.sgd``.
      weight_decay: the weight decay d, added to the gradient (not decoupled); 0 if
        None.
      momentum_bits: 8 or 4, in Dettmers' dynamic exponent code, as in the paper; 8 if
        None.
      block_size: number of momentum values that share a scale; 2048 if None. The block
        size of the weights is an argument of :func:`lowbit_optax.lpmm.quantize_params`.
      rounding: how weights and momentum are rounded, ``"stochastic"`` or ``"nearest"``;
        stochastic if None.
      **options: ``seed``, ``min_size``, ``implementation``, ``param_shardings``,
        ``warn`` and ``match_grad_dtype``; see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation for trees from :func:`lowbit_optax.lpmm.quantize_params`.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value.

    References:
      LPMM, Algorithm 1 and section 5.1.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> from lowbit_optax import lpmm
    >>> params = lowbit_optax.lpmm.quantize_params({"w": jnp.ones((64, 64))}, bits=12)
    >>> tx = lpmm_sgd(1e-3, 0.9)
    >>> @jax.jit
    ... def train_step(params, state):
    ...     loss = lambda params: jnp.sum(params["w"] ** 2)
    ...     _, grads = lpmm.value_and_grad(loss)(params)
    ...     return lowbit_optax.step(tx, params, state, grads)
    >>> state = tx.init(params)
    >>> for _ in range(3):
    ...     params, state = train_step(params, state)
    >>> round(float(params["w"].dequantize()[0, 0]), 2)
    0.99
    """
    rounding = "stochastic" if rounding is None else rounding
    trace = _dynamic("lpmm_sgd", momentum_bits, block_size, rounding)
    moments = "float32" if momentum is None else {"trace": trace}
    arguments = learning_rate, momentum, nesterov, None
    inner = sgd("lpmm_sgd", moments, *arguments, weight_decay=weight_decay)
    weights = quantized_weights(rounding=rounding)
    return lowbit(inner, weights=weights, moments=moments, **options)


@takes_options
def lpmm_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    weight_decay: float | None = None,
    nesterov: bool = False,
    momentum_bits: int | None = None,
    block_size: int | None = None,
    rounding: Rounding | None = None,
    **options: typing.Unpack[Options],
) -> optax.GradientTransformationExtraArgs:
    """Adam on quantized weights, or AdamW if ``weight_decay`` is given.

        m_t = Q(b1 m_{t-1} + (1 - b1) g_t)
        v_t = Q(b2 v_{t-1} + (1 - b2) g_t^2)
        a   = (m_t / (1 - b1^t)) / (sqrt(v_t / (1 - b2^t) + eps_root) + eps)
        theta_t = Q(theta_{t-1} - eta_t (a + d theta_{t-1}))

    Q quantizes an array. The update uses the rounded m_t and v_t that are stored. With
    12-bit weights, parameters and state need 3.57 bytes per parameter.

    Args:
      learning_rate: the learning rate eta, a number or a schedule.
      b1, b2, eps, eps_root, nesterov: see ``optax.adam``.
      weight_decay: the decoupled weight decay d, as in ``optax.adamw``; 0 if None.
      momentum_bits, block_size, rounding: see :func:`lpmm_sgd`, with m as the momentum.
        v is stored in ``block_quantized(8)``, in which no value becomes 0. ``init``
        raises an error for 4 bits, with which updates would be many times too long.
      **options: ``seed``, ``min_size``, ``implementation``, ``param_shardings``,
        ``warn`` and ``match_grad_dtype``; see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation for trees from :func:`lowbit_optax.lpmm.quantize_params`.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value.

    References:
      LPMM, section 5.1 and appendix B; Kingma and Ba 2015, Algorithm 1.

    >>> import jax, jax.numpy as jnp, lowbit_optax
    >>> from lowbit_optax import lpmm
    >>> params = lowbit_optax.lpmm.quantize_params({"w": jnp.ones((64, 64))}, bits=12)
    >>> tx = lpmm_adam(1e-3)
    >>> @jax.jit
    ... def train_step(params, state):
    ...     loss = lambda params: jnp.sum(params["w"] ** 2)
    ...     _, grads = lpmm.value_and_grad(loss)(params)
    ...     return lowbit_optax.step(tx, params, state, grads)
    >>> state = tx.init(params)
    >>> for _ in range(10):
    ...     params, state = train_step(params, state)
    >>> round(float(params["w"].dequantize()[0, 0]), 2)
    0.99
    """
    weight_decay = 0.0 if weight_decay is None else weight_decay
    rounding = "stochastic" if rounding is None else rounding
    moments = {
        "mu": _dynamic("lpmm_adam", momentum_bits, block_size, rounding),
        # Always stochastic, because nearest rounding would stop the decay.
        "nu": formats.block_quantized(8),
    }
    arguments = learning_rate, b1, b2, eps, eps_root, None, weight_decay
    inner = checked("lpmm_adam", moments, optax.adamw, *arguments, nesterov=nesterov)
    weights = quantized_weights(rounding=rounding)
    return lowbit(inner, weights=weights, moments=moments, **options)


def _dynamic(
    alias: str, bits: int | None, block_size: int | None, rounding: Rounding
) -> MomentFormat:
    """Return the format of the momentum. Errors name the arguments of ``alias``."""
    bits = 8 if bits is None else bits
    block_size = PAPER_BLOCK_SIZE if block_size is None else block_size
    check_static_int(alias, "momentum_bits", bits, 4, 8)
    if bits not in (4, 8):
        raise ValueError(f"{alias}: momentum_bits must be 4 or 8, got {bits}")
    check_static_int(alias, "block_size", block_size, 1)
    check_block_size(alias, block_size)
    check_choice(alias, "rounding", rounding, Rounding)
    return formats.block_quantized(
        bits, code="dynamic", block_size=block_size, rounding=rounding
    )
