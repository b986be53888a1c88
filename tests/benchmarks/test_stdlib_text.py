"""The text that small models are trained on."""

import argparse
import pathlib

import numpy as np

from benchmarks.training.text import stdlib_text


def test_text_is_the_standard_librarys_modules_of_which_a_tenth_is_held_out():
    text = stdlib_text.load()
    whole = b"".join(part.tobytes() for part in text)
    assert pathlib.Path(argparse.__file__).read_bytes() in whole
    assert len(text.held_out) == len(whole) // 10


def test_batches_depend_on_seed_and_step_alone():
    text = stdlib_text.load().train
    draw = lambda *seed: stdlib_text.random_windows(text, seed, 4, 9)
    assert draw(0, 1).shape == (4, 9)
    assert np.array_equal(draw(0, 1), draw(0, 1))
    assert not np.array_equal(draw(0, 1), draw(0, 2))
    assert not np.array_equal(draw(0, 1), draw(1, 1))
    batches = stdlib_text.random_windows(text, (0, 1), (2, 2), 9)
    assert np.array_equal(batches.reshape(4, 9), draw(0, 1))


def test_windows_for_evaluation_reach_both_ends():
    text = np.arange(100, dtype=np.uint8)
    windows = stdlib_text.even_windows(text, 5, 10)
    assert windows[0, 0] == 0
    assert windows[-1, -1] == 99
