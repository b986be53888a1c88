"""A user declares the moments of a transformation that optax does not have."""

import typing
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import lowbit_optax
from lowbit_optax.formats.block_quantized import QuantizedMoment, RelativeMoment
from lowbit_optax.states.checkpoints import storage_formats

pytestmark = pytest.mark.standard_promotion

PARAMS = {"w": jnp.ones((64, 64), jnp.bfloat16)}


def transformation(state_class):
    """Adam under other names, which the state's class has."""
    adam = optax.scale_by_adam()

    def update(updates, state, params=None):
        del params
        updates, new = adam.update(updates, optax.ScaleByAdamState(*state))
        return updates, state_class(*new)

    init = lambda params: state_class(*adam.init(params))
    return optax.GradientTransformation(init, update)


def new_class():
    class State(typing.NamedTuple):
        steps: typing.Any
        fast: typing.Any
        squares: typing.Any

    return State


def stored(state_class, moments=None):
    tx = lowbit_optax.lowbit(transformation(state_class), moments=moments)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    return tx, lowbit_optax.step(tx, PARAMS, tx.init(PARAMS), grads)[1].inner_state


def test_undeclared_moments_stay_float32():
    _, state = stored(new_class())
    assert state.fast["w"].dtype == state.squares["w"].dtype == jnp.float32


def test_registered_moments_are_stored_as_optaxs_own():
    state_class = new_class()
    lowbit_optax.formats.register_moments(
        state_class, averages=("fast", "squares"), second_moments=("squares",)
    )
    tx, state = stored(state_class)
    adam = lowbit_optax.lowbit(optax.scale_by_adam())
    formats = storage_formats(tx, PARAMS)
    wanted = storage_formats(adam, PARAMS)
    for field, like in (("fast", "mu"), ("squares", "nu")):
        assert isinstance(getattr(state, field), QuantizedMoment)
        assert (
            formats[f"state.inner_state.{field}['w']"]
            == wanted[f"state.inner_state.{like}['w']"]
        )


def test_a_declared_bound_lets_four_bits_be_relative():
    state_class = new_class()
    lowbit_optax.formats.register_moments(
        state_class,
        averages=("fast", "squares"),
        second_moments=("squares",),
        bounds={"fast": "squares"},
    )
    _, state = stored(state_class, "low")
    assert isinstance(state.fast, RelativeMoment)


def test_a_second_moment_stored_with_a_sign_unasked_is_warned_of():
    moments = {"squares": lowbit_optax.block_quantized(8)}
    with pytest.warns(UserWarning, match="'squares' of State is stored with a sign"):
        stored(new_class(), moments)
    state_class = new_class()
    lowbit_optax.formats.register_moments(state_class, second_moments=("squares",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tx, _ = stored(state_class, moments)
    formats = storage_formats(tx, PARAMS)
    assert "unsigned" in formats["state.inner_state.squares['w']"]
