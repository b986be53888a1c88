"""Data that devices exchange if only the state is sharded over them."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit_optax
from tools.gpu_program.steps import leaf
from tools.gpu_program.targets import compile_lowered, gpu_mesh
from tools.hlo import exchanged, memory

WIDTH, BATCH = 4096, 128


def _loss(params, x):
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    y = jnp.tanh(x @ narrow["first"]) @ narrow["second"]
    return jnp.mean(y.astype(jnp.float32) ** 2)


def _compiled(tx, mesh, dtype):
    """A training step of two replicated matrices on a batch that is sharded."""
    params = dict.fromkeys(("first", "second"), leaf(WIDTH, WIDTH, dtype=dtype))
    of_state = lowbit_optax.state_shardings(tx, params, mesh=mesh, over="d")
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    whole, rows = (NamedSharding(mesh, spec) for spec in (P(), P("d")))
    placed = jax.tree.map(lambda x: place(x, whole), params)
    state = jax.tree.map(place, jax.eval_shape(tx.init, params), of_state)
    batch = place(leaf(BATCH * mesh.size, WIDTH), rows)

    def train(params, state, batch):
        grads = jax.grad(_loss)(params, batch)
        return lowbit_optax.step(tx, params, state, grads)

    places = jax.tree.map(lambda x: x.sharding, (placed, state))
    step = jax.jit(train, donate_argnums=(0, 1), out_shardings=places)
    with jax.set_mesh(mesh):
        return compile_lowered(step.lower(placed, state, batch), {})


OURS = lowbit_optax.lowbit_adamw(1e-3), jnp.bfloat16, 2.0, 3.125
KAHAN = lowbit_optax.kahan_adamw(1e-3), jnp.bfloat16, 2.0, 6.0
OPTAX = optax.adamw(1e-3), jnp.float32, 4.0, 8.0
CASES = [
    (*OURS, 8, AxisType.Auto),
    (*OURS, 8, AxisType.Explicit),
    (*OURS, 256, AxisType.Explicit),
    (*OURS, 256, AxisType.Auto),
    (*KAHAN, 8, AxisType.Auto),
    (*KAHAN, 8, AxisType.Explicit),
    (*OPTAX, 8, AxisType.Auto),
]


@pytest.mark.parametrize(("tx", "dtype", "weight", "state", "devices", "axis"), CASES)
def test_a_step_exchanges_gradients_and_new_weights_only(
    tx, dtype, weight, state, devices, axis
):
    compiled = _compiled(tx, gpu_mesh(devices, axis), dtype)
    count = 2 * WIDTH * WIDTH
    # The result of reduce-scatter is a shard. Each device sends the rest of the sum.
    assert exchanged(compiled) == {
        "reduce-scatter": 2 * count // devices,
        "all-gather": weight * count,
    }
    batch = 2 * BATCH * WIDTH
    stored = (memory(compiled).argument_size_in_bytes - batch) / count
    assert stored == pytest.approx(weight + state / devices, abs=0.001)
