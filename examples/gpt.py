"""Trains a small GPT (flax nnx) that is updated during the backward pass.

    python examples/gpt.py
    python examples/gpt.py --no-release --optimizer adamw

The text is the source code of Python's standard library. The program compiles the step
with and without gradient release, and prints the memory that each needs. Both compute
the same losses, except for differences in how XLA rounds two programs.
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
from flax import nnx
from tqdm import tqdm

import lowbit_optax
from lowbit_optax import release

OPTIMIZERS = {
    "adamw": optax.adamw,  # on float32 weights
    "kahan_adamw": lowbit_optax.kahan_adamw,
    "lowbit_adamw": lowbit_optax.lowbit_adamw,
}
# CPUs multiply bfloat16 matrices slowly.
COMPUTE = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
HEAD_WIDTH = 32
SIZES = {"layers": 6, "width": 192, "context": 64, "batch-size": 16, "steps": 200}


class Block(nnx.Module):
    def __init__(self, width, rngs):
        linear = lambda n, m: nnx.Linear(n, m, use_bias=False, dtype=COMPUTE, rngs=rngs)
        self.norm_1 = nnx.LayerNorm(width, dtype=COMPUTE, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(width, dtype=COMPUTE, rngs=rngs)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def __call__(self, x):
        heads = self.qkv(self.norm_1(x)).reshape(*x.shape[:2], 3, -1, HEAD_WIDTH)
        q, k, v = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class GPT(nnx.Module):
    def __init__(self, layers, width, context, rngs):
        self.bytes = nnx.Embed(256, width, dtype=COMPUTE, rngs=rngs)
        self.positions = nnx.Embed(context, width, dtype=COMPUTE, rngs=rngs)
        # One block whose arrays are stacked along a leading axis of layers.
        self.blocks = nnx.vmap(Block, in_axes=(None, 0))(width, rngs.split(layers))
        self.norm = nnx.LayerNorm(width, dtype=COMPUTE, rngs=rngs)

    def __call__(self, tokens):
        """Returns float32 logits [batch, length, 256] for the next bytes."""
        graph, layers = nnx.split(self.blocks)

        @jax.checkpoint  # recomputes a layer's activations for its gradient
        def body(x, layer):
            return nnx.merge(graph, layer)(x), None

        x = self.bytes(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        x, _ = jax.lax.scan(body, x, layers)
        return self.bytes.attend(self.norm(x)).astype(jnp.float32)


def train(args):
    """Compiles the step with and without release, and trains with one of them."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    shape = args.batch_size, args.context + 1
    rate = optax.cosine_decay_schedule(args.learning_rate, args.steps)
    tx = OPTIMIZERS[args.optimizer](rate)
    model = GPT(args.layers, args.width, args.context, nnx.Rngs(0))
    graph, params = nnx.split(model, nnx.Param)
    # With adamw, all weights stay float32; otherwise only the normalizations.
    params, state = lowbit_optax.from_master(tx, params)

    def batch(step):
        random = np.random.default_rng(step)
        starts = random.integers(len(text) - shape[1], size=(shape[0], 1))
        return text[starts + np.arange(shape[1])].astype(np.int32)

    def loss_fn(params, tokens):
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    def plain_step(params, state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        params, state = lowbit_optax.step(tx, params, state, grads)
        return loss, params, state

    compiled = {}
    steps = {"without": plain_step, "with": release.value_and_update(loss_fn, tx)}
    print("memory of a step, MiB:  weights and state  gradients and activations")
    for name, step in steps.items():
        step = jax.jit(step, donate_argnums=(0, 1))
        compiled[name] = step.lower(params, state, batch(0)).compile()
        memory = compiled[name].memory_analysis()
        held, more = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        print(f"{name + ' release':22}{held / 2**20:19.2f}{more / 2**20:27.2f}")

    step = compiled["with" if args.release else "without"]
    losses = []
    progress = tqdm(range(args.steps), args.optimizer, leave=False, disable=None)
    for number in progress:
        loss, params, state = step(params, state, batch(number))
        losses.append(loss)
        if (number + 1) % (args.steps // 10 or 1) == 0:
            mean = np.mean(losses[-20:])  # waits for the device
            tqdm.write(f"step {number + 1} of {args.steps}: {mean:.4f} nats per byte")
    return losses


def main(argv=None):
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="lowbit_adamw")
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--release", action=flag, default=True)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if name not in ("optimizer", "release") and not 0 < value < np.inf:
            parser.error(f"--{name.replace('_', '-')} {value} must be positive")
    if args.width % HEAD_WIDTH:
        parser.error(f"--width {args.width} is not a multiple of {HEAD_WIDTH}")
    try:
        return train(args)
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; this run was not saved")


if __name__ == "__main__":
    main()
