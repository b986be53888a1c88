"""SGD and AdamW in pure 16-bit arithmetic, where every operation rounds to nearest.

The 16-bit unit of Zamirai et al. 2020 has a single 16-bit format. Every product, sum,
quotient and root is rounded to this format, and hyperparameters, weights, compensations
and moments are stored in it. Use this module to study such a unit. To train, use the
aliases, such as :func:`lowbit_optax.kahan_sgd`: they store the same number of bits, but
compute in float32, which is faster and more accurate.

The values are float32 arrays that contain only numbers of the format, because XLA may
remove a cast to 16 bits and back.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowbit_optax import formats
from lowbit_optax._numerics.dtypes import dtype_of
from lowbit_optax._numerics.rounding import round_to_precision
from lowbit_optax._step import trees
from lowbit_optax.aliases import common
from lowbit_optax.formats import WeightFormat
from lowbit_optax.formats.moment_fields import register_moments
from lowbit_optax.transformations.lowbit import lowbit
from pallas_kernels.platforms import Implementation

WeightRounding = typing.Literal["kahan", "stochastic", "nearest"]
_WEIGHTS: dict[str, WeightFormat] = {
    "kahan": formats.kahan(arithmetic="param"),
    "stochastic": formats.stochastic_rounding(),
    "nearest": formats.nearest(),
}


class SixteenBitSgdState(typing.NamedTuple):
    """State of :func:`sixteen_bit_sgd`, in ``LowbitState.inner_state``.

    Args:
      count: int32 scalar, the number of steps.
      trace: tree of momentum arrays in the 16-bit dtype, with the parameters' shapes.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]: tuple's
    trace: optax.Updates


