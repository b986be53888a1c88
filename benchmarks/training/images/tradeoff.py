"""Accuracy over low-precision ratio: the runs of `precision_assignment.py` shown.

A run is a dictionary, as in results.json: what was asked for (`model`, `assignment`,
`order`, `ratio`, `promotion`, `seed`) and what was found (`low_ratio`, the mean over
all steps; `last_accuracy`, `best_accuracy`; `train_loss`, None where it was not
finite).
"""

import json
import math
import pathlib
import statistics
from collections.abc import Sequence

from matplotlib.figure import Figure  # without pyplot: draws with Agg, to files only

from benchmarks.training.images import reporting

ASKED = ("model", "assignment", "order", "ratio", "promotion", "seed")
BLACK, *COLOURS = reporting.COLOURS
BASELINES = {
    "uniform": ("uniform", "s", COLOURS[3]),
    "operator_based": ("operator-based", "^", COLOURS[2]),
    "operator_based_outputs": ("operator-based, outputs too", "v", COLOURS[4]),
}
ORDERS = {"decreasing": COLOURS[0], "increasing": COLOURS[1], "random": COLOURS[5]}


def merged(paths: Sequence[pathlib.Path], settings: dict) -> list[dict]:
    """The runs of several files.

    Raises:
        ValueError: a run that two files have, or settings that are not `settings`.
    """
    runs: dict[tuple, dict] = {}
    for path in paths:
        document = json.loads(path.read_text(encoding="utf-8"))
        for name, value in settings.items():
            found = document["settings"].get(name)
            if found != value:
                raise ValueError(
                    f"{path} has runs with {name} {found}, not {value}: choose another "
                    "--output-dir, or the same settings"
                )
        for run in document["runs"]:
            key = tuple(run[name] for name in ASKED)
            if key in runs:
                raise ValueError(f"{path}: {label(run)}, {key} is in two files")
            runs[key] = run
    return list(runs.values())


def label(run: dict) -> str:
    """The name of `run`'s curve: the same for all ratios, models and seeds."""
    if run["assignment"] == "demote":
        promotion = "promotion" if run["promotion"] else "no promotion"
        return f"{run['order']}, {promotion}"
    return BASELINES.get(run["assignment"], (run["assignment"],))[0]


def diverged(run: dict) -> bool:
    """Whether a loss of the last epoch was not finite."""
    loss = run["train_loss"]
    return loss is None or not math.isfinite(loss)


def _groups(runs: Sequence[dict]) -> dict[tuple, list[dict]]:
    """The runs that differ only in their seed, by (model, label, ratio)."""
    groups: dict[tuple, list[dict]] = {}
    for run in runs:
        groups.setdefault((run["model"], label(run), run["ratio"]), []).append(run)
    return groups


def table(runs: Sequence[dict]) -> str:
    """One line for each model, assignment and ratio; mean and deviation over seeds."""
    rows = [
        (
            "model",
            "assignment",
            "r",
            "low ratio",
            "last %",
            "best %",
            "loss",
            "diverged",
        )
    ]
    for (model, name, ratio), found in _groups(runs).items():
        lows = [run["low_ratio"] for run in found]
        losses = [math.nan if diverged(run) else run["train_loss"] for run in found]
        rows.append(
            (
                model,
                name,
                "" if ratio is None else f"{ratio:g}",
                "" if None in lows else reporting.spread(lows, ".3f"),
                *(
                    reporting.spread([100 * run[key] for run in found], ".1f")
                    for key in ("last_accuracy", "best_accuracy")
                ),
                reporting.spread(losses, ".3f"),
                f"{sum(map(diverged, found))}/{len(found)}",
            )
        )
    return "\n".join(reporting.aligned(rows, left=2))


def plot(
    path: pathlib.Path, title: str, runs: Sequence[dict], accuracy: str = "last"
) -> Figure:
    """Draws a panel for each model, after the paper's figure 4.

    Args:
        path: the PNG.
        title: above the panels.
        runs: see above.
        accuracy: "last" or "best", of the test accuracies after each epoch.

    Returns:
        The figure, as written.
    """
    models = list(dict.fromkeys(run["model"] for run in runs))
    figure = Figure(figsize=(3.6 * len(models) + 0.4, 4.2), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    labelled = {}
    for axes, model in zip(panels, models, strict=True):
        here = [run for run in runs if run["model"] == model]
        _draw_panel(axes, here, f"{accuracy}_accuracy")
        axes.set(title=model, xlabel="low-precision ratio", xlim=(-0.03, 1.03))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        handles, names = axes.get_legend_handles_labels()
        labelled |= dict(zip(names, handles, strict=True))
    panels[0].set_ylabel(f"{accuracy} test accuracy (%)")
    seeds = len({run["seed"] for run in runs})
    over = f" (mean and range of {seeds} seeds)" if seeds > 1 else ""
    figure.suptitle(title + over)
    figure.legend(
        labelled.values(),
        labelled.keys(),
        loc="outside lower center",
        ncols=max(1, 3 * len(models) // 2),
        frameon=False,
    )
    figure.savefig(path, dpi=100)
    return figure


def _draw_panel(axes, runs: Sequence[dict], key: str) -> None:
    lines: dict[str, list[tuple]] = {}
    for (_, name, _), found in _groups(runs).items():
        percent = [100 * run[key] for run in found]
        y = statistics.fmean(percent)
        low, high = min(percent), max(percent)
        if found[0]["assignment"] == "float32":
            axes.axhline(y, color=BLACK, linestyle="--", label=name, linewidth=1)
            axes.axhspan(low, high, color=BLACK, alpha=0.07, linewidth=0)
            continue
        x = statistics.fmean(run["low_ratio"] for run in found)
        if any(map(diverged, found)):
            cross = {"marker": "x", "color": "red", "s": 70, "zorder": 4}
            axes.scatter([x], [y], label="loss not finite", **cross)
        if found[0]["assignment"] == "demote":
            lines.setdefault(name, []).append((found[0], x, y, low, high))
        else:
            _, marker, colour = BASELINES[found[0]["assignment"]]
            bar = [[y - low], [high - y]]
            style = {"marker": marker, "color": colour, "markersize": 8, "zorder": 3}
            axes.errorbar([x], [y], bar, linestyle="", label=name, **style)
    for name, points in lines.items():
        points.sort(key=lambda point: point[0]["ratio"])
        first, x, y, low, high = (list(column) for column in zip(*points, strict=True))
        promotes = first[0]["promotion"]
        colour = ORDERS[first[0]["order"]]
        axes.plot(
            x,
            y,
            color=colour,
            label=name,
            marker="o",
            markersize=5 if promotes else 7,
            linestyle="-" if promotes else ":",
            markerfacecolor=colour if promotes else "none",
        )
        axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
