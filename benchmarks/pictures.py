"""The one style of all pictures: 900 pixels of README's width, sharp at twice that."""

import contextlib
import pathlib
from collections.abc import Iterator, Sequence

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


def picture_of(name: str, full: bool = False) -> pathlib.Path:
    """Where the picture of a benchmark is kept; that of a try elsewhere."""
    return ROOT / ("runs" if full else "docs/evidence") / f"{name}.png"


@contextlib.contextmanager
def drawn(
    path: pathlib.Path, height: float = 3.3, widths: Sequence[float] = (1, 1)
) -> Iterator:
    """Axes side by side, written to a PNG at the end.

    Args:
      path: from :func:`picture_of`.
      height: in inches, of 9 of width.
      widths: of the axes, relative to each other.

    Yields:
      The axes, in a list.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(widths), figsize=(9, height), width_ratios=widths, squeeze=False
        )
        yield list(axes[0])
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, dpi=150)
        plt.close(figure)
