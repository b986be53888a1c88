"""How the distance from float32's loss changes with the model's size and the training.

    .venv/bin/python -m benchmarks trends
    .venv/bin/python -m benchmarks trends --draw

The protocol was written before the first run:

- *Size*: GPTs with 0.05 to 1 million parameters and 20 bytes of text per parameter.
- *Length*: the GPT with 0.1 million parameters and 20 to 400 bytes per parameter. The
  learning rate always ends at a thousandth of its peak, where updates are small.
- *Pairs*: as in ``equivalence``, a run in a format and a float32 run with the same seed
  start from the same weights and use the same batches. One pair is the difference of
  their losses on held-out text. :data:`SIZES` and :data:`LENGTHS` have the number of
  pairs. The model with 217,664 parameters has the runs of ``equivalence``. Its second
  test of ``lowbit_adamw`` was planned later, so there are lines without and with it.
- *Slope*: a least-squares line through all pairs of a format, against the logarithm to
  base 10 of the parameters or of the bytes, and its 95% interval from Student's t.
- *Extrapolation*: the value of the line at 124 million parameters, the size of GPT-2,
  with the 95% interval of the line. No such model was trained.

All runs use the same mathematics. Runs with 100 bytes per parameter or more, and those
with more than 217,664 parameters, are compiled with ``is_unrolled``, which rounds in
another way. With 50 bytes per parameter, some runs of a pair differ in this, too.

A complete run is stored in its own file, and is not repeated. Several processes may
train at the same time, and you can interrupt them. ``--gather`` trains nothing, and
writes the record of all runs that are complete.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from scipy import stats

from benchmarks import ROOT, pictures, records
from benchmarks.training import compute_optimal, equivalence
from benchmarks.training.equivalence import BASE
from benchmarks.training.text import kept_runs, stdlib_text
from tools.models.gpt import GPT

LOWBIT = "lowbit_adamw"
FORMATS = (LOWBIT, "kahan_adamw", "plain bfloat16")
LATER = "by size, with the second test"
GPT2 = 124e6


class Point(NamedTuple):
    """A model, the length of its training, and the planned number of pairs."""

    model: GPT
    ratio: int
    pairs: int

    @property
    def parameters(self) -> int:
        shapes = jax.eval_shape(self.model.init, jax.random.key(0))
        return sum(x.size for x in jax.tree.leaves(shapes))

    @property
    def settings(self) -> dict:
        """The number of steps, the batch size and the peak of the learning rate."""
        parts, batch = compute_optimal.POINTS, compute_optimal.BATCH
        steps = self.ratio * self.parameters / (batch * self.model.context)
        return {
            "steps": max(1, round(steps / parts)) * parts,
            "batch_size": batch,
            "learning_rate": 0.512 / self.model.width,
        }

    def row(self, name: str) -> str:
        """Return the name of a format's runs at this point."""
        size = f"{self.model.layers} layers of width {self.model.width}"
        return f"{name}, {size}, {self.ratio} bytes"


_TENTH = GPT(3, 48, 4, 64)
_OF_EQUIVALENCE = equivalence.SIZES["small"].model

SIZES = (
    Point(GPT(3, 32, 4, 64), 20, 8),
    Point(_TENTH, 20, 8),
    Point(_OF_EQUIVALENCE, 20, 6),
    Point(GPT(4, 96, 4, 64), 20, 2),
    Point(GPT(5, 128, 4, 64), 20, 1),
)
LENGTHS = (
    Point(_TENTH, 20, 8),
    Point(_TENTH, 50, 4),
    Point(_TENTH, 100, 4),
    Point(_TENTH, 200, 2),
    Point(_TENTH, 400, 2),
)


def main(argv: list[str] | None = None) -> None:
    parser = records.Options(__doc__)
    parser.add_argument("--formats", nargs="+", choices=[BASE, *FORMATS], metavar="F")
    parser.add_argument("--gather", action="store_true", help="train nothing")
    args = parser.parse_args(argv)
    path = records.path_of(__name__)
    if not args.draw:
        folder = ROOT / "runs" / path.stem
        recorded = _recorded(path)
        if not args.gather:
            _train(args.formats or [BASE, *FORMATS], folder, recorded)
        # These options select runs, and do not describe the record.
        del args.formats, args.gather
        found = kept_runs.complete(folder, recorded)
        records.save(path, args, records.ran_here(), **figures(found))
    record = records.load(path)
    print(text(record))
    draw(record, pictures.picture_of(path.stem))


