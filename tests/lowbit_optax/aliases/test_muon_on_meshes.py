"""``lowbit_muon`` on eight devices computes the same as on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit_optax
import lowbit_optax.release
from lowbit_optax.aliases.newton_schulz import orthogonalized

pytestmark = pytest.mark.standard_promotion

PLACES = {
    "matrix by rows": ((64, 32), P("x")),
    "matrix by columns": ((32, 64), P(None, ("x", "y"))),
    "matrix by both": ((64, 32), P("y", "x")),
    "stack by rows": ((16, 64, 32), P(None, ("x", "y"))),
    "stack by both": ((16, 32, 64), P(None, "y", "x")),
    "stack by layers": ((8, 32, 32), P(("x", "y"))),
    "stack by layers and rows": ((8, 32, 32), P("x", "y")),
    "layers that do not divide evenly": ((3, 64, 32), P(None, "x", "y")),
    "experts": ((2, 8, 32, 32), P(None, None, "x", "y")),
    "one layer": ((1, 64, 32), P(None, "x", "y")),
    "replicated": ((3, 32, 32), P()),
}


def train(params, tx, shardings=None):
    """The parameters after two steps, with the given shardings."""
    grads = jax.tree.map(lambda x: jnp.cos(7 * x), params)
    place = lambda x: x if shardings is None else jax.device_put(x, shardings)
    params, grads = place(params), place(grads)
    state = jax.jit(tx.init)(params)
    step = jax.jit(lambda *arguments: lowbit_optax.step(tx, *arguments))
    for _ in range(2):
        params, state = step(params, state, grads)
    return params


@pytest.mark.parametrize("axis", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", PLACES)
def test_shards_are_updated_as_on_one_device(name, axis):
    shape, spec = PLACES[name]
    random = np.random.default_rng(0)
    params = {"w": jnp.asarray(random.normal(size=shape) / 8, jnp.float32)}
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis, axis))
    shardings = {"w": NamedSharding(mesh, spec)}
    want = train(params, lowbit_optax.lowbit_muon(0.02))
    with jax.set_mesh(mesh):
        tx = lowbit_optax.lowbit_muon(0.02, param_shardings=shardings)
        got = train(params, tx, shardings)
    assert got["w"].sharding.is_equivalent_to(shardings["w"], len(shape))
    moves = [np.asarray(x["w"] - params["w"]) for x in (got, want)]
    error = np.linalg.norm(moves[0] - moves[1]) / np.linalg.norm(moves[1])
    # Shards of matrices travel in bfloat16. Whole matrices do not travel.
    assert error < (0.01 if any([*spec, None, None][len(shape) - 2 :]) else 1e-5)


@pytest.mark.parametrize("axis", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_released_steps_gather_one_layer_after_the_other(axis):
    def loss_fn(params, x):
        def body(x, w):
            x = jnp.einsum("ab,bc->ac", x, w, out_sharding=P() if explicit else None)
            return jnp.tanh(x), None

        return jnp.mean(jax.lax.scan(body, x, params["w"])[0] ** 2)

    explicit = axis == AxisType.Explicit
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis, axis))
    place = {"w": NamedSharding(mesh, P(None, "x", "y"))}
    stack = np.random.default_rng(0).normal(size=(3, 64, 64)) / 8
    with jax.set_mesh(mesh):
        params = jax.device_put({"w": jnp.asarray(stack, jnp.float32)}, place)
        tx = lowbit_optax.lowbit_muon(0.02, param_shardings=place)
        x, state = jnp.ones((4, 64)), jax.jit(tx.init)(params)
        released = jax.jit(lowbit_optax.release.value_and_update(loss_fn, tx))
        _, got, _ = released(params, state, x)
        grads = jax.jit(jax.grad(loss_fn))(params, x)
        step = jax.jit(lambda *arguments: lowbit_optax.step(tx, *arguments))
        want, _ = step(params, state, grads)
    np.testing.assert_allclose(got["w"], want["w"], rtol=0, atol=1e-3)
    assert float(jnp.abs(got["w"] - params["w"]).max()) > 1e-3


def test_it_needs_whole_matrices():
    """Orthogonalised shards would be another update."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 32)), jnp.float32)
    halves = jnp.concatenate([orthogonalized(x[:32]), orthogonalized(x[32:])])
    whole = orthogonalized(x)
    assert np.linalg.norm(halves - whole) > 0.3 * np.linalg.norm(whole)
