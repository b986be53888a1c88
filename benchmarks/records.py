"""Records: JSON files with figures, their origin, and the options of the run.

Most benchmarks with a record define ``measure``, which returns the figures, and often
``draw``, which draws them. :func:`program` makes their ``main``. They measure runs by
name and seed with :func:`of_seeds`, and pass the result to :func:`spreads` and
:func:`gaps`.
"""

import argparse
import datetime
import importlib.metadata
import json
import pathlib
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import ROOT, pictures

COMPILED = "compiled for an H200; not run"
START = time.perf_counter()
_ORIGIN = "command", "ran", "date", "python", "versions", "seconds", "options"
_NOT_OPTIONS = ("draw", "is_apart")
_OF_THE_SAME_RECORD = ("draw", "torch")
_MEANINGS = {
    "batch_size": "examples per step",
    "context": "bytes that the model reads to predict the next one",
    "epochs": "passes over the images to train on",
    "layers": "layers of the model",
    "learning_rate": "highest learning rate",
    "pixels": "height and width of an image, in pixels",
    "rate": "factor that multiplies all learning rates of the benchmark",
    "rows": "rows of the array",
    "seeds": "runs that differ only in their random numbers",
    "settled": "first steps, whose overflows are counted separately",
    "size": "elements of the array",
    "steps": "steps of a run",
    "test_size": "images to test on",
    "train_size": "images to train on",
    "weight_decay": "factor of the weights that is added to the gradients",
    "width": "features of a layer, or channels of a ResNet's first stage",
}


def command() -> str:
    """Return the command that is running, as a user types it."""
    return " ".join(filter(None, [sys.argv[0], shlex.join(sys.argv[1:])]))


class Options(argparse.ArgumentParser):
    """Options that benchmarks with a record share.

    Args:
      doc: a module's docstring; its first line is the description.
      **numbers: the defaults of options by name, which ``_MEANINGS`` explains.
    """

    def __init__(self, doc: str | None, **numbers):
        super().__init__(description=(doc or "").split("\n")[0])
        add = self.add_argument
        add("--draw", action="store_true", help="only show the stored record")
        for name, default in numbers.items():
            text = f"{_MEANINGS[name]} (%(default)s by default)"
            kind = float if isinstance(default, float) else int
            add("--" + name.replace("_", "-"), type=kind, default=default, help=text)

    def parse_args(self, *args, **options):
        """Parse, and add ``is_apart``: whether any option differs from its default."""
        found = super().parse_args(*args, **options)
        found.is_apart = any(
            value != self.get_default(name)
            for name, value in vars(found).items()
            if name not in _OF_THE_SAME_RECORD
        )
        return found


def figures(record: dict) -> str:
    """Return a text with a line for each figure, except for those in lists."""
    lines = []

    def add(path: tuple[str, ...], found: Any) -> None:
        if isinstance(found, dict) and "std" not in found:
            for name, each in found.items():
                add((*path, name), each)
        elif not isinstance(found, list):
            text = shown(found, 5) if isinstance(found, dict) else f"{found}"
            lines.append(f"{': '.join(map(str, path))} = {text}")

    add((), {name: each for name, each in record.items() if name not in _ORIGIN})
    return "\n".join(lines)


def program(
    module: str, ran: str | None = None, **numbers: Any
) -> Callable[[list[str] | None], None]:
    """Return the function ``main(argv)`` of a benchmark with a record.

    Args:
      module: the benchmark's ``__name__``. The module defines ``measure``, and possibly
        ``text`` and ``draw``; see :func:`run`.
      ran: see :func:`run`. ``{here}`` stands for :func:`ran_here`.
      **numbers: the options; see :class:`Options`.
    """

    def main(argv: list[str] | None = None) -> None:
        of = sys.modules[module]
        args = Options(of.__doc__, **numbers).parse_args(argv)
        where = ran and ran.format(here=ran_here())
        text, draw = getattr(of, "text", figures), getattr(of, "draw", None)
        run(module, args, of.measure, text, draw, where)

    return main


def run(
    module: str,
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    text: Callable[[dict], str] = figures,
    draw: Callable[[dict, pathlib.Path], None] | None = None,
    ran: str | None = None,
) -> None:
    """Measure and save a benchmark's record unless ``--draw`` is set, then show it.

    Args:
      module: the benchmark's ``__name__``.
      args: the options from :class:`Options`.
      measure: returns the figures.
      text: returns a text that shows a record.
      draw: draws a record to a path.
      ran: description of where the runs ran; :func:`ran_here` by default.
    """
    path = path_of(module, args.is_apart)
    if not args.draw:
        save(path, args, ran or ran_here(), **measure(args))
    record = load(path)
    print(text(record))
    if draw:
        draw(record, pictures.picture_of(path.stem, args.is_apart))


def path_of(module: str, is_apart: bool = False) -> pathlib.Path:
    """Return the path of a record; runs with other options are kept in ``runs``."""
    _, group, name = module.split(".")
    folder = ROOT / "runs" if is_apart else ROOT / "benchmarks" / group
    return folder / f"{name}.json"


