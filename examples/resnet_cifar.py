"""Trains a ResNet-18 on CIFAR-10 with weights of 16 bits.

    python examples/resnet_cifar.py --width 16 --release --checkpoint-dir kept
    python examples/resnet_cifar.py --compare --width 8 --pixels 16 --steps 300

CIFAR-10 is read from --data-dir, or downloaded; else scikit-learn's digits are taken.
"""

import argparse
import pathlib
import pickle
import shutil
import socket
import sys
import urllib.request

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("error: Python 3.11 or newer is needed, not " + sys.version.split()[0])

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
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
COLOURS = dict(zip(FORMATS, ("black", "C3", "C1", "C2", "C9", "C0"), strict=True))
NUMBERS = {"steps": 4000, "width": 64, "pixels": 32, "train-size": 50_000}
NUMBERS["learning-rate"] = 3e-4
CIFAR = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CACHE = pathlib.Path.home() / ".cache" / "lowbit_optax"


def load_images(folder):
    """Their name, uint8 [n, 32, 32, 3], labels, how many of the last are for tests."""
    try:
        if folder == CACHE and not folder.exists():
            print("downloading CIFAR-10, 170 MB", flush=True)
            socket.setdefaulttimeout(10)  # for each answer, not for all of it
            archive, _ = urllib.request.urlretrieve(CIFAR)
            partial = folder.with_suffix(".partial")  # until it is complete
            shutil.unpack_archive(archive, partial, "gztar", filter="data")
            partial.rename(folder)
    except OSError as error:
        print(f"CIFAR-10 cannot be had ({error}): taking scikit-learn's digits")
        images, labels = load_digits(return_X_y=True)
        images = np.kron(images.reshape(-1, 8, 8, 1), np.full((1, 4, 4, 3), 255 / 16))
        return "digits", images.astype(np.uint8), labels, 300
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    files = [folder / "cifar-10-batches-py" / name for name in names]
    parts = [pickle.loads(file.read_bytes(), encoding="bytes") for file in files]
    images = np.concatenate([part[b"data"] for part in parts]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([part[b"labels"] for part in parts])
    tests = len(parts[-1][b"labels"])
    return "CIFAR-10", images.transpose(0, 2, 3, 1), labels, tests


class ResNet18(nn.Module):
    """With GroupNorm, in float32 on CPUs, whose bfloat16 convolutions are slow."""

    width: int
    pixels: int  # of a side, to which the images are averaged first

    @nn.compact
    def __call__(self, images):
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16

        def conv(x, channels, size=3, stride=1):
            conv = nn.Conv(channels, (size, size), stride, use_bias=False, dtype=dtype)
            return nn.GroupNorm(int(np.gcd(self.width, 4)), dtype=dtype)(conv(x))

        side = (images.shape[1] // self.pixels,) * 2
        x = nn.avg_pool(images.astype(dtype) / 64 - 2, side, side)
        x = nn.relu(conv(x, self.width))
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


@jax.jit(static_argnums=0)
def predict(model, params, images):
    return model.apply({"params": params}, images)


def train(name, args, model, params, data):
    """Trains in one format; returns each step's loss, and a row of the table."""
    _, images, labels, tests = data
    count = min(args.train_size, len(labels) - tests)
    size = min(128, count)  # images of a batch
    rate = optax.cosine_decay_schedule(args.learning_rate, args.steps)
    tx = optax.sgd(rate, 0.9) if args.optimizer == "sgd" else optax.adamw(rate)
    tx = tx if name == "float32" else lowbit(tx, **FORMATS[name])
    dtype = None if name == "float32" else jnp.bfloat16  # but vectors stay float32
    new = {"apply_fn": model.apply, "tx": tx, "param_dtype": dtype}
    state = jax.jit(lambda params: TrainState.create(params=params, **new))(params)
    state = state.replace(step=jnp.int32(0))
    held = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
    weights = sum(x.size for x in jax.tree.leaves(params))
    for release in (False, True) if args.release else (False,):
        step = train_step.lower(state, images[:size], labels[:size], release).compile()
        memory = step.memory_analysis().temp_size_in_bytes / 2**20
        if args.release:
            print(
                f"{name}, {release=}: gradients and activations take {memory:.1f} MiB"
            )
    kept = (args.optimizer, args.width, args.pixels, args.learning_rate, count)
    kept = "-".join(map(str, (args.steps, name, *kept))) + ".msgpack"
    kept = (args.checkpoint_dir or CACHE) / kept
    losses = []
    if args.checkpoint_dir and kept.exists():
        read = flax.serialization.from_bytes((state, np.ones(0)), kept.read_bytes())
        state, losses = read[0], list(read[1])
        print(f"{name} resumes after step {len(losses)}")
    tenth = args.steps // 10 or 1
    for i in tqdm(range(len(losses), args.steps), leave=False, disable=None):
        epoch, batch = divmod(i, count // size)
        order = np.random.default_rng(epoch).permutation(count)
        rows = order[batch * size : (batch + 1) * size]
        state, loss = step(state, images[rows], labels[rows])
        losses.append(loss)
        if (i + 1) % tenth == 0 or i + 1 == args.steps:
            mean = np.mean(losses[-tenth:])  # waits for the device
            print(f"{name} step {i + 1} of {args.steps}: loss {mean:.4f}", flush=True)
            if args.checkpoint_dir:
                save(kept, (state, np.float32(losses)))
    parts = np.array_split(images[-tests:], -(-tests // 1000))
    logits = np.concatenate([predict(model, state.params, x) for x in parts])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels[-tests:])
    accuracy = (logits.argmax(-1) == labels[-tests:]).mean()
    row = np.mean(losses[-tenth:]), loss.mean(), accuracy, held / weights
    return np.float32(losses), row


def save(path, state):
    """The file is the last one or this one, whole, whenever the run is killed."""
    partial = path.with_suffix(".partial")
    try:
        partial.write_bytes(flax.serialization.to_bytes(state))
        partial.replace(path)
    except OSError:  # such as a full disk
        partial.unlink(missing_ok=True)
        raise


def draw(path, title, losses):
    """Draws the training losses of each format, and how far they are from float32's."""
    figure = Figure((10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(title)
    for name, found in losses.items():
        width = max(len(found) // 15, 1)  # steps that a point is the mean of
        smooth = lambda x, width=width: np.convolve(x, np.ones(width) / width, "valid")
        steps = np.arange(width, len(found) + 1)
        style = {"color": COLOURS[name], "linewidth": 2 if name == "lowbit" else 1.3}
        style |= {"linestyle": "--", "zorder": 3} if name == "float32" else {}
        label = "nearest (plain bfloat16)" if name == "nearest" else name
        left.plot(steps, smooth(found), label=label, **style)
        right.plot(steps, smooth(found) / smooth(losses["float32"]), **style)
    left.set(title="Training loss", xlabel="step", ylabel="cross-entropy, nats")
    left.set_yscale("log")
    right.set(title="Divided by float32's, 0.9 to 1.1", xlabel="step", ylabel="ratio")
    right.set_ylim(0.9, 1.1)
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    if losses:
        figure.legend(loc="outside lower center", ncols=len(FORMATS), frameon=False)
    figure.savefig(path, dpi=150)


def run(args):
    """Trains in one format, or in all; prints a table and draws the losses."""
    if args.checkpoint_dir:  # before hours have gone into what it is for
        args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    try:
        if args.compare:  # the picture as well
            draw(args.plot, "", {})
    except (OSError, ValueError) as error:  # such as a suffix that is of no format
        sys.exit(f"error: --plot {args.plot}: {error}")
    data = name, images, labels, tests = load_images(args.data_dir)
    count = min(args.train_size, len(labels) - tests)
    print(f"{name}: {count:,} images to train on, {tests:,} to test on")
    title = f"ResNet-18 of width {args.width} on {name}, {args.optimizer}"
    model = ResNet18(args.width, args.pixels)
    key = jax.random.key(0, impl="rbg")  # compiles sooner than the default
    params = jax.jit(model.init)(key, images[:1])["params"]
    losses, table = {}, [f"{'format':12}train loss  test loss  accuracy  bytes/weight"]
    for name in FORMATS if args.compare else [args.format]:
        losses[name], row = train(name, args, model, params, data)
        table.append("{:12}{:10.4f}{:11.4f}{:10.2%}{:14.2f}".format(name, *row))
        if args.compare:
            draw(args.plot, title, losses)
    print(*table, sep="\n")
    if args.compare:
        print(f"the losses, drawn: {args.plot.resolve()}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", choices=FORMATS, default="lowbit")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--compare", action="store_true", help="train in all formats")
    parser.add_argument("--release", action="store_true", help="see train_step")
    for name in ("--data-dir", "--checkpoint-dir", "--plot"):
        parser.add_argument(name, type=pathlib.Path)
    parser.set_defaults(data_dir=CACHE, plot=pathlib.Path("resnet_cifar.png"))
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    for name in NUMBERS:
        if not 0 < getattr(args, name.replace("-", "_")) < np.inf:
            parser.error(f"argument --{name}: not a positive number")
    if 32 % args.pixels:
        parser.error(f"argument --pixels: {args.pixels} does not divide 32")
    try:
        run(args)
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; with --checkpoint-dir FOLDER a run can be resumed")
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
