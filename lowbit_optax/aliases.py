"""The optimizers people name: optax's aliases in a weight format.

Each takes its optax alias's arguments in their order, then keyword-only options.
"""

import functools
import typing
from collections.abc import Callable

import jax.numpy as jnp
import optax

from lowbit_optax import formats, sixteen_bit
from lowbit_optax.float_layouts import is_narrow
from lowbit_optax.moments import Moments
from lowbit_optax.wrapper import LowbitTransformation, lowbit

Mask = typing.Any | Callable[[optax.Params], typing.Any] | None
Arithmetic = typing.Literal["float32", "param"]

_BFLOAT16 = formats.cast(jnp.bfloat16)
"""The papers' moments, rounded stochastically so that they do not get stuck."""


def kahan_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: typing.Any = None,
    *,
    weight_decay: float = 0.0,
    rounding: typing.Literal["nearest", "stochastic"] = "nearest",
    residual_rounding: typing.Literal["nearest", "stochastic"] | None = None,
    arithmetic: Arithmetic = "float32",
    moments: Moments = _BFLOAT16,
    seed: int | None = None,
    min_size: int | None = None,
    implementation: str | None = None,
) -> LowbitTransformation:
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
        _only_float32(moments, nesterov=nesterov, accumulator_dtype=accumulator_dtype)
        return _unit_sgd(learning_rate, momentum, weight_decay, weights, options)
    inner = _sgd(learning_rate, momentum, nesterov, accumulator_dtype, weight_decay)
    return lowbit(inner, weights=weights, moments=moments, **options)


def sr_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: typing.Any = None,
    *,
    weight_decay: float = 0.0,
    arithmetic: Arithmetic = "float32",
    moments: Moments = _BFLOAT16,
    seed: int | None = None,
    min_size: int | None = None,
    implementation: str | None = None,
) -> LowbitTransformation:
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
    if _is_param(arithmetic):
        _only_float32(moments, nesterov=nesterov, accumulator_dtype=accumulator_dtype)
        return _unit_sgd(learning_rate, momentum, weight_decay, weights, options)
    inner = _sgd(learning_rate, momentum, nesterov, accumulator_dtype, weight_decay)
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
    moments: Moments = None,
    seed: int | None = None,
    min_size: int | None = None,
    implementation: str | None = None,
) -> LowbitTransformation:
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
    >>> extra_bits_sgd(0.1, 0.9, bits=8).config.weights.bits
    8
    """
    return lowbit(
        _sgd(learning_rate, momentum, nesterov, accumulator_dtype, weight_decay),
        weights=_extra_bits(bits, rounding, residual_rounding),
        moments=moments,
        seed=seed,
        min_size=min_size,
        implementation=implementation,
    )


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
    arithmetic: Arithmetic = "float32",
    moments: Moments = _BFLOAT16,
    seed: int | None = None,
    min_size: int | None = None,
    implementation: str | None = None,
) -> LowbitTransformation:
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
        _only_float32(
            moments, eps_root=eps_root, mu_dtype=mu_dtype, mask=mask, nesterov=nesterov
        )
        return _unit_adamw(learning_rate, b1, b2, eps, weight_decay, weights, options)
    inner = _adamw(
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
    arithmetic: Arithmetic = "float32",
    moments: Moments = _BFLOAT16,
    seed: int | None = None,
    min_size: int | None = None,
    implementation: str | None = None,
) -> LowbitTransformation:
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
    if _is_param(arithmetic):
        _only_float32(
            moments, eps_root=eps_root, mu_dtype=mu_dtype, mask=mask, nesterov=nesterov
        )
        return _unit_adamw(learning_rate, b1, b2, eps, weight_decay, weights, options)
    inner = _adamw(
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
    moments: Moments = None,
    seed: int | None = None,
    min_size: int | None = None,
    implementation: str | None = None,
) -> LowbitTransformation:
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
    inner = _adamw(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov
    )
    return lowbit(
        inner,
        weights=_extra_bits(bits, rounding, residual_rounding),
        moments=moments,
        seed=seed,
        min_size=min_size,
        implementation=implementation,
    )


def _extra_bits(bits, rounding, residual_rounding):
    return formats.extra_bits(
        16 if bits is None else bits,
        rounding=rounding,
        residual_rounding=residual_rounding,
    )


def _adamw(
    learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov
):
    _wide(learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
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


def _sgd(learning_rate, momentum, nesterov, accumulator_dtype, weight_decay):
    _wide(learning_rate=learning_rate, momentum=momentum, weight_decay=weight_decay)
    inner = optax.sgd(learning_rate, momentum, nesterov, accumulator_dtype)
    # A traced weight decay (inject_hyperparams) cannot be compared with zero.
    if isinstance(weight_decay, (int, float)) and weight_decay == 0:
        return inner
    return optax.chain(optax.add_decayed_weights(weight_decay), inner)


def _unit_sgd(learning_rate, momentum, weight_decay, weights, options):
    build = functools.partial(
        sixteen_bit.sixteen_bit_sgd, learning_rate, momentum or 0.0, weight_decay
    )
    return _unit(build, weights, options)


def _unit_adamw(learning_rate, b1, b2, eps, weight_decay, weights, options):
    build = functools.partial(
        sixteen_bit.sixteen_bit_adamw, learning_rate, b1, b2, eps, weight_decay
    )
    return _unit(build, weights, options)


def _unit(build, weights, options):
    # The unit's values are numbers of its format already: rounding them is exact.
    moments = formats.cast(jnp.bfloat16, rounding="nearest")
    return lowbit(build(jnp.bfloat16), weights=weights, moments=moments, **options)


def _wide(**hyperparameters) -> None:
    """Refuse numbers that arrive in 16 bits, where a b2 of 0.999 is 1.

    ``optax.inject_hyperparams`` stores them in the parameters' dtype unless told.
    """
    for name, value in hyperparameters.items():
        if hasattr(value, "dtype") and is_narrow(value.dtype):
            raise TypeError(
                f"{name} is a {value.dtype} array; accepted are Python numbers, "
                "float32 arrays and schedules. With optax.inject_hyperparams pass "
                "hyperparam_dtype=jnp.float32"
            )


def _is_param(arithmetic: str) -> bool:
    if arithmetic not in ("float32", "param"):
        raise ValueError(f"arithmetic is {arithmetic!r}, not 'float32' or 'param'")
    return arithmetic == "param"


def _only_float32(moments, **arguments) -> None:
    if moments is not _BFLOAT16:
        arguments["moments"] = moments
    for name, value in arguments.items():
        if value:
            raise ValueError(
                f"{name} is {value!r}, but arithmetic='param' runs the paper's "
                "algorithm, which has none; take arithmetic='float32'"
            )
