"""Trains a ResNet-18 on CIFAR-10 with kahan_adamw, bfloat16 weights and flax.

    python examples/resnet_cifar.py --width 16 --release --checkpoint-dir kept
    python examples/resnet_cifar.py --compare --width 8 --pixels 16 --steps 300

The program reads CIFAR-10 from --data-dir or downloads it, and uses scikit-learn's
digits if the download fails. Model, state, step and training loop are at the top.
"""

import argparse
import functools
import pathlib
import pickle
import sys
from typing import Any

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("error: Python 3.11 or newer is needed, not " + sys.version.split()[0])

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from cifar_support import CACHE, draw, load_images, restore, save
from tqdm import tqdm

import lowbit_optax
from lowbit_optax import release, training


class ResNet18(nn.Module):
    """ResNet-18 for small images, with a 3x3 stem and no pooling after it."""

    width: int  # channels of the first stage
    dtype: Any  # of the activations

    @nn.compact
    def __call__(self, images, train):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype
        )
        x = images.astype(self.dtype) / 64 - 2
        x = nn.relu(norm()(conv(self.width, (3, 3))(x)))
        for stage in range(4):
            for block in range(2):
                channels = self.width * 2**stage
                strides = 2 if stage > 0 and block == 0 else 1
                y = nn.relu(norm()(conv(channels, (3, 3), strides)(x)))
                y = norm()(conv(channels, (3, 3))(y))
                if x.shape != y.shape:
                    x = norm()(conv(channels, (1, 1), strides)(x))
                x = nn.relu(x + y)
        return nn.Dense(10, dtype=self.dtype)(x.mean((1, 2))).astype(jnp.float32)


class TrainState(training.TrainState):
    """A train state with the running statistics of BatchNorm."""

    batch_stats: Any


@jax.jit(static_argnums=0)
def init(model, images):
    key = jax.random.key(0, impl="rbg")  # compiles faster than the default
    return model.init(key, images, train=False)


def create_state(model, tx, images):
    """Stores kernels in bfloat16, and their low bits in the optimizer state of `tx`.

    With plain optax, kernels stay float32.
    """

    @jax.jit
    def create(variables):  # "params" and "batch_stats"
        return TrainState.create(apply_fn=model.apply, tx=tx, **variables)

    return create(init(model, images))


def loss_fn(params, state, images, labels):
    variables = {"params": params, "batch_stats": state.batch_stats}
    logits, new = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), new["batch_stats"]


@jax.jit(donate_argnums=0)
def train_step(state, images, labels):
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, batch_stats), grads = grad_fn(state.params, state, images, labels)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss


