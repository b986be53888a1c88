"""Records: JSON files of figures with where they come from, and their options."""

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
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import ROOT

START = time.perf_counter()
_NOT_OPTIONS = ("draw", "full", "is_apart", "afresh")
_OF_THE_SAME_RECORD = ("draw", "afresh")


def command() -> str:
    """The command that runs now, as a user types it."""
    return " ".join(filter(None, [sys.argv[0], shlex.join(sys.argv[1:])]))


def parser(
    doc: str | None, seeds: int | None = None, has_full: bool = True
) -> argparse.ArgumentParser:
    """Options that benchmarks with a record share.

    Args:
      doc: a module's docstring; its first line is the description.
      seeds: how many by default, for those that have them.
      has_full: whether there is a larger size.
    """
    made = _Parser(description=(doc or "").split("\n")[0])
    add = made.add_argument
    add("--draw", action="store_true", help="only show the record that is there")
    if has_full:
        add("--full", action="store_true", help="a larger size, for a GPU; into runs/")
    if seeds:
        add("--seeds", type=int, default=seeds, help=f"how many, {seeds} by default")
    return made


class _Parser(argparse.ArgumentParser):
    """Adds ``is_apart``: whether options are not those of the record that is kept."""

    def parse_args(self, *args, **options):
        found = super().parse_args(*args, **options)
        found.is_apart = any(
            value != self.get_default(name)
            for name, value in vars(found).items()
            if name not in _OF_THE_SAME_RECORD
        )
        return found


def path_of(module: str, is_apart: bool = False) -> pathlib.Path:
    """Where a record is kept, by the benchmark's module; that of a try, in ``runs``."""
    _, group, name = module.split(".")
    folder = ROOT / "runs" if is_apart else ROOT / "benchmarks" / group
    return folder / f"{name}.json"


def ran_here() -> str:
    """Where the figures of this process come from."""
    device = jax.devices()[0]
    where = "CPU" if device.platform == "cpu" else device.device_kind
    return f"{where} ({platform.machine()})"


def save(
    path: pathlib.Path, args: argparse.Namespace, ran: str, **figures: Any
) -> dict:
    """Writes a record and returns it.

    Args:
      path: from :func:`path_of`.
      args: the options.
      ran: where; :func:`ran_here`, or "compiled for an H200; not run".
      **figures: what was found.
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
    path.parent.mkdir(exist_ok=True)
    write(path, record)
    return load(path)


def write(path: pathlib.Path, record: dict) -> None:
    """Writes a record whole: whoever reads meanwhile finds the one before."""
    text = json.dumps(_short(record), indent=1)
    # Lists of numbers in one line.
    lists = lambda found: " ".join(found.group().split())
    beside = path.with_name(f".{path.name}")
    beside.write_text(re.sub(r"\[[^\[\]{}\"]*\]", lists, text) + "\n")
    beside.replace(path)


def load(path: pathlib.Path) -> dict:
    return json.loads(path.read_text())


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation (of a sample) and the values, one for each seed."""
    array = np.asarray(values, np.float64)
    deviation = array.std(ddof=1) if len(array) > 1 else 0.0
    return {"mean": array.mean(), "std": deviation, "values": array}


def gaps(found: dict[str, Sequence[float]], base: str) -> dict[str, dict]:
    """How far each run is from that of the same seed named ``base``, as a spread."""
    values = {name: np.asarray(each) for name, each in found.items()}
    return {n: spread(v - values[base]) for n, v in values.items() if n != base}


def shown(found: dict[str, Any], digits: int = 3) -> str:
    """``mean ± std`` of what :func:`spread` returned."""
    return f"{found['mean']:.{digits}f} ± {found['std']:.{digits}f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _short(x):
    """Lists and floats of five digits in place of arrays."""
    if isinstance(x, dict):
        return {key: _short(value) for key, value in x.items()}
    if isinstance(x, np.ndarray | jax.Array):
        x = np.asarray(x).tolist()
    if isinstance(x, list | tuple):
        return [_short(each) for each in x]
    if isinstance(x, float | np.floating):
        return float(f"{x:.5g}")
    return x.item() if isinstance(x, np.generic) else x
