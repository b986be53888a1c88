"""A Keras model on JAX, by ``stateless_call``, with optax's own lines for a step."""

import os

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

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras")

LINES = (
    "tx = lowbit_optax.lowbit_adamw(learning_rate)",
    "params = [x.value.astype(jnp.bfloat16) for x in model.trainable_variables]",
)


def _run(tx, dtype):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Dense(HIDDEN, activation="tanh"), keras.layers.Dense(WIDTH)]
    )
    model.build((None, WIDTH))
    params = narrow([x.value for x in model.trainable_variables], dtype)
    others = [x.value for x in model.non_trainable_variables]
    state = tx.init(params)

    def loss(params, inputs, targets):
        outputs, _ = model.stateless_call(params, others, inputs)
        return squared_error(outputs, targets)

    @jax.jit
    def advance(params, state, inputs, targets):
        grads = jax.grad(loss)(params, inputs, targets)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    inputs, targets = map(jnp.asarray, batches())
    for step in range(STEPS):
        params, state = advance(params, state, inputs[step], targets[step])
    return loss(params, inputs[-1], targets[-1]), params, state


def test_it_trains_like_float32():
    compare("Keras stateless_call", "keras", LINES, _run)
