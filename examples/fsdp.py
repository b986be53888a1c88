"""Trains a small GPT whose weights and optimizer state are sharded over a mesh (FSDP).

    python examples/fsdp.py
    python examples/fsdp.py --optimizer adamw --steps 500

Every device holds a share of each matrix, of its extra bits and of its moments, and has
a share of the batch. Weights of a layer are gathered where they are used. The step of
the optimizer needs nothing of another device. On a CPU the mesh has eight virtual
devices; where there are GPUs or TPUs, it has all of them.

Besides lowbit_optax it needs tqdm.
"""

import argparse
import functools

import command_line
import jax
import jax.numpy as jnp
import numpy as np
import optax
import stdlib_text
from gpt import GPT
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import lowbit_optax


class ShardedGPT(GPT):
    """The model, with one layer's weights at a time whole on every device."""

    def _weights(self, tree):
        # Without it XLA spreads a layer's activations as its weights are spread.
        return jax.lax.with_sharding_constraint(super()._weights(tree), P())


MODEL = ShardedGPT(layers=4, width=128, heads=4, context=64)
BATCH_SIZE = 16
OPTIMIZERS = {
    "adamw": optax.adamw,  # float32 weights
    "lowbit_adamw": lowbit_optax.lowbit_adamw,
    "extra_bits_adamw": lowbit_optax.extra_bits_adamw,
    "kahan_adamw": lowbit_optax.kahan_adamw,
    "sr_adamw": lowbit_optax.sr_adamw,
}


def spec_of(leaf, devices: int) -> P:
    """Rows of a matrix over the devices, or its columns; anything else on all of them.

    A shard of whole blocks, which are 8 rows by 4 columns, is updated by itself.
    """
    if leaf.ndim < 2:
        return P()
    rows, columns = leaf.shape[-2:]
    leading = [None] * (leaf.ndim - 2)  # the layers, which the model scans over
    if rows % (8 * devices) == 0:
        return P(*leading, "data", None)
    return P(*leading, None, "data") if columns % (4 * devices) == 0 else P()


def init_sharded(tx: optax.GradientTransformation, mesh: jax.sharding.Mesh, dtype):
    """Parameters and optimizer state, made on the devices that keep them."""

    def init(key):
        master = MODEL.init(key)
        if dtype == jnp.float32:
            return master, tx.init(master)
        # Biases and scales of norms stay float32.
        dtypes = lowbit_optax.param_dtypes(master, dtype)
        return lowbit_optax.from_master(tx, master, dtypes)

    key = jax.random.key(0)
    params, _ = jax.eval_shape(init, key)
    place = lambda leaf: NamedSharding(mesh, spec_of(leaf, mesh.size))
    placed = jax.tree.map(place, params)
    shardings = placed, lowbit_optax.state_shardings(tx, params, placed)
    return jax.jit(init, out_shardings=shardings)(key)


def train(optimizer: str, learning_rate: float, steps: int) -> list[float]:
    """Trains with one optimizer, over the mesh in force; returns the losses."""
    mesh = jax.sharding.get_mesh()
    tx = OPTIMIZERS[optimizer](
        optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 10, steps)
    )
    dtype = jnp.float32 if optimizer == "adamw" else jnp.bfloat16
    params, state = init_sharded(tx, mesh, dtype)
    arrays = jax.tree.leaves((params, state))
    held = sum(x.addressable_shards[0].data.nbytes for x in arrays) / 2**20
    whole = sum(x.nbytes for x in arrays) / 2**20
    print(
        f"each of {mesh.size} devices holds {held:.2f} of {whole:.2f} MiB "
        "of weights and optimizer state"
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, tokens):
        loss, grads = jax.value_and_grad(MODEL.loss)(params, tokens)
        params, state = lowbit_optax.step(tx, params, state, grads)
        return params, state, loss

    text, losses = stdlib_text.load().train, []
    with tqdm(range(steps), optimizer, unit="step") as progress:
        for step in progress:
            rows = stdlib_text.random_windows(
                text, (0, step), BATCH_SIZE, MODEL.context + 1
            )
            tokens = jax.device_put(rows, NamedSharding(mesh, P("data")))
            params, state, loss = train_step(params, state, tokens)
            losses.append(float(loss))
            progress.set_postfix_str(f"loss {np.mean(losses[-20:]):.3f}")
    print(f"{optimizer}: loss {np.mean(losses[-20:]):.3f} nats a byte")
    return losses


def main(argv: list[str] | None = None) -> list[float]:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(
        description="A small GPT, sharded.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="lowbit_adamw")
    parser.add_argument("--learning-rate", type=command_line.rate, default=3e-3)
    parser.add_argument("--steps", type=command_line.positive, default=200)
    args = parser.parse_args(argv)
    if BATCH_SIZE % len(jax.devices()):
        parser.error(
            f"{BATCH_SIZE} examples do not divide into {len(jax.devices())} devices"
        )
    mesh = jax.make_mesh(
        (len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    with command_line.sentences("nothing of this run is kept"), jax.set_mesh(mesh):
        return train(args.optimizer, args.learning_rate, args.steps)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
