"""haiku's modules, with optax's own two lines for a step."""

import jax
import jax.numpy as jnp
import optax
import pytest
from side_by_side import (
    HIDDEN,
    STEPS,
    WIDTH,
    batches,
    compare,
    narrow,
    squared_error,
)

haiku = pytest.importorskip("haiku")

LINES = (
    "tx = lowbit_optax.lowbit_adamw(learning_rate)",
    "params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)",
)


def _run(tx, dtype):
    model = haiku.without_apply_rng(
        haiku.transform(lambda x: haiku.nets.MLP([HIDDEN, WIDTH])(x))
    )
    params = narrow(model.init(jax.random.key(0), jnp.ones((1, WIDTH))), dtype)
    state = tx.init(params)
    loss = lambda params, x, y: squared_error(model.apply(params, x), y)

    @jax.jit
    def advance(params, state, inputs, targets):
        grads = jax.grad(loss)(params, inputs, targets)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    inputs, targets = batches()
    for step in range(STEPS):
        params, state = advance(params, state, inputs[step], targets[step])
    return loss(params, inputs[-1], targets[-1]), params, state


def test_it_trains_like_float32():
    compare("haiku", "dm-haiku", LINES, _run)
