"""The one style of all pictures: 900 pixels of README's width, sharp at twice that."""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence

from benchmarks import ROOT

COLORS = {
    "float32": "black",
    "nearest": "#c44e52",
    "stochastic": "#dd8452",
    "Kahan": "#4c72b0",
    "extra bits": "#55a868",
    "lowbit": "#4c72b0",
    "LPMM": "#55a868",
}
"""Of the ways to keep a weight, the same in every picture."""

PARTS = ("#4c72b0", "#dd8452", "#aaaaaa", "#8172b3", "#937860")
"""Of the parts of a bar."""

STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "grid.alpha": 0.25,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
}


def picture_of(name: str, is_apart: bool = False) -> pathlib.Path:
    """Where the picture of a benchmark is kept; that of a try, in ``runs``."""
    return ROOT / ("runs" if is_apart else "docs/evidence") / f"{name}.png"


def panels(height: float = 3.3, widths: Sequence[float] = (1,)) -> Callable:
    """Return a decorator for ``draw(record, *axes)``.

    The decorated function takes a path instead of the axes, and writes a PNG there.

    Args:
      height: the height of the PNG in inches; its width is 9 inches.
      widths: the relative widths of the axes, which are next to each other.
    """

    def of(draw: Callable) -> Callable:
        @functools.wraps(draw)
        def to_path(record, path: pathlib.Path) -> None:
            import matplotlib

            matplotlib.use("agg")
            import matplotlib.pyplot as plt

            with plt.rc_context(STYLE):
                figure, axes = plt.subplots(
                    1,
                    len(widths),
                    figsize=(9, height),
                    width_ratios=widths,
                    squeeze=False,
                )
                draw(record, *axes[0])
                path.parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(path, dpi=150)
                plt.close(figure)

        return to_path

    return of


def each_seed(
    axes,
    found: Mapping[str, Mapping],
    color: Callable[[str], str],
    text: Callable[[str], str] = lambda name: "",
    factor: float = 1,
) -> None:
    """A line for each run: a dot per seed, a mark at the mean, a text at the right.

    Args:
      axes: of a picture.
      found: by name, from ``records.spread``.
      color, text: of a name.
      factor: of the values.
    """
    for name, each in found.items():
        values = [factor * x for x in each["values"]]
        axes.plot(values, [name] * len(values), ".", color=color(name), alpha=0.5)
        mean = factor * each["mean"]
        axes.plot(mean, name, "|", color=color(name), ms=16, mew=2.5)
        place = axes.get_yaxis_transform()
        axes.text(1.01, name, text(name), va="center", transform=place)
    axes.invert_yaxis()
    axes.margins(y=0.12)
    axes.set(xlabel="loss on held-out text, each seed and the mean")


def stacked(
    axes,
    found: Mapping[str, Mapping[str, float]],
    parts: Mapping[str, str],
    unit: float,
    texts: Mapping[str, str],
) -> None:
    """A bar for each name, of its parts, and a text at the end.

    Args:
      axes: of a picture.
      found: by name, the size of each part.
      parts: by part, its label, in the order of :data:`PARTS`.
      unit: of the axis, in that of the sizes.
      texts: by name.
    """
    ends = dict.fromkeys(found, 0.0)
    for (part, label), color in zip(parts.items(), PARTS, strict=False):
        sizes = [each[part] / unit for each in found.values()]
        left = list(ends.values())
        axes.barh(list(found), sizes, left=left, color=color, label=label)
        ends = {n: x + s for (n, x), s in zip(ends.items(), sizes, strict=True)}
    for name, end in ends.items():
        axes.text(end, name, f"  {texts[name]}", va="center")
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.2 * max(ends.values())))
