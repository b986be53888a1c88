"""Results of training runs as a table, a JSON file and a picture of the curves."""

import json
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure  # without pyplot: draws with Agg, to files only

# Okabe and Ito's colours, which colour-blind readers can tell apart; black is first,
# for the float32 baseline.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


class Result(NamedTuple):
    """One finished run; `metrics` are those of `training_loop.fit`."""

    label: str
    optimizer: str
    seed: int
    bytes_per_parameter: float
    steps_per_epoch: int
    metrics: dict[str, Any]

    @property
    def test_accuracy(self) -> float:
        """The last measured one."""
        return self.metrics["test"][-1][1]

    @property
    def train_loss(self) -> float:
        """The mean over the last epoch's worth of steps."""
        return statistics.fmean(self.metrics["loss"][-self.steps_per_epoch :])


def by_label(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Groups the runs that differ only in their seed, in the order they came."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.label, []).append(result)
    return groups


def spread(values: Sequence[float], form: str) -> str:
    """Mean, and the standard deviation over seeds where there are several."""
    mean = statistics.fmean(values)
    if len(values) == 1 or not math.isfinite(mean):
        return f"{mean:{form}}"
    return f"{mean:{form}} ± {statistics.stdev(values):{form}}"


def table(results: Sequence[Result]) -> str:
    """The results side by side, one line for each optimizer."""
    rows = [("optimizer", "test accuracy %", "train loss", "bytes/param", "seconds")]
    scaled = any("loss_scale" in run.metrics for run in results)
    if scaled:
        rows[0] += ("loss scale", "skipped")
    for label, runs in by_label(results).items():
        rows.append(
            (
                label,
                spread([100 * run.test_accuracy for run in runs], ".2f"),
                spread([run.train_loss for run in runs], ".4f"),
                f"{runs[0].bytes_per_parameter:.2f}",
                spread([run.metrics["seconds"] for run in runs], ".1f"),
                *(_loss_scale(runs) if scaled else ()),
            )
        )
    lines = aligned(rows)
    seeds = len({run.seed for run in results})
    if seeds > 1:
        lines.append(f"mean ± standard deviation over {seeds} seeds")
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of a table: a header, a rule, and the first `left` columns to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def _loss_scale(runs: Sequence[Result]) -> tuple[str, str]:
    """The last scale and the number of skipped steps, one for each seed."""
    each = [run.metrics for run in runs if "loss_scale" in run.metrics]
    scales = ", ".join(f"{metrics['loss_scale']:g}" for metrics in each)
    return scales, ", ".join(str(metrics["skipped"]) for metrics in each)


def _finite(value: Any) -> Any:
    """`value` with NaN and infinities as None: JSON has no name for them."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: pathlib.Path, settings: dict, results: Sequence[Result]) -> None:
    """Writes the settings and, for each run, its results and curves."""
    runs = [
        run._asdict()
        | {"test_accuracy": run.test_accuracy, "train_loss": run.train_loss}
        for run in results
    ]
    write_document(path, {"settings": settings, "runs": runs})


def write_document(path: pathlib.Path, document: dict) -> None:
    """Writes JSON, numbers that are not finite as null; all of it or nothing."""
    text = json.dumps(_finite(document), indent=1)
    unfinished = path.with_suffix(".unfinished")
    try:
        unfinished.write_text(text + "\n", encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Running mean over the last `window` steps (over fewer at the start)."""
    sums = np.convolve(values, np.ones(window))[: len(values)]
    return sums / np.minimum(np.arange(1, len(values) + 1), window)


def _draw(axes, x, curves: Sequence[np.ndarray], **style) -> None:
    """Draws the mean of the seeds' curves, and their range as a band."""
    axes.plot(x, np.mean(curves, 0), markersize=3, **style)
    if len(curves) > 1:
        low, high = np.min(curves, 0), np.max(curves, 0)
        axes.fill_between(x, low, high, color=style["color"], alpha=0.1, linewidth=0)


def plot(path: pathlib.Path, title: str, results: Sequence[Result]) -> None:
    """Draws training loss and test accuracy over the epochs, all runs together."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    loss_axes, test_axes = figure.subplots(1, 2)
    groups = by_label(results)
    for i, (label, runs) in enumerate(groups.items()):
        style = {"label": label, "color": COLOURS[i % len(COLOURS)]}
        if i == 0 and len(groups) > 1:  # on top and dashed: what it hides shows through
            style |= {"linestyle": "--", "zorder": 3}
        steps_per_epoch = runs[0].steps_per_epoch
        losses = np.array([run.metrics["loss"] for run in runs])
        window = max(1, min(steps_per_epoch, losses.shape[1] // 20))
        # At most 500 points per curve: more cannot be seen and only make the file big.
        shown = np.unique(np.linspace(0, losses.shape[1] - 1, 500).astype(int))
        smooth = [_smooth(loss, window)[shown] for loss in losses]
        _draw(loss_axes, (shown + 1) / steps_per_epoch, smooth, **style)
        x = np.array([step for step, _ in runs[0].metrics["test"]]) / steps_per_epoch
        accuracies = [[100 * a for _, a in run.metrics["test"]] for run in runs]
        _draw(test_axes, x, accuracies, marker="o", **style)
    over = f", mean over {window} steps" if window > 1 else ""
    loss_axes.set(xlabel="epoch", ylabel=f"training loss{over}")
    test_axes.set(xlabel="epoch", ylabel="test accuracy (%)")
    for axes in (loss_axes, test_axes):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    seeds = len(runs)
    figure.suptitle(
        title + (f" (mean and range of {seeds} seeds)" if seeds > 1 else "")
    )
    handles, labels = loss_axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False
    )
    figure.savefig(path, dpi=110)
