"""Steps on whole states are exported, serialized, deserialized and run."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import optax
import pytest

import lowbit_optax
from lowbit_optax.states import exported
from tests.helpers.optimizers import assert_same_bits

pytest.importorskip("flatbuffers", reason="jax.export.serialize needs it")


@pytest.fixture(scope="module", autouse=True)
def optaxs_states():
    for state in (optax.EmptyState, optax.ScaleByAdamState):
        name = f"optax.{state.__name__}"
        jax.export.register_namedtuple_serialization(state, serialized_name=name)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("make", [lowbit_optax.lowbit_adamw, lowbit_optax.kahan_adamw])
def test_a_serialized_step_has_the_same_bits(make):
    tx = make(1e-3)
    params = {"kernel": jnp.ones((72, 64), jnp.bfloat16), "bias": jnp.ones(72)}
    run = params, tx.init(params), params
    step = jax.jit(functools.partial(lowbit_optax.step, tx))
    stored = jax.export.export(step)(*run).serialize()
    found = jax.export.deserialize(stored).call(*run)
    assert jax.tree.structure(found) == jax.tree.structure(run[:2])
    assert_same_bits(found, step(*run))


@pytest.mark.parametrize("state", exported.STATES, ids=lambda state: state.__name__)
def test_every_state_is_stored_with_its_type(state):
    one = state(*(jnp.ones(3) for _ in state._fields))
    stored = jax.export.export(jax.jit(lambda x: x))(one).serialize()
    assert isinstance(jax.export.deserialize(stored).call(one), state)
