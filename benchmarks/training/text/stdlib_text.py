"""Text for training: Python's standard library, which every machine has, or a file."""

import pathlib
import sysconfig
from typing import NamedTuple

import numpy as np


class Text(NamedTuple):
    """Bytes to train on, and bytes held out."""

    train: np.ndarray
    held_out: np.ndarray


def load() -> Text:
    """Return the top-level modules of the standard library, sorted by name.

    These are the files `*.py` in `sysconfig.get_path("stdlib")`, without packages: 4.7
    MB for Python 3.11. The last tenth is held out, and begins inside a module.
    """
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    modules = sorted(folder.glob("*.py"), key=lambda path: path.name)
    text = np.frombuffer(b"".join(map(pathlib.Path.read_bytes, modules)), np.uint8)
    held_out = len(text) // 10
    return Text(text[:-held_out], text[-held_out:])


def load_whole() -> Text:
    """Return the standard library with its packages and tests: 31 MB for Python 3.11.

    The files are sorted by path. Every twentieth file is held out.
    """
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path
        for path in folder.rglob("*.py")
        if "site-packages" not in path.parts and path.is_file()
    )
    parts = [np.frombuffer(path.read_bytes(), np.uint8) for path in files]
    train = [part for i, part in enumerate(parts) if i % 20]
    return Text(np.concatenate(train), np.concatenate(parts[::20]))


def load_file(path: pathlib.Path) -> Text:
    """Return the bytes of a file. The last twentieth is held out.

    A training that reads more bytes than the file has repeats text.
    """
    text = np.frombuffer(path.read_bytes(), np.uint8)
    held_out = len(text) // 20
    return Text(text[:-held_out], text[-held_out:])


def random_windows(
    text: np.ndarray, seed: tuple, shape: int | tuple[int, ...], length: int
) -> np.ndarray:
    """Return random windows of the text, int32 [*shape, length], for this seed."""
    starts = np.random.default_rng(seed).integers(len(text) - length, size=shape)
    return _windows(text, starts, length)


def even_windows(text: np.ndarray, count: int, length: int) -> np.ndarray:
    """Return evenly spaced windows of the text, int32 [count, length]."""
    starts = np.linspace(0, len(text) - length, count).astype(int)
    return _windows(text, starts, length)


def _windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return text[starts[..., None] + np.arange(length)].astype(np.int32)
