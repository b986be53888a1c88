"""CIFAR-10 as numpy arrays, or digits if it cannot be downloaded.

The images are uint8 arrays on the host. `mixed_training.py` converts a batch to floats
on the device.
"""

import argparse
from typing import NamedTuple

import numpy as np

from examples.cifar_support import CACHE, load_images


class Split(NamedTuple):
    """Images, uint8 of shape [n, 32, 32, 3], and labels, int32 of shape [n]."""

    images: np.ndarray
    labels: np.ndarray


class Dataset(NamedTuple):
    """The images to train on and to test on."""

    name: str
    train: Split
    test: Split

    @property
    def flip(self) -> bool:
        """Whether a mirrored image has the same class."""
        return self.name == "CIFAR-10"

    def steps_per_epoch(self, batch_size: int) -> int:
        """Return the number of whole batches of images to train on."""
        return len(self.train.labels) // batch_size


def load(args: argparse.Namespace) -> Dataset:
    """Return the first images of CIFAR-10, or digits if it cannot be downloaded.

    Args:
      args: the options ``train_size`` and ``test_size``.
    """
    name, *both = load_images(CACHE, 32)
    sizes = args.train_size, args.test_size
    return Dataset(
        name,
        *(
            Split(images[:size], labels[:size].astype(np.int32))
            for size, (images, labels) in zip(sizes, both, strict=True)
        ),
    )