def _missing(names: Sequence[str], found: kept_runs.Runs) -> Iterator[tuple]:
    """Yield the points, formats and seeds to train: short trainings first."""
    points = {p.row(""): p for p in (*SIZES, *LENGTHS) if p.model != _OF_EQUIVALENCE}
    cost = lambda p: p.settings["steps"] * p.parameters
    for point in sorted(points.values(), key=cost):
        for seed, name in itertools.product(range(point.pairs), names):
            if seed not in found.get(point.row(name), {}):
                yield point, name, seed


def _train(names: Sequence[str], folder, recorded: kept_runs.Runs) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    whole = stdlib_text.load_whole()
    train = compute_optimal.train
    for point, name, seed in _missing(names, kept_runs.complete(folder, recorded)):
        model = point.model._replace(is_unrolled=True)
        given = name, seed, model, whole, point.settings, equivalence.ROWS
        run = train(*given)
        kept_runs.write(
            folder, point.row(name), seed, {"held_out": run["held_out"][-1]}
        )


def _recorded(path) -> kept_runs.Runs:
    """Return the runs of the records of this benchmark and of ``equivalence``."""
    found: kept_runs.Runs = {}
    if path.exists():
        for name, runs in records.load(path)["runs"].items():
            found[name] = {int(seed): {"held_out": x} for seed, x in runs.items()}
    of_equivalence = records.path_of(equivalence.__name__)
    if of_equivalence.exists():
        point = next(p for p in SIZES if p.model == _OF_EQUIVALENCE)
        for name, row in records.load(of_equivalence)["rows"].items():
            pairs = zip(row["seeds"], row["losses"], strict=True)
            found[point.row(name)] = {s: {"held_out": x} for s, x in pairs}
    return found


def figures(found: kept_runs.Runs) -> dict:
    """Return the losses of all runs, and the lines through their differences."""
    names = BASE, *FORMATS, equivalence.SECOND
    rows = {p.row(name) for p in (*SIZES, *LENGTHS) for name in names}
    return {
        "runs": {
            name: {seed: run["held_out"] for seed, run in runs.items()}
            for name, runs in sorted(found.items())
            if name in rows
        },
        "by size": _lines(found, SIZES, FORMATS, _parameters, GPT2),
        LATER: _lines(found, SIZES, [LOWBIT], _parameters, GPT2, is_later=True),
        "by length": _lines(found, LENGTHS, FORMATS, lambda point: point.ratio),
    }


def _parameters(point: Point) -> int:
    return point.parameters


def _lines(
    found: kept_runs.Runs,
    points: Sequence[Point],
    names: Sequence[str],
    size: Callable[[Point], int],
    at: float | None = None,
    is_later: bool = False,
) -> dict:
    lines = {}
    for name in names:
        pairs, planned = {}, {}
        for point in points:
            rows = [name]
            if is_later and point.model == _OF_EQUIVALENCE:
                rows.append(equivalence.SECOND)
            gaps = [_differences(found, point, row) for row in rows]
            pairs[size(point)] = list(itertools.chain(*gaps))
            planned[size(point)] = sum(_planned(point, row) for row in rows)
        pairs = {x: gaps for x, gaps in pairs.items() if gaps}
        lines[name] = {"pairs": pairs, "planned": planned}
        if len(pairs) > 2:
            lines[name] |= line(pairs, at)
    return lines


def _differences(found: kept_runs.Runs, point: Point, name: str) -> list[float]:
    runs = (found.get(point.row(x), {}) for x in (name, BASE))
    return equivalence.differences(*runs)


def _planned(point: Point, name: str) -> int:
    if point.model == _OF_EQUIVALENCE:
        return len(equivalence.SEEDS[name])
    return point.pairs


