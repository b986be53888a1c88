"""Trains a ResNet-18 on CIFAR-10 with weights of 16 bits.

    python examples/resnet_cifar.py --width 16 --release --checkpoint-dir kept
    python examples/resnet_cifar.py --width 8 --compare

CIFAR-10 is read from --data-dir, or downloaded; else scikit-learn's digits are taken.
"""

import argparse
import pathlib
import pickle
import shutil
import sys
import urllib.request

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

from lowbit_optax import cast, extra_bits, kahan, lowbit, nearest, stochastic_rounding
from lowbit_optax.release import value_and_update
from lowbit_optax.training import TrainState

FORMATS = {  # of weights and moments: what lowbit is given
    "float32": None,
    "nearest": {"weights": nearest(), "moments": cast(jnp.bfloat16)},
    "sr": {"weights": stochastic_rounding(), "moments": cast(jnp.bfloat16)},
    "kahan": {"weights": kahan(), "moments": cast(jnp.bfloat16)},
    "extra_bits": {"weights": extra_bits(16), "moments": "float32"},
    "lowbit": {},  # 8 extra bits, 8-bit moments
}
NUMBERS = {"epochs": 10, "width": 64, "train-size": 50_000, "learning-rate": 1e-3}
CIFAR = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CACHE = pathlib.Path.home() / ".cache" / "lowbit_optax"


def load_images(folder):
    """Images, uint8 [n, 32, 32, 3], labels, and how many of the last are for tests."""
    try:
        if folder == CACHE and not folder.exists():
            archive, _ = urllib.request.urlretrieve(CIFAR)
            partial = folder.with_suffix(".partial")  # until it is complete
            shutil.unpack_archive(archive, partial, "gztar", filter="data")
            partial.rename(folder)
    except OSError as error:
        print(f"CIFAR-10 cannot be had ({error}): taking scikit-learn's digits")
        images, labels = load_digits(return_X_y=True)
        images = np.kron(images.reshape(-1, 8, 8, 1), np.full((1, 4, 4, 3), 255 / 16))
        return images.astype(np.uint8), labels, 300
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    files = [folder / "cifar-10-batches-py" / name for name in names]
    parts = [pickle.loads(file.read_bytes(), encoding="bytes") for file in files]
    images = np.concatenate([part[b"data"] for part in parts]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([part[b"labels"] for part in parts])
    return images.transpose(0, 2, 3, 1), labels, 10_000


class ResNet18(nn.Module):
    """With GroupNorm, in float32 on CPUs, whose bfloat16 convolutions are slow."""

    width: int

    @nn.compact
    def __call__(self, images):
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16

        def conv(x, channels, size=3, stride=1):
            x = nn.Conv(channels, (size, size), stride, dtype=dtype)(x)
            return nn.GroupNorm(int(np.gcd(self.width, 4)), dtype=dtype)(x)

        x = nn.relu(conv(images.astype(dtype) / 64 - 2, self.width))
        for block in range(8):
            channels, stride = self.width << block // 2, 1 + (block in (2, 4, 6))
            y = conv(nn.relu(conv(x, channels, 3, stride)), channels)
            x = nn.relu(y + (x if stride == 1 else conv(x, channels, 1, stride)))
        return nn.Dense(10, dtype=dtype)(x.mean((1, 2))).astype(jnp.float32)


@jax.jit(donate_argnums=0, static_argnums=3)
def train_step(state, images, labels, release):
    """The optimizer steps after the backward pass, or inside it (release)."""

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    if release:
        step = value_and_update(loss_fn, state.tx)
        loss, params, opt = step(state.params, state.opt_state)
        return state.replace(step=state.step + 1, params=params, opt_state=opt), loss
    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def train(name, args, images, labels, count, tests):
    """Trains in one format; returns its name, test loss, accuracy, bytes a weight."""
    size = min(128, count)  # images of a batch
    steps = count // size
    rate = optax.cosine_decay_schedule(args.learning_rate, args.epochs * steps)
    tx = optax.sgd(rate, 0.9) if args.optimizer == "sgd" else optax.adamw(rate)
    tx = tx if name == "float32" else lowbit(tx, **FORMATS[name])
    dtype = None if name == "float32" else jnp.bfloat16  # but vectors stay float32
    model = ResNet18(args.width)
    params = jax.jit(model.init)(jax.random.key(0), images[:1])["params"]
    new = {"apply_fn": model.apply, "tx": tx, "param_dtype": dtype}
    state = jax.jit(lambda params: TrainState.create(params=params, **new))(params)
    state = state.replace(step=jnp.int32(0))
    for release in (False, True) if args.release else (False,):
        step = train_step.lower(state, images[:size], labels[:size], release).compile()
        memory = step.memory_analysis().temp_size_in_bytes / 2**20
        print(f"{name}, {release=}: gradients and activations take {memory:.1f} MiB")
    held = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
    kept = f"{name}-{args.optimizer}-{args.width}-{args.learning_rate}-{count}.msgpack"
    kept = (args.checkpoint_dir or CACHE) / f"{args.epochs}-{kept}"
    if args.checkpoint_dir and kept.exists():
        state = flax.serialization.from_bytes(state, kept.read_bytes())
        print(f"{name} resumes after epoch {int(state.step) // steps}")
    for epoch in range(int(state.step) // steps, args.epochs):
        order = np.random.default_rng(epoch).permutation(count)[: steps * size]
        losses = []
        for rows in tqdm(order.reshape(steps, size), leave=False, disable=None):
            state, loss = step(state, images[rows], labels[rows])
            losses.append(loss)
        print(f"{name} epoch {epoch + 1} of {args.epochs}: loss {np.mean(losses):.4f}")
        if args.checkpoint_dir:
            save(kept, state)
    predict = jax.jit(lambda images: model.apply({"params": state.params}, images))
    logits = np.concatenate([predict(x) for x in np.split(images[-tests:], 10)])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels[-tests:])
    accuracy = (logits.argmax(-1) == labels[-tests:]).mean()
    weights = sum(x.size for x in jax.tree.leaves(state.params))
    return name, loss.mean(), accuracy, held / weights


def save(path, state):
    """The file is the last one or this one, whole, whenever the run is killed."""
    partial = path.with_suffix(".partial")
    try:
        partial.write_bytes(flax.serialization.to_bytes(state))
        partial.replace(path)
    except OSError:  # such as a full disk
        partial.unlink(missing_ok=True)
        raise


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", choices=FORMATS, default="lowbit")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--compare", action="store_true", help="train in all formats")
    parser.add_argument("--release", action="store_true", help="see train_step")
    parser.add_argument("--data-dir", type=pathlib.Path, default=CACHE)
    parser.add_argument("--checkpoint-dir", type=pathlib.Path)
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    for name in NUMBERS:
        if not 0 < getattr(args, name.replace("-", "_")) < np.inf:
            parser.error(f"argument --{name}: not a positive number")
    try:
        if args.checkpoint_dir:  # before hours have gone into what it is for
            args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        images, labels, tests = load_images(args.data_dir)
        count = min(args.train_size, len(labels) - tests)
        print(f"{count:,} images to train on, {tests:,} to test on")
        names = FORMATS if args.compare else [args.format]
        rows = [train(name, args, images, labels, count, tests) for name in names]
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; with --checkpoint-dir FOLDER a run can be resumed")
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        sys.exit(f"error: {error}")
    print(f"{'format':12}{'test loss':>10}{'accuracy':>10}{'bytes/weight':>14}")
    for row in rows:
        print("{:12}{:10.4f}{:10.2%}{:14.2f}".format(*row))


if __name__ == "__main__":
    main()
