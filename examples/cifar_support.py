"""Data loading, checkpoints and plots for resnet_cifar.py."""

import pathlib
import pickle
import shutil
import socket
import urllib.request
from typing import Any

import numpy as np
from flax import serialization
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CACHE = pathlib.Path.home() / ".cache" / "lowbit_optax"
# Colors by Okabe and Ito, which color-blind readers can tell apart, and line styles.
LOOKS = {"float32": ("black", "--"), "nearest": ("#d55e00", "-")}
LOOKS |= {"sr": ("#e69f00", "-."), "kahan": ("#56b4e9", "-")}
LOOKS |= {"extra_bits": ("#009e73", ":"), "lowbit": ("#0072b2", "-")}


def load_images(folder, pixels):
    """Returns the name of the dataset, the training set and the test set.

    A set is (images, labels); images are uint8 [n, pixels, pixels, 3].
    """
    try:
        if folder == CACHE:
            download()
    except OSError as error:
        print(f"CIFAR-10 cannot be downloaded ({error}): using scikit-learn's digits")
        name, tests = "digits", 300
        images, labels = load_digits(return_X_y=True)
        images = np.kron(images.reshape(-1, 8, 8, 1), np.full((1, 4, 4, 3), 255 / 16))
    else:
        name = "CIFAR-10"
        images, labels, tests = read_cifar10(folder)
    side = 32 // pixels
    images = images.reshape(-1, pixels, side, pixels, side, 3)
    images = images.mean((2, 4), dtype=np.float32).astype(np.uint8)
    print(f"{name}: {len(labels) - tests:,} images to train on, {tests:,} to test on")
    return name, (images[:-tests], labels[:-tests]), (images[-tests:], labels[-tests:])


def download():
    """Downloads CIFAR-10, and creates CACHE when it is complete."""
    if CACHE.exists():
        return
    print("downloading CIFAR-10, 170 MB", flush=True)
    socket.setdefaulttimeout(10)  # seconds to wait for each response
    archive, _ = urllib.request.urlretrieve(URL)
    partial = CACHE.with_suffix(".partial")
    shutil.unpack_archive(archive, partial, "gztar", filter="data")
    partial.rename(CACHE)


def read_cifar10(folder):
    """Returns images, uint8 [n, 32, 32, 3], labels, and the number of test images."""
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    files = [folder / "cifar-10-batches-py" / name for name in names]
    parts = [pickle.loads(file.read_bytes(), encoding="bytes") for file in files]
    images = np.concatenate([part[b"data"] for part in parts]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([part[b"labels"] for part in parts])
    return images.transpose(0, 2, 3, 1), labels, len(parts[-1][b"labels"])


def checkpoint(args, name):
    """Returns a path whose name has every option that changes the results."""
    numbers = args.steps, args.width, args.pixels, args.batch_size, args.learning_rate
    parts = name, args.dataset, *numbers, "kept.msgpack"
    return args.checkpoint_dir / "-".join(map(str, parts))


def save(args, name, state, losses):
    """Saves the run; the old file stays if the program is killed while writing."""
    if not args.checkpoint_dir:
        return
    path = checkpoint(args, name)
    partial = path.with_suffix(".partial")
    try:
        partial.write_bytes(serialization.to_bytes((state, np.float32(losses))))
        partial.replace(path)
    finally:  # for example if the disk is full
        partial.unlink(missing_ok=True)


def restore(args, name, state) -> tuple[Any, list]:
    """Returns the saved state and losses, or `state` and no losses."""
    if not args.checkpoint_dir:
        return state, []
    args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    path = checkpoint(args, name)
    if not path.exists():
        return state, []
    state, losses = serialization.from_bytes((state, 0), path.read_bytes())
    print(f"{name} resumes after step {len(losses)}")
    return state, list(losses)


def draw(path, title, losses):
    """Draws the training losses, and their ratios to the losses of float32."""
    figure = Figure((10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(title)
    for name, found in losses.items():
        width = max(len(found) // 15, 1)  # steps in the mean that a point shows
        mean = lambda x, width=width: np.convolve(x, np.ones(width) / width, "valid")
        steps = np.arange(width, len(found) + 1)
        color, line = LOOKS[name]
        front = 3 if name == "float32" else 2
        style = {"color": color, "linestyle": line, "zorder": front}
        label = "nearest (plain bfloat16)" if name == "nearest" else name
        left.plot(steps, mean(found), label=label, **style)
        right.plot(steps, mean(found) / mean(losses["float32"]), **style)
    left.set(title="Training loss, running mean (lower is better)", yscale="log")
    left.set(xlabel="step", ylabel="cross-entropy, nats")
    right.set(title="Training loss divided by float32's", ylim=(0.9, 1.1))
    right.set(xlabel="step", ylabel="ratio")
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    if losses:
        figure.legend(loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=150)
