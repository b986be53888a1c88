"""Writes results of training runs as a table, a JSON file and a picture."""

import json
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import pictures, records


class Result(NamedTuple):
    """One finished run, with the `metrics` that `training_loop.fit` returned."""

    label: str
    optimizer: str
    seed: int
    bytes_per_parameter: float
    steps_per_epoch: int
    metrics: dict[str, Any]

    @property
    def test_accuracy(self) -> float:
        """The last measured test accuracy."""
        return self.metrics["test"][-1][1]

    @property
    def train_loss(self) -> float:
        """The mean training loss over the steps of one epoch, at the end."""
        return statistics.fmean(self.metrics["loss"][-self.steps_per_epoch :])


def by_label(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Groups runs that differ only in their seed, in the order of the results."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.label, []).append(result)
    return groups


def spread(values: Sequence[float], digits: int) -> str:
    """Returns the mean, and the standard deviation if there are several seeds."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return records.shown(records.spread(values), digits)


def table(results: Sequence[Result]) -> str:
    """Returns a table with a row for each optimizer."""
    heads = ["optimizer", "test accuracy, %", "training loss"]
    heads += ["bytes per parameter", "seconds"]
    scales = ("loss_scale", "skipped")
    is_scaled = any("loss_scale" in run.metrics for run in results)
    rows = []
    for label, runs in by_label(results).items():
        row = [
            label,
            spread([100 * run.test_accuracy for run in runs], 2),
            spread([run.train_loss for run in runs], 4),
            f"{runs[0].bytes_per_parameter:.2f}",
            spread([run.metrics["seconds"] for run in runs], 1),
        ]
        if is_scaled:
            of = lambda name, runs=runs: [
                f"{run.metrics.get(name, '')}" for run in runs
            ]
            row += [", ".join(of(name)) for name in scales]
        rows.append(row)
    if is_scaled:
        heads += ["loss scale", "skipped steps"]
    return records.table(heads, rows)


def _finite(value: Any) -> Any:
    """Replaces NaN and infinities with None, because JSON does not have them."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write(path: pathlib.Path, **document: Any) -> None:
    """Writes a JSON file with the command. Numbers that are not finite become null."""
    document = {"command": records.command(), **document}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_finite(document), indent=1) + "\n", encoding="utf-8")


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Returns the running mean over the last `window` steps (fewer at the start)."""
    sums = np.convolve(values, np.ones(window))[: len(values)]
    return sums / np.minimum(np.arange(1, len(values) + 1), window)


@pictures.panels(4, (1, 1))
def plot(results: Sequence[Result], loss_axes, test_axes) -> None:
    """Draws training loss and test accuracy over the epochs, all runs together."""
    groups = by_label(results)
    for label, look in pictures.looks(groups).items():
        runs = groups[label]
        steps_per_epoch = runs[0].steps_per_epoch
        losses = np.array([run.metrics["loss"] for run in runs])
        window = max(1, min(steps_per_epoch, losses.shape[1] // 20))
        # At most 500 points per curve: more cannot be seen and only make the file big.
        shown = np.unique(np.linspace(0, losses.shape[1] - 1, 500).astype(int))
        smooth = [_smooth(loss, window)[shown] for loss in losses]
        pictures.band(loss_axes, (shown + 1) / steps_per_epoch, smooth, **look, ms=0)
        x = np.array([step for step, _ in runs[0].metrics["test"]]) / steps_per_epoch
        accuracies = [[100 * a for _, a in run.metrics["test"]] for run in runs]
        pictures.band(test_axes, x, accuracies, **look, label=label)
    loss_axes.set(xlabel="epoch", ylabel="training loss (lower is better)")
    test_axes.set(xlabel="epoch", ylabel="test accuracy, % (higher is better)")
