"""equinox: its ``apply_updates``, and checkpoints by ``tree_serialise_leaves``."""

import jax
import jax.numpy as jnp
import pytest
from optimizers import assert_same_bits
from side_by_side import (
    HIDDEN,
    LEARNING_RATE,
    OURS,
    STEPS,
    WIDTH,
    batches,
    compare,
    note_restored,
    squared_error,
    with_narrow_updates,
)

import lowbit_optax

equinox = pytest.importorskip("equinox")

LINES = (
    "tx = lowbit_optax.lowbit_adamw(learning_rate)",
    "model = jax.tree.map(to_bfloat16, model)  # arrays of floats",
    "params = lowbit_optax.apply_updates(params, updates)",
)


def _model(dtype):
    key = jax.random.key(0)
    model = equinox.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, activation=jnp.tanh, key=key)
    params, static = equinox.partition(model, equinox.is_inexact_array)
    return equinox.combine(jax.tree.map(lambda x: x.astype(dtype), params), static)


def _error(model, inputs, targets):
    return squared_error(jax.vmap(model)(inputs), targets)


def _advance(tx, apply_updates):
    @equinox.filter_jit
    def advance(model, state, inputs, targets):
        grads = equinox.filter_grad(_error)(model, inputs, targets)
        updates, state = tx.update(
            grads, state, equinox.filter(model, equinox.is_inexact_array)
        )
        return apply_updates(model, updates), state

    return advance


def _apply(model, updates):
    params, static = equinox.partition(model, equinox.is_inexact_array)
    return equinox.combine(lowbit_optax.apply_updates(params, updates), static)


def _start(tx, dtype):
    model = _model(dtype)
    return model, tx.init(equinox.filter(model, equinox.is_inexact_array))


def _train(advance, model, state, steps):
    for inputs, targets in zip(*(x[steps] for x in batches()), strict=True):
        model, state = advance(model, state, inputs, targets)
    return model, state


def _with(apply_updates):
    def run(tx, dtype):
        advance = _advance(tx, apply_updates)
        model, state = _train(advance, *_start(tx, dtype), slice(STEPS))
        params = equinox.filter(model, equinox.is_inexact_array)
        return _error(model, *(x[-1] for x in batches())), params, state

    return run


def test_it_trains_like_float32():
    compare("equinox", "equinox", LINES, _with(_apply))


def test_by_its_own_apply_updates_they_train_with_updates_of_their_dtype():
    run = with_narrow_updates(_with(equinox.apply_updates))
    lines = (
        "tx = lowbit_optax.lowbit_adamw(learning_rate, match_grad_dtype=True)",
        LINES[1],
    )
    compare("equinox apply_updates", "equinox", lines, run)


@pytest.mark.parametrize("name", OURS)
def test_a_restored_run_goes_on_as_if_it_had_not_stopped(name, tmp_path):
    tx = OURS[name](LEARNING_RATE)
    advance, start = _advance(tx, _apply), _start(tx, jnp.bfloat16)
    half = _train(advance, *start, slice(STEPS // 2))
    equinox.tree_serialise_leaves(tmp_path / "half.eqx", half)
    restored = equinox.tree_deserialise_leaves(tmp_path / "half.eqx", start)
    ends = [
        _train(advance, *pair, slice(STEPS // 2, STEPS)) for pair in (half, restored)
    ]
    arrays = lambda tree: equinox.filter(tree, equinox.is_array)
    assert_same_bits(arrays(ends[1]), arrays(ends[0]))
    note_restored("equinox", name, "the same device")
