"""Text that every machine with Python has: the sources of its standard library."""

import pathlib
import sysconfig
from typing import NamedTuple

import numpy as np


class Text(NamedTuple):
    """Bytes to train on, and bytes held out."""

    train: np.ndarray
    held_out: np.ndarray


def load() -> Text:
    """The top-level modules of the standard library, one after the other by name.

    These are the files `*.py` in `sysconfig.get_path("stdlib")`, not those of packages
    in it: 4.7 MB for Python 3.11. The last tenth is held out; it begins inside a
    module.
    """
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    modules = sorted(folder.glob("*.py"), key=lambda path: path.name)
    text = np.frombuffer(b"".join(map(pathlib.Path.read_bytes, modules)), np.uint8)
    held_out = len(text) // 10
    return Text(text[:-held_out], text[-held_out:])


def load_whole() -> Text:
    """All of the standard library, its packages and tests too: 31 MB for Python 3.11.

    The files are one after the other by path. Every twentieth is held out.
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


def random_windows(text: np.ndarray, seed: tuple, count: int, length: int):
    """int32 [count, length]: stretches of the text, the same for the same seed."""
    starts = np.random.default_rng(seed).integers(len(text) - length, size=count)
    return _windows(text, starts, length)


def even_windows(text: np.ndarray, count: int, length: int) -> np.ndarray:
    """int32 [count, length]: stretches at even distances over the whole text."""
    starts = np.linspace(0, len(text) - length, count).astype(int)
    return _windows(text, starts, length)


def _windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(length)].astype(np.int32)