def line(pairs: dict[float, Sequence[float]], at: float | None = None) -> dict:
    """Return the least-squares line through differences against a logarithm.

    Args:
      pairs: dict from a size to the differences at this size; three or more sizes.
      at: a size to which the line is extrapolated, or None.

    Returns:
      ``slope`` per factor of 10, ``intercept`` at size 1, and the 95% interval of the
      slope; with ``at``, also the ``value`` of the line there and its 95% interval.
    """
    x = np.array([math.log10(size) for size, gaps in pairs.items() for _ in gaps])
    y = np.array([gap for gaps in pairs.values() for gap in gaps])
    middle, freedom = x.mean(), len(x) - 2
    spread = ((x - middle) ** 2).sum()
    slope = ((x - middle) * (y - y.mean())).sum() / spread
    deviation = math.sqrt(((y - y.mean() - slope * (x - middle)) ** 2).sum() / freedom)
    factor = stats.t.ppf(0.975, freedom) * deviation
    half = factor / math.sqrt(spread)
    found = {
        "slope": float(slope),
        "interval of slope": [float(slope - half), float(slope + half)],
        "intercept": float(y.mean() - slope * middle),
    }
    if at is not None:
        away = math.log10(at) - middle
        value = y.mean() + slope * away
        half = factor * math.sqrt(1 / len(x) + away**2 / spread)
        found |= {"at": at, "value": float(value)}
        found |= {"interval of value": [float(value - half), float(value + half)]}
    return found


def text(record: dict) -> str:
    """Return a table of the differences and the slopes."""
    lines = [
        "| trend | format | pairs | slope per factor of 10 | at 124M, extrapolated |"
    ]
    lines.append("|---|---|---|---|---|")
    for trend in ("by size", LATER, "by length"):
        for name, found in record[trend].items():
            count = sum(map(len, found["pairs"].values()))
            pairs = f"{count} of {sum(found['planned'].values())}"
            slope = _with_interval(found, "slope")
            value = _with_interval(found, "value")
            lines.append(f"| {trend} | `{name}` | {pairs} | {slope} | {value} |")
    return "\n".join(lines)


def _with_interval(found: dict, name: str) -> str:
    if name not in found:
        return ""
    low, high = found[f"interval of {name}"]
    return f"{found[name]:+.4f} ({low:+.4f} to {high:+.4f})"


@pictures.panels(3.5, (1, 1))
def draw(record: dict, *axes) -> str:
    """Draw all differences, and the lines through them."""
    labels = {"by size": "parameters", "by length": "bytes of text per parameter"}
    looks = pictures.looks(["lowbit", "Kahan", "nearest"])
    looks = dict(zip(FORMATS, looks.values(), strict=True))
    shifts = dict(zip(FORMATS, (0.96, 1, 1.04), strict=True))
    for panel, (trend, label) in zip(axes, labels.items(), strict=True):
        for name, found in record[trend].items():
            shift = shifts[name]  # so that the formats do not hide each other
            look = looks[name] | {"ls": "", "mew": 0, "alpha": 0.6}
            for size, gaps in found["pairs"].items():
                panel.plot([shift * float(size)] * len(gaps), gaps, **look)
            if "slope" in found:
                sizes = np.array(list(map(float, found["pairs"])))
                values = found["intercept"] + found["slope"] * np.log10(sizes)
                panel.plot(sizes, values, color=look["color"], label=name)
        panel.axhline(0, color="black", lw=1)
        panel.set(xscale="log", xlabel=label, ylim=_limits(record))
        pairs = [x for found in record[trend].values() for x in found["pairs"]]
        ticks = sorted(set(map(float, pairs)))
        panel.set_xticks(ticks, map(_short, ticks))
        panel.minorticks_off()
    axes[0].set(ylabel="loss minus the float32 loss, nats per byte")
    return "Difference from the float32 loss against size and length; lower is better"


def _limits(record: dict) -> tuple[float, float]:
    lines = [*record["by size"].values(), *record["by length"].values()]
    gaps = [x for found in lines for each in found["pairs"].values() for x in each]
    room = 0.05 * (max(gaps) - min(gaps))
    return min(gaps) - room, max(gaps) + room


def _short(size: float) -> str:
    """Return a label such as 400 or 0.05M."""
    return f"{size:g}" if size < 1e4 else f"{size / 1e6:.1g}M"
