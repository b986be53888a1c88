"""Shards a flax model whose layers name the logical axes of their parameters (FSDP).

    python examples/logical_axes.py

As in MaxText, rules map the logical axes to the axes of a mesh. One jitted function
creates weights and state, so that they are sharded from the beginning.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

import lowbit_optax

AUTO = jax.sharding.AxisType.Auto
mesh = jax.make_mesh(
    (len(jax.devices()), 1), ("fsdp", "tensor"), axis_types=(AUTO, AUTO)
)
rules = (("embed", "fsdp"), ("mlp", "tensor"))
init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
model = nn.Dense(256, kernel_init=init, use_bias=False, dtype=jnp.bfloat16)

x, key = jnp.ones((8, 64), jnp.bfloat16), jax.random.key(0)
specs = nn.get_partition_spec(jax.eval_shape(model.init, key, x)["params"])
placed = nn.logical_to_mesh_sharding(specs, mesh, rules)
# Kernels on TPUs need param_shardings.
tx = lowbit_optax.extra_bits_sgd(1e-2, param_shardings=placed)


def start(key):
    return lowbit_optax.from_master(tx, nn.unbox(model.init(key, x)["params"]))


shapes, _ = jax.eval_shape(start, key)
shardings = placed, lowbit_optax.state_shardings(tx, shapes)
params, state = jax.jit(start, out_shardings=shardings)(key)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, state, x):
    def loss_fn(params):
        out = jnp.asarray(model.apply({"params": params}, x), jnp.float32)
        return jnp.mean(out**2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return loss, *lowbit_optax.step(tx, params, state, grads)


batch = jax.device_put(x, jax.NamedSharding(mesh, jax.P("fsdp")))
for _ in range(3):
    loss, params, state = train_step(params, state, batch)
    print(f"loss {loss:.4f}")
print("residuals", state.residual.tree["kernel"].sharding.spec)
