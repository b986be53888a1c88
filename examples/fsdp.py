"""Trains a small GPT whose weights and optimizer state are sharded over a mesh (FSDP).

    python examples/fsdp.py

Each device stores a shard of every matrix, of its extra bits and of its moments, and
processes a shard of the batch. The weights of a layer are gathered when the layer needs
them. The optimizer step does not communicate. The mesh contains all GPUs or TPUs, or
eight virtual devices on a CPU.
"""

import argparse
import pathlib
import sys
import sysconfig

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("error: Python 3.11 or newer is needed, not " + sys.version.split()[0])

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import lowbit_optax

LAYERS, WIDTH, HEADS, CONTEXT, BATCH_SIZE = 4, 128, 4, 64, 16
OPTIMIZERS = ("adamw", "lowbit_adamw")


def init_params(key):
    """Returns float32 parameters; those of the layers are stacked along axis 0."""
    shapes = {
        "bytes": (256, WIDTH),
        "positions": (CONTEXT, WIDTH),
        "qkv": (LAYERS, WIDTH, 3 * WIDTH),
        "out": (LAYERS, WIDTH, WIDTH),
        "up": (LAYERS, WIDTH, 4 * WIDTH),
        "down": (LAYERS, 4 * WIDTH, WIDTH),
    }
    keys = jax.random.split(key, len(shapes))
    draw = lambda key, shape: 0.05 * jax.random.normal(key, shape)
    matrices = dict(zip(shapes, map(draw, keys, shapes.values()), strict=True))
    return matrices | {"norms": jnp.ones((LAYERS, 2, WIDTH)), "norm": jnp.ones(WIDTH)}


def loss_fn(params, tokens):
    """Returns the mean loss in nats per byte; tokens are int32 [batch, CONTEXT + 1]."""
    # Gather the weights; otherwise XLA shards the activations like the weights.
    whole = lambda w: jax.lax.with_sharding_constraint(w.astype(jnp.float32), P())
    norm = lambda x, scale: jax.nn.standardize(x, epsilon=1e-5) * scale

    def block(x, layer):
        layer = jax.tree.map(whole, layer)
        heads = norm(x, layer["norms"][0]) @ layer["qkv"]
        q, k, v = jnp.split(heads.reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.reshape(x.shape) @ layer["out"]
        hidden = jax.nn.gelu(norm(x, layer["norms"][1]) @ layer["up"])
        return x + hidden @ layer["down"], None

    embedding = whole(params["bytes"])
    x = embedding[tokens[:, :-1]] + whole(params["positions"])
    layers = {name: params[name] for name in ("norms", "qkv", "out", "up", "down")}
    x, _ = jax.lax.scan(block, x, layers)
    logits = norm(x, whole(params["norm"])) @ embedding.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def spec_of(leaf, devices):
    """Shards rows or columns in whole blocks of 8 x 4, and replicates vectors."""
    if leaf.ndim < 2:
        return P()
    rows, columns = leaf.shape[-2:]
    leading = [None] * (leaf.ndim - 2)  # the axis of layers is not sharded
    if rows % (8 * devices) == 0:
        return P(*leading, "data", None)
    return P(*leading, None, "data") if columns % (4 * devices) == 0 else P()


def shardings_of(params, mesh):
    """Returns the sharding of each parameter."""
    return jax.tree.map(lambda x: NamedSharding(mesh, spec_of(x, mesh.size)), params)


def init_sharded(tx, mesh, dtype):
    """Creates parameters and optimizer state directly on their devices."""

    def init(key):
        master = init_params(key)
        if dtype == jnp.float32:
            return master, tx.init(master)
        return lowbit_optax.from_master(tx, master, dtype)  # norms stay float32

    key = jax.random.key(0)
    params, _ = jax.eval_shape(init, key)
    placed = shardings_of(params, mesh)
    shardings = placed, lowbit_optax.state_shardings(tx, params, placed)
    return jax.jit(init, out_shardings=shardings)(key)


def train(optimizer, learning_rate, steps, mesh):
    """Trains with one optimizer and returns the losses."""
    rate = optax.cosine_decay_schedule(learning_rate, steps)
    if optimizer == "adamw":
        tx, dtype = optax.adamw(rate), jnp.float32
    else:  # the kernels for TPUs need the shardings
        place = lambda params: shardings_of(params, mesh)
        tx = lowbit_optax.lowbit_adamw(rate, param_shardings=place)
        dtype = jnp.bfloat16
    params, state = init_sharded(tx, mesh, dtype)
    arrays = jax.tree.leaves((params, state))  # weights and optimizer state
    local = sum(x.addressable_shards[0].data.nbytes for x in arrays) / 2**20
    total = sum(x.nbytes for x in arrays) / 2**20
    print(f"each of {mesh.size} devices stores {local:.2f} of {total:.2f} MiB")

    @jax.jit(donate_argnums=(0, 1))
    def train_step(params, state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        params, state = lowbit_optax.step(tx, params, state, grads)
        return loss, params, state

    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    losses = []
    for step in tqdm(range(steps), optimizer, leave=False, disable=None):
        random = np.random.default_rng(step)
        starts = random.integers(len(text) - CONTEXT, size=(BATCH_SIZE, 1))
        tokens = text[starts + np.arange(CONTEXT + 1)].astype(np.int32)
        tokens = jax.device_put(tokens, NamedSharding(mesh, P("data")))
        loss, params, state = train_step(params, state, tokens)
        losses.append(float(loss))
    print(f"{optimizer}: loss {np.mean(losses[-20:]):.3f} nats per byte")
    return losses


def main(argv=None):
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="lowbit_adamw")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args(argv)
    if not (0 < args.learning_rate < np.inf and args.steps > 0):
        parser.error("--learning-rate and --steps must be positive")
    devices = len(jax.devices())
    if BATCH_SIZE % devices:
        parser.error(f"batch size {BATCH_SIZE} is not a multiple of {devices} devices")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("data",), axis_types=auto)
    try:
        with jax.set_mesh(mesh):
            return train(args.optimizer, args.learning_rate, args.steps, mesh)
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; this run was not saved")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
