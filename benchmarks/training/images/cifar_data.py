"""CIFAR-10 as numpy arrays, or scikit-learn's digits if it cannot be downloaded.

The images are uint8 arrays on the host. `augmentation.py` converts a batch to floats on
the device.
"""

from __future__ import annotations

import os
import pathlib
import pickle
from typing import NamedTuple

import numpy as np

from examples.cifar_support import CACHE, download, read_cifar10


class DataError(Exception):
    """A dataset is missing or damaged."""


class Split(NamedTuple):
    """Images, uint8 of shape [n, 32, 32, 3], and labels, int32 of shape [n]."""

    images: np.ndarray
    labels: np.ndarray

    def first(self, n: int | None, name: str) -> Split:
        """Returns the first `n` examples, or all of them if `n` is None."""
        if n is None:
            return self
        if not 0 < n <= len(self.labels):
            raise DataError(
                f"--{name}-size must be from 1 to {len(self.labels)}, the number of "
                f"{name} images, got {n}"
            )
        return Split(self.images[:n], self.labels[:n])


class Dataset(NamedTuple):
    """A training and a test split; `flip` is True if mirroring keeps the class."""

    name: str
    train: Split
    test: Split
    flip: bool


def load(name: str = "auto", data_dir: str | os.PathLike | None = None) -> Dataset:
    """Loads the dataset `name`.

    Args:
        name: `"cifar10"`; `"digits"`; or `"auto"`, which prints a warning and uses
            the digits if CIFAR-10 cannot be downloaded.
        data_dir: the folder that contains `cifar-10-batches-py`. If None, the
            official archive is downloaded once, to the user's cache folder.

    Raises:
        DataError: a file is missing or damaged, or the download of `"cifar10"` fails.
    """
    if name == "digits":
        return _digits()
    try:
        if data_dir is None:
            download()
    except OSError as error:
        if name != "auto":
            raise DataError(f"CIFAR-10 cannot be downloaded: {error}") from error
        print(f"CIFAR-10 cannot be downloaded ({error}): using scikit-learn's digits")
        return _digits()
    folder = CACHE if data_dir is None else pathlib.Path(data_dir)
    try:
        images, labels, tests = read_cifar10(folder)
    except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise DataError(f"--data-dir {folder}: {error}") from error
    images, labels = np.ascontiguousarray(images), labels.astype(np.int32)
    train = Split(images[:-tests], labels[:-tests])
    test = Split(images[-tests:], labels[-tests:])
    return Dataset("cifar10", train, test, flip=True)


def epoch_order(n: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of the `n` training images in `epoch`, for this seed."""
    return np.random.default_rng([seed, epoch]).permutation(n)


def _digits() -> Dataset:
    """Returns scikit-learn's 1,797 digits, enlarged to 32x32 in three channels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.kron(digits.images, np.ones((1, 4, 4))) * (255 / 16)
    images = np.repeat(np.rint(images).astype(np.uint8)[..., None], 3, axis=-1)
    labels = digits.target.astype(np.int32)
    # The digits are sorted by writer. Shuffle, so that both splits contain all writers.
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = images[order], labels[order]
    train, test = (
        Split(images[s], labels[s]) for s in (slice(1500), slice(1500, None))
    )
    return Dataset("digits", train, test, flip=False)
