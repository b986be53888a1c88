"""Trains with lookahead inside ``lowbit``, with the slow weights in the state.

    python examples/lookahead.py

``optax.lookahead`` needs pairs of fast and slow weights, but only the fast weights have
gradients. Here, ``params`` are the fast weights.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import lowbit_optax


def lookahead(fast: optax.GradientTransformation, period: int, rate: float):
    """Returns ``optax.lookahead`` whose last item of the state is the slow weights."""
    pairs: Any = optax.lookahead(fast, period, rate)
    pair: Any = optax.LookaheadParams

    def init(params):
        return *pairs.init(pair(params, params)), params

    def update(updates, state, params=None):
        fast, count, slow = state
        state = optax.LookaheadState(fast, count)
        updates, state = pairs.update(updates, state, pair(params, slow))
        return updates.fast, (*state, optax.apply_updates(slow, updates.slow))

    return optax.GradientTransformation(init, update)


if __name__ == "__main__":
    tx = lowbit_optax.lowbit(lookahead(optax.adamw(1e-2), period=5, rate=0.5))
    params, state = lowbit_optax.from_master(tx, {"w": jnp.ones((64, 64))})
    loss_fn = lambda params: jnp.mean(params["w"].astype(jnp.float32) ** 2)
    step = jax.jit(lowbit_optax.step, static_argnums=0)
    for _ in range(10):
        params, state = step(tx, params, state, jax.grad(loss_fn)(params))
    slow = state.inner_state[-1]  # evaluate with these
    print(f"loss {loss_fn(slow):.2f}")
