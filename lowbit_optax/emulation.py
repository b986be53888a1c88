"""SGD and AdamW as a 16-bit unit computes them: every operation rounds to nearest.

The unit of Zamirai et al. 2020 knows one format of 16 bits. Each product, sum,
quotient and root is rounded to it, hyperparameters are numbers of it, and so are the
weights, their compensations and the moments. This is for studying such a unit. The
aliases, such as :func:`lowbit_optax.kahan_sgd`, store as little, but compute in
float32: that is faster and loses less.

The values are float32 arrays that hold only numbers of the format, since XLA may drop a
cast to 16 bits and back, and keeps these roundings.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowbit_optax import formats
from lowbit_optax._numerics.dtypes import dtype_of
from lowbit_optax._numerics.rounding import round_to_precision
from lowbit_optax.aliases import common
from lowbit_optax.formats import WeightFormat
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
      count: int32 scalar, steps taken.
      trace: tree of momentum arrays, in the unit's dtype and the parameters' shapes.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]: tuple's
    trace: optax.Updates


class SixteenBitAdamState(typing.NamedTuple):
    """State of :func:`sixteen_bit_adamw`, in ``LowbitState.inner_state``.

    Args:
      count: int32 scalar, steps taken.
      c1, c2: float32 scalars, the products of all b1 and of all b2 so far.
      mu, nu: trees of moments, in the unit's dtype and the parameters' shapes.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]: tuple's
    c1: jax.Array
    c2: jax.Array
    mu: optax.Updates
    nu: optax.Updates


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

    With q for the rounding to the nearest number of the unit's format:

        g_t = q(grad + q(d w))
        m_t = q(q(mu m_{t-1}) + g_t)
        u_t = -q(eta_t m_t)

    and, for the three roundings of the weights,

        "kahan"        y = q(u_t - c);  s = q(w + y);  c = q(q(s - w) - y);  w = s
        "stochastic"   w = SR(w + u_t)
        "nearest"      w = q(w + u_t)

    Args:
      learning_rate: eta, a number or a schedule, rounded to the format at each step.
      momentum: mu.
      weight_decay: d, added to the gradient (not decoupled).
      rounding: of the weights, one of the three above, or a weight format such as
        ``lowbit_optax.kahan(rounding="stochastic", arithmetic="param")``.
      dtype: the unit's format, bfloat16 or float16, and the parameters' dtype.
      seed: of stochastic rounding, 0 if None.
      implementation: see :func:`lowbit_optax.lowbit`.

    Returns:
      An optax transformation for parameters in ``dtype``, for
      :func:`lowbit_optax.step` or as usual. Parameters and state take 6 bytes per
      parameter with ``"kahan"``, and 4 otherwise.

    Raises:
      TypeError, ValueError: for arguments that are not as above.

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
    >>> for _ in range(17):  # 16 steps of 2^-11, after the momentum has risen
    ...     w, state = train_step(w, state)
    >>> w
    Array([0.992188, 0.992188], dtype=bfloat16)
    """
    alias = "sixteen_bit_sgd"
    numbers = {"momentum": momentum, "weight_decay": weight_decay}
    dtype = _checked_dtype(alias, dtype, learning_rate, numbers)
    q = lambda x: round_to_precision(jnp.asarray(x, jnp.float32), dtype)
    mu, d = q(momentum), q(weight_decay)
    # Zero times an infinite weight would be NaN.
    decay = lambda w: q(d * w) if weight_decay else jnp.zeros_like(w)

    def init_fn(params):
        count, trace = jnp.zeros([], jnp.int32), optax.tree.zeros_like(params)
        return SixteenBitSgdState(count, trace)

    def update_fn(updates, state, params=None):
        """Lines 3 to 5 of Algorithm 2, and 4 to 6 of Algorithm 3: u_t."""
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

    With q for the rounding to the nearest number of the unit's format, and c1 and c2
    starting from 1:

        m_t = q(q(b1 m_{t-1}) + q(q(1 - b1) g_t))
        v_t = q(q(b2 v_{t-1}) + q(q(1 - b2) q(g_t^2)))
        c1  = q(c1 b1);  c2 = q(c2 b2)
        m'  = q(m_t / q(1 - c1))
        v'  = q(sqrt(q(v_t / q(1 - c2))))
        u_t = -q(q(q(eta_t m') / q(v' + eps)) + q(q(eta_t d) w))

    u_t is added to the weight as in :func:`sixteen_bit_sgd`.

    0.999 is 1 in bfloat16, and then the second moment would never decay and its bias
    correction divide by zero. The paper takes a b2 of 0.997.

    Args:
      learning_rate: eta, a number or a schedule, rounded to the format at each step.
      b1, b2: below 1 in the format.
      eps: above 0 in the format.
      weight_decay: d, decoupled.
      rounding, dtype, seed, implementation: as in :func:`sixteen_bit_sgd`.

    Returns:
      An optax transformation for parameters in ``dtype``, for
      :func:`lowbit_optax.step` or as usual. Parameters and state take 8 bytes per
      parameter with ``"kahan"``, and 6 otherwise.

    Raises:
      TypeError, ValueError: for arguments that are not as above.

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
    ValueError: sixteen_bit_adamw: b2 is 0.999, which is 1 in bfloat16; take 0.997 or
    smaller
    """
    alias = "sixteen_bit_adamw"
    numbers = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
    dtype = _checked_dtype(alias, dtype, learning_rate, numbers)
    for name, beta in (("b1", b1), ("b2", b2)):
        if float(np.asarray(beta, dtype)) >= 1:
            raise ValueError(
                f"{alias}: {name} is {beta}, which is 1 in {dtype}; take 0.997 or "
                "smaller"
            )
    if float(np.asarray(eps, dtype)) <= 0:
        raise ValueError(
            f"{alias}: eps is {eps}, which is not above 0 in {dtype}; take "
            f"{float(jnp.finfo(dtype).smallest_subnormal):.1e} or larger"
        )
    q = lambda x: round_to_precision(jnp.asarray(x, jnp.float32), dtype)
    beta1, beta2, epsilon, d = q(b1), q(b2), q(eps), q(weight_decay)
    rest1, rest2 = q(1 - beta1), q(1 - beta2)
    # Zero times an infinite weight would be NaN.
    decay = lambda d, w: q(d * w) if weight_decay else jnp.zeros_like(w)

    def init_fn(params):
        count, one = jnp.zeros([], jnp.int32), jnp.ones([], jnp.float32)
        mu, nu = optax.tree.zeros_like(params), optax.tree.zeros_like(params)
        return SixteenBitAdamState(count, one, one, mu, nu)

    def update_fn(updates, state, params=None):
        """Lines 5 to 11 of Algorithm 4, and 6 to 12 of Algorithm 5: u_t."""
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
    """The weights and the moments of these names, stored as the unit has them."""
    weights = _WEIGHTS.get(rounding) if isinstance(rounding, str) else rounding
    if not isinstance(weights, WeightFormat):
        raise ValueError(
            f"{alias}: rounding is {rounding!r}, not 'kahan', 'stochastic', 'nearest' "
            "or a weight format"
        )
    return lowbit(
        inner,
        weights=weights,
        # The moments are numbers of the format already: rounding them is exact.
        moments=dict.fromkeys(moments, formats.cast(dtype, rounding="nearest")),
        seed=seed,
        implementation=implementation,
    )


def _checked_dtype(
    alias: str,
    dtype: jax.typing.DTypeLike,
    learning_rate: optax.ScalarOrSchedule,
    hyperparameters: dict[str, float],
) -> np.dtype:
    """The unit's dtype; raises if it or a number is not as the aliases accept it."""
    dtype = dtype_of(f"{alias}: dtype", dtype)
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"{alias}: dtype is {dtype}, not bfloat16 or float16")
    common.check_learning_rate(alias, learning_rate)
    for name, value in hyperparameters.items():
        if isinstance(value, jax.Array):
            raise TypeError(
                f"{alias}: {name} is a {value.dtype} array, and only learning_rate may "
                "be one; with optax.inject_hyperparams name the others in static_args"
            )
    common.check_numbers(alias, **hyperparameters)
    return dtype


def _at(learning_rate: optax.ScalarOrSchedule, count: jax.Array):
    return learning_rate(count) if callable(learning_rate) else learning_rate
