"""flax's TrainState, saved with Orbax and restored on another mesh."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.helpers.optimizers import assert_same_bits
from tests.helpers.side_by_side import (
    HIDDEN,
    LEARNING_RATE,
    OURS,
    STEPS,
    WIDTH,
    batches,
    compare,
    narrow,
    note_restored,
    squared_error,
)
from tests.helpers.stores import orbax

# The devices of the restored run, and the label of the case in the record.
WHERE = {2: "2 to 2", 4: "2 to 4"}


def _start(tx, dtype):
    model = nn.Sequential([nn.Dense(HIDDEN), nn.tanh, nn.Dense(WIDTH)])
    params = model.init(jax.random.key(0), jnp.ones((1, WIDTH)))
    return train_state.TrainState.create(
        apply_fn=model.apply, params=narrow(params, dtype), tx=tx
    )


@jax.jit
def _advance(state, inputs, targets):
    loss = lambda params: squared_error(state.apply_fn(params, inputs), targets)
    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def _train(state, steps):
    for inputs, targets in zip(*(x[steps] for x in batches()), strict=True):
        state = _advance(state, inputs, targets)
    return state


def _loss(state):
    inputs, targets = (x[-1] for x in batches())
    return squared_error(state.apply_fn(state.params, inputs), targets)


def _run(tx, dtype):
    state = _train(_start(tx, dtype), slice(STEPS))
    return _loss(state), state.params, state.opt_state


def test_it_trains_like_float32():
    compare("flax TrainState", "flax", _run)


def _placed(state, mesh):
    """Split matrices whose first dimension divides, and replicate the other leaves."""

    def placed(x):
        x = jnp.asarray(x)
        divides = x.ndim == 2 and x.shape[0] % mesh.size == 0
        return jax.device_put(x, NamedSharding(mesh, P("data") if divides else P()))

    return jax.tree.map(placed, state)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("devices", WHERE)
def test_a_restored_run_continues_as_if_it_had_not_stopped(name, devices, tmp_path):
    tx = OURS[name](LEARNING_RATE)
    mesh = lambda size: Mesh(np.array(jax.devices()[:size]), ("data",))
    half = _train(_placed(_start(tx, jnp.bfloat16), mesh(2)), slice(STEPS // 2))
    target = _placed(_start(tx, jnp.bfloat16), mesh(devices))
    restored = orbax(tmp_path, half, target)
    assert_same_bits(restored.params, half.params)
    assert_same_bits(restored.opt_state, half.opt_state)
    if devices == 2:
        assert_same_bits(
            *(jax.tree.leaves(_train(x, slice(4))) for x in (half, restored))
        )
    ends = [_train(state, slice(STEPS // 2, STEPS)) for state in (half, restored)]
    np.testing.assert_allclose(_loss(ends[1]), _loss(ends[0]), rtol=2e-3)
    assert ends[1].step == STEPS
    note_restored("flax TrainState", name, WHERE[devices])
