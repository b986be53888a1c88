"""Runs that are stored in files when they are complete, so that none is repeated.

Several processes may train different runs, and you can interrupt them. This module
needs neither JAX nor PyTorch.
"""

import json
import pathlib
from collections.abc import Callable, Iterable, Mapping

Runs = dict[str, dict[int, dict]]
"""Runs by the name of their row, and by their seed."""


def path_of(folder: pathlib.Path, row: str, seed: int) -> pathlib.Path:
    """Return the path of a complete run."""
    return folder / f"{row.replace(', ', '_').replace(' ', '_')}_{seed}.json"


def write(folder: pathlib.Path, row: str, seed: int, run: dict) -> None:
    """Write a complete run."""
    named = {"row": row, "seed": seed, **run}
    path_of(folder, row, seed).write_text(json.dumps(named))


def complete(folder: pathlib.Path, recorded: Mapping[str, dict[int, dict]]) -> Runs:
    """Return the runs of a record, and those that have a file."""
    found = {row: dict(runs) for row, runs in recorded.items()}
    for path in folder.glob("*_*[0-9].json"):
        run = json.loads(path.read_text())
        found.setdefault(run.pop("row"), {})[run.pop("seed")] = run
    return {row: dict(sorted(runs.items())) for row, runs in found.items()}


def train_missing(
    rows: Iterable[str],
    seeds: int,
    folder: pathlib.Path,
    found: Runs,
    train: Callable[[str, int], dict],
) -> None:
    """Train the runs that are not complete, and write a file for each.

    Args:
      rows: the names of the rows.
      seeds: the number of seeds; all rows are trained with one seed before the next.
      folder: the folder of the files.
      found: the result of :func:`complete`.
      train: a function that takes a row and a seed, and returns the run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = list(rows)
    for seed in range(seeds):
        for row in rows:
            if seed not in found.get(row, {}):
                write(folder, row, seed, train(row, seed))
