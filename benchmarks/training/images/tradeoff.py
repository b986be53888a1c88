"""Accuracy over low-precision ratio: the runs of `precision_assignment.py` shown.

A run is a dictionary, as in results.json: what was asked for (`model`, `assignment`,
`order`, `ratio`, `promotion`, `seed`) and what was found (`low_ratio`, the mean over
all steps; `last_accuracy`, `best_accuracy`; `train_loss`).
"""

import math
import pathlib
import statistics
from collections.abc import Sequence

from benchmarks import pictures, records
from benchmarks.training.images import reporting

BLACK, *COLOURS = reporting.COLOURS
BASELINES = {
    "uniform": ("uniform", "s", COLOURS[3]),
    "operator_based": ("operator-based", "^", COLOURS[2]),
    "operator_based_outputs": ("operator-based, outputs too", "v", COLOURS[4]),
}
ORDERS = {"decreasing": COLOURS[0], "increasing": COLOURS[1], "random": COLOURS[5]}


def label(run: dict) -> str:
    """The name of `run`'s curve: the same for all ratios, models and seeds."""
    if run["assignment"] == "demote":
        promotion = "promotion" if run["promotion"] else "no promotion"
        return f"{run['order']}, {promotion}"
    return BASELINES.get(run["assignment"], (run["assignment"],))[0]


def diverged(run: dict) -> bool:
    """Whether a loss of the last epoch was not finite."""
    return not math.isfinite(run["train_loss"])


def _groups(runs: Sequence[dict]) -> dict[tuple, list[dict]]:
    """The runs that differ only in their seed, by (model, label, ratio)."""
    groups: dict[tuple, list[dict]] = {}
    for run in runs:
        groups.setdefault((run["model"], label(run), run["ratio"]), []).append(run)
    return groups


def table(runs: Sequence[dict]) -> str:
    """One line for each model, assignment and ratio; mean and deviation over seeds."""
    heads = ("model", "assignment", "r", "low ratio", "last %", "best %", "loss")
    rows = []
    for (model, name, ratio), found in _groups(runs).items():
        lows = [run["low_ratio"] for run in found]
        percent = lambda key, found=found: reporting.spread(
            [100 * run[key] for run in found], 1
        )
        row = [
            model,
            name,
            "" if ratio is None else f"{ratio:g}",
            "" if None in lows else reporting.spread(lows, 3),
            percent("last_accuracy"),
            percent("best_accuracy"),
            reporting.spread([run["train_loss"] for run in found], 3),
            f"{sum(map(diverged, found))}/{len(found)}",
        ]
        rows.append(row)
    return records.table((*heads, "diverged"), rows)


def plot(path: pathlib.Path, runs: Sequence[dict]) -> None:
    """Draws a panel for each model, after the paper's figure 4, into a PNG."""
    models = list(dict.fromkeys(run["model"] for run in runs))

    @pictures.panels(4.2, (1,) * len(models))
    def draw(runs, *panels) -> None:
        for axes, model in zip(panels, models, strict=True):
            draw_panel(axes, [run for run in runs if run["model"] == model])
            axes.set(title=model, xlabel="low-precision ratio", xlim=(-0.03, 1.03))
        panels[0].set_ylabel("last test accuracy, %: mean and range")
        panels[0].legend()

    draw(runs, path)


def draw_panel(axes, runs: Sequence[dict]) -> None:
    """Lines over the ratios, a mark for each baseline, float32 as a dashed line."""
    lines: dict[str, list[tuple]] = {}
    for (_, name, _), found in _groups(runs).items():
        percent = [100 * run["last_accuracy"] for run in found]
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
        colour = ORDERS[first[0]["order"]]
        style = {"color": colour, "marker": "o", "label": name}
        if not first[0]["promotion"]:
            style |= {"linestyle": ":", "markerfacecolor": "none"}
        axes.plot(x, y, **style)
        axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
