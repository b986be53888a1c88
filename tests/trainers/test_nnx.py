"""Variables of ``nnx.Optimizer`` can be read, placed on a mesh, saved and restored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lowbit_optax.training import cast_model
from tests.helpers.nnx_network import Network, error_of, mesh_of
from tests.helpers.optimizers import assert_same_bits
from tests.helpers.side_by_side import (
    LEARNING_RATE,
    OURS,
    STEPS,
    batches,
    compare,
    note_restored,
)
from tests.helpers.stores import orbax


@nnx.jit
def _advance(model, optimizer, inputs, targets):
    optimizer.update(model, nnx.grad(error_of)(model, inputs, targets))


def _start(tx, dtype, mesh=None):
    with jax.set_mesh(mesh or mesh_of(1)):
        model = Network("data")
        if dtype == jnp.bfloat16:
            tx = cast_model(model, tx)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def _train(model, optimizer, steps):
    for inputs, targets in zip(*(x[steps] for x in batches()), strict=True):
        _advance(model, optimizer, inputs, targets)
    return error_of(model, *(x[-1] for x in batches()))


def _run(tx, dtype):
    model, optimizer = _start(tx, dtype)
    loss = _train(model, optimizer, slice(STEPS))
    return loss, nnx.state(model, nnx.Param), nnx.state(optimizer, nnx.OptState)


def test_it_trains_like_float32():
    compare("nnx.Optimizer", "flax", _run)


def _placed(model, optimizer, mesh):
    """Place every variable as its annotation specifies."""
    state = nnx.state((model, optimizer))
    specs = nnx.get_partition_spec(state)
    is_spec = lambda x: isinstance(x, P)
    shardings = jax.tree.map(lambda x: NamedSharding(mesh, x), specs, is_leaf=is_spec)
    nnx.update((model, optimizer), jax.device_put(state, shardings))


@pytest.mark.parametrize("name", OURS)
def test_the_state_is_placed_by_partition_specs_and_restored_elsewhere(name, tmp_path):
    make = lambda: _start(OURS[name](LEARNING_RATE), jnp.bfloat16)
    saved = make()
    _placed(*saved, mesh_of(4))
    _train(*saved, slice(STEPS // 2))
    target = make()
    _placed(*target, mesh_of(2))
    pure = lambda pair: nnx.to_pure_dict(nnx.state(pair))
    state = nnx.state(target)
    nnx.replace_by_pure_dict(state, orbax(tmp_path, pure(saved), pure(target)))
    nnx.update(target, state)
    assert_same_bits(pure(target), pure(saved))
    losses = [_train(*pair, slice(STEPS // 2, STEPS)) for pair in (saved, target)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-3)
    note_restored("nnx.Optimizer", name, "4 to 2")
