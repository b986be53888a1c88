"""SGD with momentum, and Adam, with all of their memory in few bits."""

import optax

from lowbit_optax import formats
from lowbit_optax.aliases import common, sgd
from lowbit_optax.formats import MomentFormat
from lowbit_optax.formats.quantized_tensor import DEFAULT_GROUP, Rounding
from lowbit_optax.lpmm.quantized import quantized
from lowbit_optax.transformation import LowbitTransformation


def lpmm_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | None = None,
    nesterov: bool = False,
    *,
    weight_decay: float = 0.0,
    momentum_bits: int = 8,
    block_size: int = DEFAULT_GROUP,
    rounding: Rounding = "stochastic",
    seed: int | None = None,
    min_size: int | None = None,
) -> LowbitTransformation:
    """SGD with momentum on quantised weights.

        m_t = Q(beta m_{t-1} + g_t);  theta_t = Q(theta_{t-1} - alpha m_t)

    With 12-bit weights, 8-bit momentum and, by
    :func:`lowbit_optax.accumulate_gradients`, 8-bit accumulators that is the paper's 28
    bits a parameter, beside the scales.

    Args:
      learning_rate, momentum, nesterov: as in ``optax.sgd``.
      weight_decay: added to the gradient (not decoupled).
      momentum_bits: 8 or 4, in Dettmers' dynamic exponent code, as in the paper.
      block_size: values of the momentum that share a scale. The weights' is in
        :func:`lowbit_optax.quantize_params`.
      rounding: of weights and momentum.
      seed, min_size: see :func:`lowbit_optax.lpmm.quantized`.

    Returns:
      An optax transformation for trees from :func:`lowbit_optax.quantize_params`.

    References:
      LPMM, Algorithm 1 and section 5.1.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> params = lowbit_optax.quantize_params(jnp.ones((64, 64)), bits=12)
    >>> tx = lpmm_sgd(0.1, 0.9)
    >>> tx.init(params).inner_state[0].trace.codes.shape
    (16, 64)
    """
    inner = sgd.plain_sgd(learning_rate, momentum, nesterov, None, weight_decay)
    moments = {"trace": _dynamic(momentum_bits, block_size, rounding)}
    return quantized(
        inner,
        moments=None if momentum is None else moments,
        rounding=rounding,
        seed=seed,
        min_size=min_size,
    )


def lpmm_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    momentum_bits: int = 8,
    block_size: int = DEFAULT_GROUP,
    rounding: Rounding = "stochastic",
    seed: int | None = None,
    min_size: int | None = None,
) -> LowbitTransformation:
    """Adam, or with weight decay AdamW, on quantised weights.

    Args:
      learning_rate, b1, b2, eps, eps_root, nesterov: as in ``optax.adam``.
      weight_decay: decoupled, as in ``optax.adamw``.
      momentum_bits, block_size, rounding: of the first moment, as in
        :func:`lpmm_sgd`. The second is ``block_quantized(8)``, which never lets a value
        become 0.
      seed, min_size: see :func:`lowbit_optax.lpmm.quantized`.

    Returns:
      An optax transformation for trees from :func:`lowbit_optax.quantize_params`.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> params = lowbit_optax.quantize_params(jnp.ones((64, 64)), bits=12)
    >>> lpmm_adam(1e-3).init(params).inner_state[0].nu.codes.shape
    (16, 64)
    """
    common.wide(learning_rate=learning_rate, b1=b1, b2=b2, weight_decay=weight_decay)
    inner = optax.adamw(
        learning_rate,
        b1,
        b2,
        eps,
        eps_root,
        weight_decay=weight_decay,
        nesterov=nesterov,
    )
    moments = {
        "mu": _dynamic(momentum_bits, block_size, rounding),
        # Rounded to nearest a second moment would not decay, whatever the weights do.
        "nu": formats.block_quantized(8),
    }
    return quantized(
        inner, moments=moments, rounding=rounding, seed=seed, min_size=min_size
    )


def _dynamic(bits: int, block_size: int, rounding: Rounding) -> MomentFormat:
    return formats.block_quantized(
        bits, code="dynamic", block_size=block_size, rounding=rounding
    )
