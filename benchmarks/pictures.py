"""The style of all pictures, the color of each format, and shared parts of pictures."""

import collections
import functools
import pathlib
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import ROOT

FORMATS = {
    "flash": ("#aaaaaa", "h"),
    "torch": ("#aaaaaa", "H"),
    "lowbit": ("#0072b2", "s"),
    "factored": ("#117733", ">"),
    "extra bits": ("#009e73", "d"),
    "nearest": ("#d55e00", "X"),
    "LPMM": ("#cc79a7", "p"),
    "error into mu": ("#661100", "v"),
    "stochastic": ("#e69f00", "^"),
    "Kahan": ("#56b4e9", "D"),
    "float32 master": ("#595959", "<"),
    "float32": ("#000000", "o"),
}
"""The color and the marker of each format, the same in every picture.

Color-blind readers can tell the colors apart: they are Okabe and Ito's palette, a dark
red, and grays for other libraries and the float32 master. If the name of a run contains
several formats, :func:`looks` uses the first one in this order.
"""

OTHERS = (("#332288", "o"), ("#999933", "s"), ("#888888", "^"))
"""Colors and markers for series that are not formats."""

LINES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
FILLS = ("full", "none", "left", "top")
"""Line styles and fillings of markers, which distinguish runs with the same format."""

STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10.5,
    "errorbar.capsize": 3,
    "figure.constrained_layout.use": True,
    "grid.alpha": 0.25,
    "hatch.linewidth": 1.5,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "legend.handlelength": 2.5,
    "savefig.dpi": 200,
}


def picture_of(name: str, is_apart: bool = False) -> pathlib.Path:
    """Return the path of a benchmark's picture, in ``runs`` if ``is_apart``."""
    return ROOT / ("runs" if is_apart else "docs/evidence") / f"{name}.png"


def panels(
    height: float,
    ratios: Sequence[float] = (1,),
    columns: int = 3,
    stack: bool = False,
    **options: Any,
) -> Callable:
    """Return a decorator for ``draw(record, *axes)``, which returns a title.

    The decorated function takes a path instead of the axes, and writes a PNG there. The
    title states a finding of the stored record. Pictures in ``runs`` have no title,
    because their numbers may differ. The legend is below the axes.

    Args:
      height: the height of the PNG in inches. Its width is 6.5 inches.
      ratios: the relative widths of the axes, or their heights if ``stack``.
      columns: the number of columns of the legend.
      stack: whether the axes are below each other instead of next to each other.
      **options: more arguments for ``Figure.subplots``.
    """

    def of(draw: Callable) -> Callable:
        @functools.wraps(draw)
        def to_path(record, path: pathlib.Path) -> None:
            import matplotlib

            matplotlib.use("agg")
            import matplotlib.pyplot as plt
            from PIL import Image

            with plt.rc_context(STYLE):
                shape = (len(ratios), 1) if stack else (1, len(ratios))
                size = {"height_ratios" if stack else "width_ratios": ratios, **options}
                figure = plt.figure(figsize=(6.5, height))
                axes = figure.subplots(*shape, squeeze=False, **size).ravel()
                title = draw(record, *axes)
                if title and path.parent == picture_of("").parent:
                    _wrap(figure.suptitle(title, x=0.01, ha="left"), figure.bbox.width)
                found = [each.get_legend_handles_labels() for each in axes]
                handles = {x: h for each in found for h, x in zip(*each, strict=True)}
                if handles:
                    place = {"loc": "outside lower center", "ncols": columns}
                    figure.legend(handles.values(), handles, **place)
                figure.draw_without_rendering()
                for each in axes:
                    _wrap(each.title, each.bbox.width)
                    _wrap(each.xaxis.label, each.bbox.width)
                    _wrap(each.yaxis.label, each.bbox.height)
                path.parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(path)
                plt.close(figure)
            # A palette of 256 colors looks the same, with a third of the bytes.
            image = Image.open(path).convert("RGB")
            image.quantize(method=Image.Quantize.MAXCOVERAGE).save(path, optimize=True)

        return to_path

    return of


