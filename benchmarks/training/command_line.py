"""What command lines share: numbers in flags, and errors as sentences."""

import argparse
import contextlib
import math
import pathlib
import sys
import tempfile


def rate(text: str) -> float:
    """A flag's finite number that is not negative."""
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number of 0 or more")
    return value


def positive(text: str) -> int:
    """A flag's integer of 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def make_writable(folder: pathlib.Path) -> None:
    """Makes the folder, and writes in it before hours have gone into what it is for.

    Raises:
        OSError: it cannot be made, or nothing can be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b" ")


def output_file(text: str) -> str:
    """A flag's file, whose folder is made, and written in, as by `make_writable`."""
    path = pathlib.Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, not a file")
    try:
        make_writable(path.parent)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


@contextlib.contextmanager
def sentences(hint: str):
    """Ends the program with a sentence on Ctrl-C and where a file cannot be used.

    Args:
        hint: what Ctrl-C leaves behind, and how to go on.
    """
    try:
        yield
    except KeyboardInterrupt:
        print(f"\ninterrupted; {hint}", file=sys.stderr)
        sys.exit(130)  # as shells have it
    except OSError as error:
        sys.exit(f"error: {error}")
