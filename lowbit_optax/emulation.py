"""SGD and AdamW as a 16-bit unit computes them: every operation rounds to nearest.

These are the updates of Zamirai et al. 2020, Algorithms 2 to 5, up to the addition to
the weight, which is the weight format's (``stochastic_rounding`` or ``kahan``). They
run when an alias is given ``arithmetic="param"``; the values stay float32 arrays that
hold only numbers of the format, since XLA may drop a cast and keeps these roundings.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowbit_optax._numerics.rounding import round_to_precision


class SixteenBitSgdState(typing.NamedTuple):
    """count: int32 scalar; trace: momentum, float32 arrays of 16-bit values."""

    count: jax.Array
    trace: optax.Updates


class SixteenBitAdamState(typing.NamedTuple):
    """count; the running products c1 and c2; mu and nu, float32 arrays."""

    count: jax.Array
    c1: jax.Array
    c2: jax.Array
    mu: optax.Updates
    nu: optax.Updates


def sixteen_bit_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float,
    weight_decay: float,
    dtype: jax.typing.DTypeLike,
) -> optax.GradientTransformation:
    """Algorithms 2 and 3, lines 3 to 6: SGD with momentum and weight decay.

    Args:
      learning_rate: eta, a number or a schedule.
      momentum: mu.
      weight_decay: d.
      dtype: of the unit, bfloat16 or float16.

    >>> sixteen_bit_sgd(0.1, 0.9, 0.0, "bfloat16").init(jnp.ones(2)).trace
    Array([0., 0.], dtype=float32)
    """
    q = lambda x: round_to_precision(jnp.asarray(x, jnp.float32), dtype)
    mu, d = q(momentum), q(weight_decay)
    # Zero times an infinite weight would be NaN.
    decay = lambda d, w: q(d * w) if weight_decay else jnp.zeros_like(w)

    def init_fn(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return SixteenBitSgdState(jnp.zeros([], jnp.int32), zeros)

    def update_fn(updates, state, params):
        eta = q(_at(learning_rate, state.count))
        g = jax.tree.map(lambda g, w: q(q(g) + decay(d, w)), updates, params)
        m = jax.tree.map(lambda m, g: q(q(mu * m) + g), state.trace, g)
        u = jax.tree.map(lambda m: -q(eta * m), m)
        return u, SixteenBitSgdState(optax.safe_increment(state.count), m)

    return optax.GradientTransformation(init_fn, update_fn)


def sixteen_bit_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    dtype: jax.typing.DTypeLike,
) -> optax.GradientTransformation:
    """Algorithms 4 and 5, lines 5 to 12: AdamW.

    0.999 is 1 in bfloat16, and then the second moment never decays and its bias
    correction divides by zero; the paper takes 0.997.

    Args:
      learning_rate: eta, a number or a schedule.
      b1, b2: beta1 and beta2, below 1 in the format.
      eps: epsilon.
      weight_decay: d, not multiplied into b1's and b2's averages.
      dtype: of the unit, bfloat16 or float16.

    Raises:
      ValueError: if b1 or b2 rounds to 1.

    >>> sixteen_bit_adamw(1e-3, 0.9, 0.999, 1e-8, 0.0, "bfloat16")
    Traceback (most recent call last):
        ...
    ValueError: b2 is 0.999, which is 1 in bfloat16; take 0.997 or smaller
    """
    q = lambda x: round_to_precision(jnp.asarray(x, jnp.float32), dtype)
    for name, beta in (("b1", b1), ("b2", b2)):
        if float(np.asarray(beta, np.dtype(dtype))) >= 1:
            raise ValueError(
                f"{name} is {beta}, which is 1 in {jnp.dtype(dtype).name}; take 0.997 "
                "or smaller"
            )
    beta1, beta2, epsilon, d = q(b1), q(b2), q(eps), q(weight_decay)
    rest1, rest2 = q(1 - beta1), q(1 - beta2)
    # Zero times an infinite weight would be NaN.
    decay = lambda d, w: q(d * w) if weight_decay else jnp.zeros_like(w)

    def init_fn(params):
        one = jnp.ones([], jnp.float32)
        mu = jax.tree.map(jnp.zeros_like, params)
        nu = jax.tree.map(jnp.zeros_like, params)
        return SixteenBitAdamState(jnp.zeros([], jnp.int32), one, one, mu, nu)

    def update_fn(updates, state, params):
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
        count = optax.safe_increment(state.count)
        return u, SixteenBitAdamState(count, c1, c2, m, v)

    return optax.GradientTransformation(init_fn, update_fn)


def _at(learning_rate: optax.ScalarOrSchedule, count: jax.Array):
    return learning_rate(count) if callable(learning_rate) else learning_rate