def _wrap(label, width: float) -> None:
    """Break a label into lines of similar length, which fit into a width in pixels."""
    text, letter = label.get_text(), 0.54 * label.get_size() * label.figure.dpi / 72
    lines = -(-len(text) * letter // width)
    label.set_text(textwrap.fill(text, len(text) / max(lines, 1) + 5))


def looks(names: Iterable[str]) -> dict[str, dict]:
    """Return the color, marker, filling and line style of each run."""
    found, counts = {}, collections.Counter[str]()
    for name in names:
        kind = next((x for x in FORMATS if x.lower() in name.lower()), "float32")
        color, mark = FORMATS[kind]
        line = LINES[counts[kind] % 4]
        fill = {"fillstyle": FILLS[counts[kind] % 4], "markerfacecoloralt": "white"}
        found[name] = {"color": color, "marker": mark, "ls": line, **fill}
        counts[kind] += 1
    return found


def band(axes, x, curves: Sequence, **look: Any) -> None:
    """Draw the mean and the range of the seeds' curves."""
    axes.plot(x, np.mean(curves, 0), **look)
    low, high = np.min(curves, 0), np.max(curves, 0)
    axes.fill_between(x, low, high, color=look["color"], alpha=0.15, lw=0)


def each_seed(
    axes,
    found: Mapping[str, Mapping],
    label: str,
    factor: float = 1,
    digits: int = 3,
    better: str = "lower",
    sizes: Mapping[str, float] | None = None,
) -> None:
    """Draw a row for each run: a marker per seed, a bar at the mean, and a number.

    Args:
      axes: where to draw.
      found: spreads by name, from ``records.spreads`` or ``records.gaps``.
      label: the label of the values. If it contains "minus", zero has a line.
      factor: a factor that multiplies the values.
      digits: the number of digits of the mean, which is written at the right.
      better: "lower" or "higher".
      sizes: the bytes of each run, to write at the right instead of the mean.
    """
    for y, (name, look) in enumerate(looks(found).items()):
        values = [factor * x for x in found[name]["values"]]
        look |= {"ls": "", "mew": 0, "alpha": 0.6, "fillstyle": "full"}
        axes.plot(values, [y] * len(values), **look)
        mean = factor * found[name]["mean"]
        axes.plot(mean, y, "|", color=look["color"], ms=16, mew=2)
        text = f"{sizes[name]:.2f}" if sizes else f"{mean:z.{digits}f}"
        place = axes.get_yaxis_transform()
        axes.text(1.02, y, text, va="center", transform=place)
    head = "bytes per\nparameter" if sizes else "mean"
    axes.annotate(head, (1.02, 1), xycoords="axes fraction", va="bottom")
    axes.plot([], [], "o", color="gray", mew=0, alpha=0.6, label="one seed")
    axes.plot([], [], "|", color="gray", ms=16, mew=2, label="mean of the seeds")
    if "minus" in label:
        axes.axvline(0, color="black", lw=1)
    axes.set_yticks(range(len(found)), list(found))
    axes.locator_params(axis="x", nbins=5)
    axes.set(xlabel=f"{label} ({better} is better)", ylim=(len(found) - 0.5, -0.5))


def tint(color: str, share: float) -> np.ndarray:
    """Return a color mixed with white."""
    from matplotlib.colors import to_rgb

    return 1 - share * (1 - np.array(to_rgb(color)))


def stacked(
    axes,
    found: Mapping[str, Mapping[str, float]],
    parts: Mapping[str, str],
    unit: float,
    texts: Mapping[str, str],
) -> None:
    """Draw a bar for each run, in tints of its format's color, and a text at its end.

    Bars of steps with gradient release are hatched.

    Args:
      axes: where to draw.
      found: the sizes of the parts, keyed by the name of the run and then by part.
      parts: the label of each part.
      unit: the unit of the axis, which divides the sizes.
      texts: the text at the end of each bar, keyed by the name of the run.
    """
    tints = dict(zip(parts, (1.0, 0.6, 0.35, 0.12), strict=False))
    for name, look in looks(found).items():
        end = 0.0
        style = {"edgecolor": "white", "hatch": "//" if "release" in name else ""}
        for part, share in tints.items():
            size, color = found[name][part] / unit, tint(look["color"], share)
            axes.barh(name, size, left=end, color=color, **style)
            end += size
        axes.barh(name, end, facecolor="none", edgecolor=look["color"], lw=0.8)
        axes.text(end, name, f" {texts[name]}", va="center")
    for part, share in tints.items():
        look = {"color": tint("#595959", share), "edgecolor": "#595959", "lw": 0.8}
        axes.barh(next(iter(found)), 0, label=parts[part], **look)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.margins(x=0.25)