def train(args, name, state, step_fn, images, labels):
    """Runs the training loop and returns the last state and the loss of every step."""
    state, losses = restore(args, name, state)
    tenth = max(args.steps // 10, 1)
    for step in tqdm(range(len(losses), args.steps), leave=False, disable=None):
        epoch, batch = divmod(step, len(labels) // args.batch_size)
        order = np.random.default_rng(epoch).permutation(len(labels))
        rows = order[batch * args.batch_size :][: args.batch_size]
        state, loss = step_fn(state, images[rows], labels[rows])
        losses.append(loss)
        if (step + 1) % tenth == 0 or step + 1 == args.steps:
            mean = np.mean(losses[-tenth:])  # waits for the device
            done = f"step {step + 1} of {args.steps}"
            print(f"{name} {done}: loss {mean:.4f}", flush=True)
            save(args, name, state, losses)
    return state, losses


def run_kahan(args, model, rate, train_set, test_set):
    """Trains with kahan_adamw, and prints the accuracy on the test images."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), lowbit_optax.kahan_adamw(rate))
    state = create_state(model, tx, train_set[0][:1])
    state, _ = train(args, "kahan", state, train_step, *train_set)
    print("test loss {:.4f}, accuracy {:.2%}".format(*evaluate(state, *test_set)))


@jax.jit(static_argnums=0)
def predict(apply_fn, variables, images):
    return apply_fn(variables, images, train=False)


def evaluate(state, images, labels):
    """Returns the mean loss and the accuracy."""
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    parts = np.array_split(images, -(-len(images) // 1000))
    logits = np.concatenate([predict(state.apply_fn, variables, x) for x in parts])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), (logits.argmax(-1) == labels).mean()


@jax.jit(donate_argnums=0)
def release_step(state, images, labels):
    """Like train_step, but updates each parameter as soon as its gradient is ready.

    Clipping needs the norm of all gradients, and so a second backward pass. Therefore
    it is an argument of value_and_update instead of a part of state.tx.
    """
    update = release.value_and_update(
        loss_fn, state.tx, has_aux=True, max_grad_norm=1.0
    )
    (loss, batch_stats), params, opt_state = update(
        state.params, state.opt_state, state, images, labels
    )
    new = {"params": params, "opt_state": opt_state, "batch_stats": batch_stats}
    return state.replace(step=state.step + 1, **new), loss


def run_release(args, model, rate, train_set, test_set):
    """Trains with gradient release, and prints the memory of both kinds of steps."""
    kahan = lowbit_optax.kahan_adamw(rate)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), kahan)
    batch = [array[: args.batch_size] for array in train_set]
    for name, step_fn, tx in (
        ("train_step", train_step, clipped),
        ("release_step", release_step, kahan),
    ):
        state = create_state(model, tx, batch[0][:1])
        step_fn = step_fn.lower(state, *batch).compile()
        if memory := step_fn.memory_analysis():  # None on some devices
            size = memory.temp_size_in_bytes / 2**20
            print(f"{name}: gradients and activations need {size:.1f} MiB")
    state, _ = train(args, "release", state, step_fn, *train_set)
    print("test loss {:.4f}, accuracy {:.2%}".format(*evaluate(state, *test_set)))


def nearest_adamw(rate):
    """AdamW on plain bfloat16 weights, which lose small updates."""
    weights, moments = lowbit_optax.nearest(), lowbit_optax.cast(jnp.bfloat16)
    return lowbit_optax.lowbit(optax.adamw(rate), weights=weights, moments=moments)


OPTIMIZERS = {
    "float32": optax.adamw,
    "nearest": nearest_adamw,
    "sr": lowbit_optax.sr_adamw,
    "kahan": lowbit_optax.kahan_adamw,
    "extra_bits": lowbit_optax.extra_bits_adamw,
    "lowbit": lowbit_optax.lowbit_adamw,
}


def run_comparison(args, model, rate, train_set, test_set):
    """Trains with six optimizers, prints a table, and plots the losses."""
    title = f"ResNet-18 of width {args.width} on {args.dataset}, AdamW"
    try:
        draw(args.plot, title, {})  # raises errors before the training
    except (OSError, ValueError) as error:
        sys.exit(f"error: --plot {args.plot}: {error}")
    losses, table = {}, ["format      train loss  test loss  accuracy  bytes/weight"]
    for name, optimizer in OPTIMIZERS.items():
        tx = optax.chain(optax.clip_by_global_norm(1.0), optimizer(rate))
        state = create_state(model, tx, train_set[0][:1])
        state, losses[name] = train(args, name, state, train_step, *train_set)
        draw(args.plot, title, losses)
        loss = np.mean(losses[name][-max(args.steps // 10, 1) :])
        stored = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
        size = stored / sum(x.size for x in jax.tree.leaves(state.params))
        row = name, loss, *evaluate(state, *test_set), size
        table.append("{:12}{:10.4f}{:11.4f}{:10.2%}{:14.2f}".format(*row))
    print(*table, f"plot of the losses: {args.plot.resolve()}", sep="\n")


def main():
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.set_defaults(run=run_kahan)
    group = parser.add_mutually_exclusive_group()
    for name, run in ("--release", run_release), ("--compare", run_comparison):
        flag = {"action": "store_const", "dest": "run", "const": run}
        group.add_argument(name, **flag, help=run.__doc__)
    parser.add_argument("--data-dir", type=pathlib.Path, default=CACHE)
    parser.add_argument("--checkpoint-dir", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path, default="resnet_cifar.png")
    sizes = {"steps": 4000, "width": 64, "pixels": 32, "batch-size": 128}
    numbers = {**sizes, "learning-rate": 3e-4}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    for name in numbers:
        if not 0 < getattr(args, name.replace("-", "_")) < np.inf:
            parser.error(f"argument --{name} must be positive")
    if 32 % args.pixels:
        parser.error(f"argument --pixels: {args.pixels} does not divide 32")
    try:
        args.dataset, train_set, test_set = load_images(args.data_dir, args.pixels)
        if args.batch_size > len(train_set[1]):
            parser.error(f"argument --batch-size: more than {len(train_set[1])} images")
        # CPUs compute bfloat16 convolutions slowly.
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        rate = optax.cosine_decay_schedule(args.learning_rate, args.steps)
        args.run(args, ResNet18(args.width, dtype), rate, train_set, test_set)
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; with --checkpoint-dir FOLDER a run can be resumed")
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
