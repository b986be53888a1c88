"""Trains in two processes, saves a checkpoint with Orbax, and restores it.

    mkdir /tmp/run
    python examples/two_processes.py localhost:9876 0 /tmp/run &
    python examples/two_processes.py localhost:9876 1 /tmp/run; wait

The arguments are the address of the process with rank 0, the rank of this process, and
a folder that both processes can write to.
"""

import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import lowbit_optax
from lowbit_optax.states import checkpoints

address, rank, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
# --8<-- [start:arrays]
jax.config.update("jax_cpu_collectives_implementation", "gloo")  # only for CPUs
jax.distributed.initialize(address, num_processes=2, process_id=rank)

mesh = jax.make_mesh(
    (len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
)
by_rows = jax.NamedSharding(mesh, jax.P("data"))
to_global = lambda x: jax.make_array_from_callback(x.shape, by_rows, lambda i: x[i])
weights = {"w": to_global(np.ones((1024, 64), np.float32))}
# --8<-- [end:arrays]
batch = to_global(np.full((64, 1024), 1 / 1024, jnp.bfloat16))

tx = lowbit_optax.lowbit(optax.adamw(1e-2))
start = functools.partial(lowbit_optax.from_master, tx)
shapes, _ = jax.eval_shape(start, weights)
shardings = {"w": by_rows}, lowbit_optax.state_shardings(tx, shapes, {"w": by_rows})
params, state = jax.jit(start, out_shardings=shardings)(weights)


@functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(None, *shardings))
def train_step(params, state, x):
    def loss_fn(params):
        return jnp.mean((x @ params["w"]).astype(jnp.float32) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return loss, *lowbit_optax.step(tx, params, state, grads)


for _ in range(3):
    loss, params, state = train_step(params, state, batch)
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "3", (params, state))
    checkpointer.wait_until_finished()
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, (params, state))
    params, state = checkpointer.restore(folder / "3", like)
if jax.process_index() == 0:
    formats = checkpoints.storage_formats(tx, params)
    (folder / "3.json").write_text(json.dumps(formats))
    print(f"the loss is {loss:.2f}")