class SixteenBitAdamState(typing.NamedTuple):
    """State of :func:`sixteen_bit_adamw`, in ``LowbitState.inner_state``.

    Args:
      count: int32 scalar, the number of steps.
      c1, c2: float32 scalars, b1 and b2 to the power of the number of steps.
      mu, nu: trees of moments in the 16-bit dtype, with the parameters' shapes.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]: tuple's
    c1: jax.Array
    c2: jax.Array
    mu: optax.Updates
    nu: optax.Updates


# Its second moment is 0 where the unit computes 0, so float16 can store it.
register_moments(SixteenBitAdamState, averages=("mu", "nu"))


def sixteen_bit_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.0,
    *,
    weight_decay: float = 0.0,
    rounding: WeightRounding | WeightFormat = "kahan",
    dtype: jax.typing.DTypeLike = "bfloat16",
    seed: int | None = None,
    implementation: Implementation = None,
) -> optax.GradientTransformationExtraArgs:
    """SGD with momentum in 16-bit arithmetic.

    The function q rounds to the nearest number of the 16-bit format:

        g_t = q(grad + q(d w))
        m_t = q(q(mu m_{t-1}) + g_t)
        u_t = -q(eta_t m_t)

    The update depends on ``rounding``:

        "kahan"        y = q(u_t - c);  s = q(w + y);  c = q(q(s - w) - y);  w = s
        "stochastic"   w = SR(w + u_t)
        "nearest"      w = q(w + u_t)

    Args:
      learning_rate: the learning rate eta, a number or a schedule. Each step rounds it
        to the format.
      momentum: the decay rate mu.
      weight_decay: the factor d of an L2 penalty, which is not decoupled.
      rounding: how weights are rounded: ``"kahan"``, ``"stochastic"``, ``"nearest"``,
        or a weight format such as
        ``lowbit_optax.kahan(rounding="stochastic", arithmetic="param")``.
      dtype: the 16-bit format, bfloat16 or float16; parameters must have this dtype.
      seed: seed for stochastic rounding, 0 if None.
      implementation: see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation for parameters in ``dtype``. Apply it with
      :func:`lowbit_optax.step`, or as in optax. A parameter and its state need 6 bytes
      with ``"kahan"``, and 4 otherwise.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value.

    References:
      Zamirai et al. 2020, Algorithm 2 (``"stochastic"``) and Algorithm 3 (``"kahan"``).

    >>> import lowbit_optax
    >>> tx = sixteen_bit_sgd(2.0**-12, 0.5)
    >>> w = jnp.ones(2, jnp.bfloat16)
    >>> @jax.jit
    ... def train_step(w, state):
    ...     grads = jax.grad(lambda w: jnp.sum(w))(w)
    ...     return lowbit_optax.step(tx, w, state, grads)
    >>> state = tx.init(w)
    >>> for _ in range(17):  # the momentum reaches 2^-11 after a few steps
    ...     w, state = train_step(w, state)
    >>> w
    Array([0.992188, 0.992188], dtype=bfloat16)
    """
    alias = "sixteen_bit_sgd"
    numbers = {"momentum": momentum, "weight_decay": weight_decay}
    dtype = _checked_dtype(alias, dtype, learning_rate, numbers)
    q = lambda x: round_to_precision(jnp.asarray(x, jnp.float32), dtype)
    mu, d = q(momentum), q(weight_decay)
    # The product of a zero decay and an infinite weight would be NaN.
    decay = lambda w: q(d * w) if weight_decay else jnp.zeros_like(w)

    def init_fn(params):
        count, trace = jnp.zeros([], jnp.int32), optax.tree.zeros_like(params)
        return SixteenBitSgdState(count, trace)

    def update_fn(updates, state, params=None):
        """Computes u_t: lines 3 to 5 of Algorithm 2, and 4 to 6 of Algorithm 3."""
        eta = q(_at(learning_rate, state.count))
        g = jax.tree.map(lambda g, w: q(q(g) + decay(w)), updates, params)
        m = jax.tree.map(lambda m, g: q(q(mu * m) + g), state.trace, g)
        u = jax.tree.map(lambda m: -q(eta * m), m)
        count = jnp.asarray(optax.safe_increment(state.count))
        return u, SixteenBitSgdState(count, m)

    inner = optax.GradientTransformation(init_fn, update_fn)
    return _in_unit(alias, inner, ("trace",), rounding, dtype, seed, implementation)


def sixteen_bit_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.997,
    eps: float = 1e-8,
    *,
    weight_decay: float = 0.0,
    rounding: WeightRounding | WeightFormat = "kahan",
    dtype: jax.typing.DTypeLike = "bfloat16",
    seed: int | None = None,
    implementation: Implementation = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW in 16-bit arithmetic.

    The function q rounds to the nearest number of the 16-bit format, and c1 and c2
    start at 1:

        m_t = q(q(b1 m_{t-1}) + q(q(1 - b1) g_t))
        v_t = q(q(b2 v_{t-1}) + q(q(1 - b2) q(g_t^2)))
        c1  = q(c1 b1);  c2 = q(c2 b2)
        m'  = q(m_t / q(1 - c1))
        v'  = q(sqrt(q(v_t / q(1 - c2))))
        u_t = -q(q(q(eta_t m') / q(v' + eps)) + q(q(eta_t d) w))

    u_t is added to the weight as in :func:`sixteen_bit_sgd`.

    The usual b2 of 0.999 rounds to 1 in bfloat16, so that the second moment would never
    decay and its bias correction would divide by zero. The paper uses 0.997.

    Args:
      learning_rate: the learning rate eta, a number or a schedule. Each step rounds it
        to the format.
      b1, b2: decay rates, which must be below 1 in the format.
      eps: a number that is above 0 in the format.
      weight_decay: the decoupled weight decay d.
      rounding, dtype, seed, implementation: see :func:`sixteen_bit_sgd`.

    Returns:
      An optax transformation for parameters in ``dtype``. Apply it with
      :func:`lowbit_optax.step`, or as in optax. A parameter and its state need 8 bytes
      with ``"kahan"``, and 6 otherwise.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value.

    References:
      Zamirai et al. 2020, Algorithm 4 (``"stochastic"``) and Algorithm 5 (``"kahan"``).

    >>> import lowbit_optax
    >>> tx = sixteen_bit_adamw(1e-3)
    >>> w = jnp.ones(2, jnp.bfloat16)
    >>> @jax.jit
    ... def train_step(w, state):
    ...     grads = jax.grad(lambda w: jnp.sum(w**2))(w)
    ...     return lowbit_optax.step(tx, w, state, grads)
    >>> state = tx.init(w)
    >>> for _ in range(10):
    ...     w, state = train_step(w, state)
    >>> w
    Array([0.988281, 0.988281], dtype=bfloat16)
    >>> sixteen_bit_adamw(1e-3, b2=0.999)
    Traceback (most recent call last):
        ...
    ValueError: sixteen_bit_adamw: b2 is 0.999, which is 1 in bfloat16; use at most
    0.997
    """
    alias = "sixteen_bit_adamw"
    numbers = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
    dtype = _checked_dtype(alias, dtype, learning_rate, numbers)
    for name, beta in (("b1", b1), ("b2", b2)):
        if float(np.asarray(beta, dtype)) >= 1:
            raise ValueError(
                f"{alias}: {name} is {beta}, which is 1 in {dtype}; use at most 0.997"
            )
    if float(np.asarray(eps, dtype)) <= 0:
        raise ValueError(
            f"{alias}: eps is {eps}, which is 0 in {dtype}; use at least "
            f"{float(jnp.finfo(dtype).smallest_subnormal):.1e}"
        )
    q = lambda x: round_to_precision(jnp.asarray(x, jnp.float32), dtype)
    beta1, beta2, epsilon, d = q(b1), q(b2), q(eps), q(weight_decay)
    rest1, rest2 = q(1 - beta1), q(1 - beta2)
    # The product of a zero decay and an infinite weight would be NaN.
    decay = lambda d, w: q(d * w) if weight_decay else jnp.zeros_like(w)

    def init_fn(params):
        count, one = jnp.zeros([], jnp.int32), jnp.ones([], jnp.float32)
        mu, nu = optax.tree.zeros_like(params), optax.tree.zeros_like(params)
        return SixteenBitAdamState(count, one, one, mu, nu)

    def update_fn(updates, state, params=None):
        """Computes u_t: lines 5 to 11 of Algorithm 4, and 6 to 12 of Algorithm 5."""
        eta = q(_at(learning_rate, state.count))
        g = jax.tree.map(q, updates)
        m = jax.tree.map(lambda m, g: q(q(beta1 * m) + q(rest1 * g)), state.mu, g)
        v = jax.tree.map(
            lambda v, g: q(q(beta2 * v) + q(rest2 * q(g * g))), state.nu, g
        )
        c1, c2 = q(state.c1 * beta1), q(state.c2 * beta2)

        def update(m, v, w):
            m_hat = q(m / q(1 - c1))
            v_hat = q(jnp.sqrt(q(v / q(1 - c2))))
            moved = q(q(eta * m_hat) / q(v_hat + epsilon))
            return -q(moved + decay(q(eta * d), w))

        u = jax.tree.map(update, m, v, params)
        count = jnp.asarray(optax.safe_increment(state.count))
        return u, SixteenBitAdamState(count, c1, c2, m, v)

    inner = optax.GradientTransformation(init_fn, update_fn)
    return _in_unit(alias, inner, ("mu", "nu"), rounding, dtype, seed, implementation)


