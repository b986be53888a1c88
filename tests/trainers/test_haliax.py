"""haliax' ``apply_updates``, which Levanter calls, on equinox' layers.

Those of haliax itself call what JAX 0.12 does not have.
"""

import equinox
import jax
import jax.numpy as jnp
import pytest
from side_by_side import (
    HIDDEN,
    LEARNING_RATE,
    OURS,
    WIDTH,
    batches,
    compare,
    squared_error,
    with_narrow_updates,
)

quantization = pytest.importorskip("haliax.quantization", exc_type=ImportError)

LINES = (
    "tx = lowbit_optax.lowbit_adamw(learning_rate, match_grad_dtype=True)",
    "model = jax.tree.map(to_bfloat16, model)  # arrays of floats",
)


def _error(model, inputs, targets):
    return squared_error(jax.vmap(model)(inputs), targets)


def _advance(tx):
    @equinox.filter_jit
    def advance(model, state, inputs, targets):
        grads = equinox.filter_grad(_error)(model, inputs, targets)
        overwrites, grads = quantization.partition_for_grad_overwrite(grads)
        params = equinox.filter(model, equinox.is_inexact_array)
        updates, state = tx.update(grads, state, params)
        return quantization.apply_updates(model, updates, overwrites), state

    return advance


def _run(tx, dtype):
    model = equinox.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, jnp.tanh, key=jax.random.key(0))
    params, static = equinox.partition(model, equinox.is_inexact_array)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    model = equinox.combine(params, static)
    state = tx.init(equinox.filter(model, equinox.is_inexact_array))
    advance = _advance(tx)
    for inputs, targets in zip(*(x[:-1] for x in batches()), strict=True):
        model, state = advance(model, state, inputs, targets)
    params = equinox.filter(model, equinox.is_inexact_array)
    return _error(model, *(x[-1] for x in batches())), params, state


def test_it_trains_like_float32():
    compare("haliax apply_updates", "haliax", LINES, with_narrow_updates(_run))


@pytest.mark.parametrize("name", OURS)
def test_parameters_that_it_made_float32_are_noticed(name):
    with pytest.raises((TypeError, ValueError), match=r"lowbit_optax\.apply_updates"):
        _run(OURS[name](LEARNING_RATE), jnp.bfloat16)
