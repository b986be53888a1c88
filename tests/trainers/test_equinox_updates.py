"""equinox's ``apply_updates``, and its checkpoints from ``tree_serialise_leaves``.

haliax's ``apply_updates``, which Levanter calls, is tested with equinox layers: the
layers of haliax call a function that JAX 0.12 does not have.
"""

import jax
import jax.numpy as jnp
import pytest

import lowbit_optax
from tests.helpers.optimizers import assert_same_bits
from tests.helpers.side_by_side import (
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

equinox = pytest.importorskip("equinox")


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


def _haliax_advance(tx):
    quantization = pytest.importorskip("haliax.quantization", exc_type=ImportError)

    @equinox.filter_jit
    def advance(model, state, inputs, targets):
        grads = equinox.filter_grad(_error)(model, inputs, targets)
        overwrites, grads = quantization.partition_for_grad_overwrite(grads)
        params = equinox.filter(model, equinox.is_inexact_array)
        updates, state = tx.update(grads, state, params)
        return quantization.apply_updates(model, updates, overwrites), state

    return advance


def _by(make_advance):
    def run(tx, dtype):
        start = _start(tx, dtype)
        model, state = _train(make_advance(tx), *start, slice(STEPS))
        params = equinox.filter(model, equinox.is_inexact_array)
        return _error(model, *(x[-1] for x in batches())), params, state

    return run


def _by_its_own(tx):
    return _advance(tx, equinox.apply_updates)


def test_it_trains_like_float32():
    compare("equinox", "equinox", _by(lambda tx: _advance(tx, _apply)))


@pytest.mark.parametrize(
    ("package", "make_advance"),
    [("equinox", _by_its_own), ("haliax", _haliax_advance)],
)
def test_other_apply_updates_train_with_updates_of_matching_dtype(
    package, make_advance
):
    run = with_narrow_updates(_by(make_advance))
    compare(f"{package} apply_updates", package, run)


@pytest.mark.parametrize("name", OURS)
def test_parameters_that_haliax_made_float32_are_noticed(name):
    with pytest.raises((TypeError, ValueError), match=r"lowbit_optax\.apply_updates"):
        _by(_haliax_advance)(OURS[name](LEARNING_RATE), jnp.bfloat16)


@pytest.mark.parametrize("name", OURS)
def test_a_restored_run_continues_as_if_it_had_not_stopped(name, tmp_path):
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
    note_restored("equinox", name, "1 to 1")