def ran_here() -> str:
    """Return a description of the device of this process."""
    device = jax.devices()[0]
    where = "CPU" if device.platform == "cpu" else device.device_kind
    return f"{where} ({platform.machine()})"


def save(
    path: pathlib.Path, args: argparse.Namespace, ran: str, **figures: Any
) -> dict:
    """Write a record and return it.

    Args:
      path: the path from :func:`path_of`.
      args: the options.
      ran: where the runs ran: :func:`ran_here`, or "compiled for an H200; not run".
      **figures: the figures.
    """
    versions = {}
    for name in ("jax", "jaxlib", "optax", "numpy"):
        versions[name] = importlib.metadata.version(name)
    record = {
        "command": command(),
        "ran": ran,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "versions": versions,
        "seconds": round(time.perf_counter() - START),
        "options": {k: v for k, v in vars(args).items() if k not in _NOT_OPTIONS},
        **figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, record)
    return load(path)


def write(path: pathlib.Path, record: dict) -> None:
    """Write a record atomically, so concurrent readers never see a partial record."""
    text = json.dumps(_short(record), indent=1)
    # Put lists of numbers on one line.
    lists = lambda found: " ".join(found.group().split())
    beside = path.with_name(f".{path.name}")
    beside.write_text(re.sub(r"\[[^\[\]{}\"]*\]", lists, text) + "\n")
    beside.replace(path)


def load(path: pathlib.Path) -> dict:
    return json.loads(path.read_text())


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean, the sample standard deviation, and the value of each seed."""
    array = np.asarray(values, np.float64)
    deviation = array.std(ddof=1) if len(array) > 1 else 0.0
    return {"mean": array.mean(), "std": deviation, "values": array}


def of_seeds(
    names: Iterable[str], seeds: int, of: Callable[[str, int], dict[str, float]]
) -> dict[str, dict[str, list[float]]]:
    """Run each name with each seed, and print the figures of each run at its end.

    Args:
      names: the names of the runs.
      seeds: the number of seeds; all names run with one seed before the next seed.
      of: a function that takes a name and a seed, and returns the figures of the run.

    Returns:
      For each figure and each name, a list of one value per seed.
    """
    found: dict[str, dict[str, list[float]]] = {}
    names = list(names)
    for seed in range(seeds):
        for name in names:
            figures = of(name, seed)
            for figure, value in figures.items():
                values = found.setdefault(figure, {x: [] for x in names})
                values[name].append(float(value))
            shown = ", ".join(f"{figure} {x:.4f}" for figure, x in figures.items())
            print(f"seed {seed}, {name}: {shown}", flush=True)
    return found


def spreads(found: dict[str, Sequence[float]]) -> dict[str, dict]:
    """Return the :func:`spread` of each run's values."""
    return {name: spread(values) for name, values in found.items()}


def gaps(found: dict[str, Sequence[float]], base: str) -> dict[str, dict]:
    """Return spreads of each run minus the run ``base`` with the same seed."""
    values = {name: np.asarray(each) for name, each in found.items()}
    return {n: spread(v - values[base]) for n, v in values.items() if n != base}


def compared(found: dict[str, dict], base: str) -> tuple[dict, dict]:
    """Return :func:`spreads` and :func:`gaps` of each figure of :func:`of_seeds`."""
    each = found.items()
    return (
        {figure: spreads(values) for figure, values in each},
        {figure: gaps(values, base) for figure, values in each},
    )


def means(values: np.ndarray, parts: int) -> np.ndarray:
    """Return the means of consecutive parts of about equal lengths.

    >>> means(np.array([1.0, 2.0, 6.0, 8.0, 9.0]), 2)
    array([3. , 8.5])
    """
    return np.array([each.mean() for each in np.array_split(values, parts)])


def shown(found: dict[str, Any], digits: int = 3) -> str:
    """Return ``mean ± std`` of a :func:`spread`, or the value of a single seed."""
    mean = f"{found['mean']:.{digits}f}"
    return mean if len(found["values"]) == 1 else f"{mean} ± {found['std']:.{digits}f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def print_rows(rows: Iterable[dict[str, Any]]) -> None:
    """Print a Markdown table row by row; the first row has the heads."""
    heads = None
    for row in rows:
        if heads is None:
            heads = list(row)
            print(table(heads, []))
        print("| " + " | ".join(map(str, row.values())) + " |", flush=True)


def _short(x):
    """Convert arrays to lists, and round floats to the seven digits of float32."""
    if isinstance(x, dict):
        return {key: _short(value) for key, value in x.items()}
    if isinstance(x, np.ndarray | jax.Array):
        x = np.asarray(x).tolist()
    if isinstance(x, list | tuple):
        return [_short(each) for each in x]
    if isinstance(x, float | np.floating):
        return float(f"{x:.7g}")
    return x.item() if isinstance(x, np.generic) else x
