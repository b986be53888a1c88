"""CIFAR-10 as numpy arrays, with scikit-learn's digits where it cannot be had.

The images stay uint8 on the host; `augmentation.py` turns a batch into floats on
the device.
"""

from __future__ import annotations

import codecs
import hashlib
import http.client
import os
import pathlib
import pickle
import shutil
import tarfile
import tempfile
import urllib.request
from typing import Any, NamedTuple

import numpy as np

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CIFAR10_MD5 = "c58f30108f718f92721af3b95e74349a"
FOLDER = "cifar-10-batches-py"
TRAIN_FILES = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST_FILES = ("test_batch",)
TIMEOUT_SECONDS = 10


class DataError(Exception):
    """The data asked for cannot be had; the message says what to do."""


class Split(NamedTuple):
    """Images, uint8 of shape [n, 32, 32, 3], and labels, int32 of shape [n]."""

    images: np.ndarray
    labels: np.ndarray

    def first(self, n: int | None, name: str) -> Split:
        """The first `n` examples (all of them for None)."""
        if n is None:
            return self
        if not 0 < n <= len(self.labels):
            raise DataError(
                f"--{name}-size {n}: this dataset has 1 to {len(self.labels)} "
                f"{name} images"
            )
        return Split(self.images[:n], self.labels[:n])


class Dataset(NamedTuple):
    """A training and a test split; `flip` says if a mirror image keeps its class."""

    name: str
    train: Split
    test: Split
    flip: bool


def load(name: str = "auto", data_dir: str | os.PathLike | None = None) -> Dataset:
    """Loads the dataset `name`.

    Args:
        name: `"cifar10"`; `"digits"`; or `"auto"`, which is CIFAR-10 where it can be
            had and otherwise the digits, and then says so on stdout.
        data_dir: the folder `cifar-10-batches-py` or the one that holds it. Without
            it the official archive is downloaded once, to the user's cache folder.

    Raises:
        DataError: no such data, a checksum that does not match, a damaged file.
    """
    if name == "digits":
        return _digits()
    if data_dir is not None:
        return _read_cifar10(_batches_folder(pathlib.Path(data_dir)))
    try:
        folder = _download_cifar10(_cache_folder())
    except DataError as error:
        if name != "auto":
            raise DataError(
                f"{error}\nDownload {CIFAR10_URL} on a machine that can, extract it, "
                "and pass its folder as --data-dir; or use --dataset digits."
            ) from error
        print(f"CIFAR-10 cannot be had: {error}")
        print("FALLING BACK to scikit-learn's handwritten digits: not CIFAR-10 results")
        return _digits()
    return _read_cifar10(folder)


def epoch_order(n: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the `n` training images in `epoch`: a function of the seed."""
    return np.random.default_rng([seed, epoch]).permutation(n)


def _batches_folder(data_dir: pathlib.Path) -> pathlib.Path:
    names = TRAIN_FILES + TEST_FILES
    for folder in (data_dir, data_dir / FOLDER):
        if any((folder / name).exists() for name in names):
            return folder
    raise DataError(
        f"--data-dir {data_dir}: holds neither {FOLDER}/ nor its files "
        f"({', '.join(names)})"
    )


def _read_cifar10(folder: pathlib.Path) -> Dataset:
    train, test = (
        Split(*map(np.concatenate, zip(*map(_read_batch, paths), strict=True)))
        for paths in (
            [folder / name for name in TRAIN_FILES],
            [folder / name for name in TEST_FILES],
        )
    )
    return Dataset("cifar10", train, test, flip=True)


# What pickles of numpy arrays refer to, in whatever module numpy has it today.
_ARRAY_PARTS = {
    "ndarray": np.ndarray,
    "dtype": np.dtype,
    "_reconstruct": np.empty(0).__reduce__()[0],
    "_frombuffer": np.empty(0).__reduce_ex__(5)[0],
    "encode": codecs.encode,  # how protocols 0 to 2 write bytes
}


class _ArraysOnly(pickle.Unpickler):
    """Builds numpy arrays and nothing else: a pickle may otherwise run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in ("numpy", "_codecs") and name in _ARRAY_PARTS:
            return _ARRAY_PARTS[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _read_batch(path: pathlib.Path) -> Split:
    try:
        with path.open("rb") as file:
            batch = _ArraysOnly(file, encoding="bytes").load()
        images = np.asarray(batch[b"data"])
        labels = np.asarray(batch[b"labels"])
        n = len(labels)
        if images.dtype != np.uint8 or images.shape != (n, 3072) or n == 0:
            raise ValueError(
                f"its data is {images.dtype}{list(images.shape)} for {n} labels, "
                "where uint8[n, 3072] is expected"
            )
        if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() > 9:
            raise ValueError("its labels are not all whole numbers from 0 to 9")
    except FileNotFoundError as error:
        raise DataError(f"CIFAR-10 file missing: {path}") from error
    except Exception as error:  # damaged pickles raise nearly every kind of error
        raise DataError(
            f"CIFAR-10 file truncated or damaged: {path} "
            f"({type(error).__name__}: {error}); extract it again from the archive"
        ) from error
    images = images.reshape(n, 3, 32, 32).transpose(0, 2, 3, 1)
    return Split(np.ascontiguousarray(images), labels.astype(np.int32))


def _cache_folder() -> pathlib.Path:
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "lowbit_optax"


def _download_cifar10(cache: pathlib.Path) -> pathlib.Path:
    """The folder of the official batches, downloaded on the first call."""
    folder = cache / FOLDER
    if folder.exists():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Everything happens in a temporary folder beside the final one, so that an
        # interrupted download or extraction leaves nothing that looks complete.
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            archive = pathlib.Path(temporary) / "archive.tar.gz"
            print(f"Downloading {CIFAR10_URL} (163 MiB) to {cache}", flush=True)
            with (
                urllib.request.urlopen(CIFAR10_URL, timeout=TIMEOUT_SECONDS) as reply,
                archive.open("wb") as file,
            ):
                shutil.copyfileobj(reply, file, length=1 << 20)
            with archive.open("rb") as file:
                md5 = hashlib.file_digest(file, "md5").hexdigest()
            if md5 != CIFAR10_MD5:
                raise DataError(
                    f"{CIFAR10_URL}: MD5 {md5} of the {archive.stat().st_size} bytes "
                    f"received is not {CIFAR10_MD5}"
                )
            with tarfile.open(archive) as tar:
                tar.extractall(temporary, filter="data")
            (pathlib.Path(temporary) / FOLDER).replace(folder)
    except (OSError, http.client.HTTPException, tarfile.TarError) as error:
        raise DataError(f"{CIFAR10_URL}: {error}") from error
    return folder


def _digits() -> Dataset:
    """scikit-learn's 1,797 digits, 8x8 grey, enlarged to 32x32 in three channels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        message = "the digits need scikit-learn: pip install scikit-learn"
        raise DataError(message) from error
    digits = load_digits()
    images = np.kron(digits.images, np.ones((1, 4, 4))) * (255 / 16)
    images = np.repeat(np.rint(images).astype(np.uint8)[..., None], 3, axis=-1)
    labels = digits.target.astype(np.int32)
    # The set is ordered by writer: shuffle, so that both splits have all of them.
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = images[order], labels[order]
    train, test = (
        Split(images[s], labels[s]) for s in (slice(1500), slice(1500, None))
    )
    return Dataset("digits", train, test, flip=False)