def _in_unit(
    alias: str,
    inner: optax.GradientTransformation,
    moments: tuple[str, ...],
    rounding: WeightRounding | WeightFormat,
    dtype: np.dtype,
    seed: int | None,
    implementation: Implementation,
) -> optax.GradientTransformationExtraArgs:
    """Returns ``inner`` with weights and moments stored in the 16-bit format."""
    weights = _WEIGHTS.get(rounding) if isinstance(rounding, str) else rounding
    if not isinstance(weights, WeightFormat):
        raise ValueError(
            f"{alias}: rounding must be 'kahan', 'stochastic', 'nearest' or a weight "
            f"format, got {rounding!r}"
        )
    tx = lowbit(
        inner,
        weights=weights,
        # Moments are already numbers of the format, so rounding them is exact.
        moments=dict.fromkeys(moments, formats.cast(dtype, rounding="nearest")),
        seed=seed,
        implementation=implementation,
    )

    def init(params):
        for name, x in trees.by_path(params).items():
            if trees.is_float(x) and x.dtype != dtype:
                raise TypeError(f"{alias}: params{name} must be {dtype}, got {x.dtype}")
        return tx.init(params)

    return tx._replace(init=init)


def _checked_dtype(
    alias: str,
    dtype: jax.typing.DTypeLike,
    learning_rate: optax.ScalarOrSchedule,
    hyperparameters: dict[str, float],
) -> np.dtype:
    """Checks the hyperparameters and returns the 16-bit dtype."""
    dtype = dtype_of(f"{alias}: dtype", dtype)
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"{alias}: dtype must be bfloat16 or float16, got {dtype}")
    common.check_learning_rate(alias, learning_rate)
    for name, value in hyperparameters.items():
        if isinstance(value, jax.Array):
            raise TypeError(
                f"{alias}: {name} is a {value.dtype} array, but only learning_rate may "
                "be one; with optax.inject_hyperparams, add the others to static_args"
            )
    common.check_numbers(alias, **hyperparameters)
    return dtype


def _at(learning_rate: optax.ScalarOrSchedule, count: jax.Array):
    return learning_rate(count) if callable(learning_rate) else learning_rate
