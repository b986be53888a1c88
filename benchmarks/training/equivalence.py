"""A test, with a margin set beforehand, of whether formats train a GPT like float32.

    .venv/bin/python -m benchmarks equivalence
    .venv/bin/python -m benchmarks equivalence --draw
    .venv/bin/python -m benchmarks equivalence --text FILE

The protocol was written before the first run:

- *Model and training*: as in ``compute_optimal``, a GPT with 217,664 parameters, 20
  bytes of text per parameter, and a learning rate that ends at a thousandth of its
  peak. The figure is the loss on 64 KiB of held-out text at the end, in nats per byte.
- *Pairs*: a run in a format and a float32 run of the same seed start from the same
  weights and use the same batches. The difference of their losses is one pair.
- *Pairs of each row*: the seeds in :data:`SEEDS`. No run is left out, and no pairs are
  added to a row after looking at the results.
- *Margin*: 0.004 nats, the difference that the public speedruns of GPT-2 accept
  (modded-nanogpt, track 3).
- *Verdict*: "equivalent" if two one-sided t-tests, each at 5%, reject that the mean
  difference is 0.004 or more above, and 0.004 or more below. Otherwise "worse" (or
  "better") if the 95% interval of the mean difference excludes 0, and "undecided" if
  not. A row with fewer pairs than planned has no verdict.
- *Second test*: 14 pairs did not decide about ``lowbit_adamw``, whose differences have
  a standard deviation of 0.0073. The row ``lowbit_adamw (second test)`` has 40 new
  seeds, which were planned after the first test and before the first run of the second
  test. At the same deviation, 92% of such tests find a format equivalent if it does not
  differ. New runs are compiled with ``is_unrolled``, which trains faster.

A complete run is stored in its own file, and is not repeated. Several processes may
train at the same time, and you can interrupt them. ``--text`` uses a file instead of
the standard library, with a record of its own. ``--gather`` trains nothing, and writes
the record of all runs that are complete.
"""

import functools
import itertools
import pathlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

import lowbit_optax
from benchmarks import ROOT, pictures, records
from benchmarks.training import compute_optimal, format_rows
from benchmarks.training.format_rows import Row
from benchmarks.training.text import kept_runs, optimal_rows, stdlib_text
from benchmarks.training.text.optimal_rows import B1, B2, CLIP, DECAY, SIZES

MARGIN = 0.004
LEVEL = 0.05
"""The level of each one-sided test, and of the two-sided interval."""

BASE = "float32"


def _row(build, *args, dtype=jnp.bfloat16, **options) -> Row:
    """Return the row of an alias, behind clipping by the global norm."""

    def clipped(rate):
        tx = build(rate, B1, B2, *args, weight_decay=DECAY, **options)
        return optax.chain(optax.clip_by_global_norm(CLIP), tx)

    return Row(clipped, dtype)


# The model has rows and columns of 64, which are too few to factor by default.
_factored = functools.partial(
    _row, lowbit_optax.factored_adamw, min_dim_size_to_factor=64
)

SECOND = "lowbit_adamw (second test)"

ROWS = {
    BASE: format_rows.of_float32(optimal_rows.adamw),
    "lowbit_adamw": _row(lowbit_optax.lowbit_adamw),
    SECOND: _row(lowbit_optax.lowbit_adamw),
    "kahan_adamw": _row(lowbit_optax.kahan_adamw),
    "extra_bits_adamw": _row(lowbit_optax.extra_bits_adamw),
    "factored_adamw": _factored(),
    "factored_adamw(bits=0)": _factored(bits=0),
    "lpmm_adam": _row(lowbit_optax.lpmm_adam, dtype=None),
    "plain bfloat16": optimal_rows.ROWS["bfloat16, nearest"],
}

SEEDS = dict.fromkeys(ROWS, range(6)) | {
    BASE: range(54),
    "lowbit_adamw": range(14),
    "kahan_adamw": range(14),
    SECOND: range(14, 54),
}
"""The planned runs of each row."""


def main(argv: list[str] | None = None) -> None:
    parser = records.Options(__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW")
    parser.add_argument("--text", type=pathlib.Path, metavar="FILE", help="a text file")
    parser.add_argument("--gather", action="store_true", help="train nothing")
    args = parser.parse_args(argv)
    path = records.path_of(__name__)
    if args.text:
        path = path.with_stem(f"{path.stem}_{args.text.stem}")
    if not args.draw:
        folder = ROOT / "runs" / path.stem
        recorded = _recorded(records.load(path)) if path.exists() else {}
        if not args.gather:
            of_file, of_python = stdlib_text.load_file, stdlib_text.load_whole
            whole = of_file(args.text) if args.text else of_python()
            known = kept_runs.complete(folder, recorded)
            _train(args.rows or list(ROWS), folder, known, whole)
        # These options select runs and the record, and do not describe it.
        del args.rows, args.text, args.gather
        found = kept_runs.complete(folder, recorded)
        records.save(path, args, records.ran_here(), **figures(found))
    record = records.load(path)
    print(text(record))
    draw(record, pictures.picture_of(path.stem))


def _train(rows: Sequence[str], folder, found: kept_runs.Runs, whole) -> None:
    """Train the runs that are missing: all rows with one seed before the next."""
    size = SIZES["small"]
    settings = {"steps": size.steps, "batch_size": compute_optimal.BATCH}
    settings["learning_rate"] = size.learning_rate

    model = size.model._replace(is_unrolled=True)
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in itertools.product(SEEDS[BASE], rows):
        if seed in SEEDS[name] and seed not in found.get(name, {}):
            run = compute_optimal.train(name, seed, model, whole, settings, ROWS)
            kept = {"bytes": run["bytes"], "held_out": run["held_out"][-1]}
            kept_runs.write(folder, name, seed, kept)


def _recorded(record: dict) -> kept_runs.Runs:
    """Return the runs in a record."""
    return {
        name: {
            seed: {"bytes": row["bytes_per_parameter"], "held_out": loss}
            for seed, loss in zip(row["seeds"], row["losses"], strict=True)
        }
        for name, row in record["rows"].items()
    }


def figures(found: kept_runs.Runs) -> dict:
    """Return the losses of each row, and its verdict."""
    return {
        "margin": MARGIN,
        "rows": {
            name: _figures(name, found[name], found.get(BASE, {}))
            for name in ROWS
            if found.get(name)
        },
    }


def _figures(name: str, own: dict[int, dict], base: dict[int, dict]) -> dict:
    pairs = differences(own, base)
    found = {
        "bytes_per_parameter": next(iter(own.values()))["bytes"],
        "seeds": list(own),
        "losses": [run["held_out"] for run in own.values()],
    }
    if name == BASE or len(pairs) < 2:
        return found
    planned = len(SEEDS[name])
    return found | {"pairs": pairs, "planned": planned} | verdict(pairs, planned)


def differences(own: dict[int, dict], base: dict[int, dict]) -> list[float]:
    """Return the differences of the losses of runs with the same seeds."""
    both = [seed for seed in own if seed in base]
    return [own[seed]["held_out"] - base[seed]["held_out"] for seed in both]


def verdict(pairs: Sequence[float], planned: int = 0) -> dict:
    """Return the mean of differences, its 95% interval, and the verdict.

    Args:
      pairs: two or more differences.
      planned: the number of pairs that a verdict needs.
    """
    count, mean = len(pairs), float(np.mean(pairs))
    error = float(np.std(pairs, ddof=1)) / np.sqrt(count)
    one_sided, two_sided = stats.t.ppf([1 - LEVEL, 1 - LEVEL / 2], count - 1) * error
    interval = [mean - two_sided, mean + two_sided]
    if count < planned:
        word = "not finished"
    elif abs(mean) + one_sided < MARGIN:
        word = "equivalent"
    elif interval[0] > 0 or interval[1] < 0:
        word = "worse" if mean > 0 else "better"
    else:
        word = "undecided"
    return {"mean": mean, "interval": interval, "verdict": word}


def text(record: dict) -> str:
    """Return a table of the verdicts."""
    lines = ["| format | bytes per parameter | pairs | minus float32 | verdict |"]
    lines.append("|---|---|---|---|---|")
    for name, row in record["rows"].items():
        if "verdict" not in row:
            continue
        mean, (low, high) = row["mean"], row["interval"]
        pairs = f"{len(row['pairs'])} of {row['planned']}"
        gap = f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"
        size = f"{row['bytes_per_parameter']:.2f}"
        lines.append(f"| `{name}` | {size} | {pairs} | {gap} | {row['verdict']} |")
    return "\n".join(lines)


@pictures.panels(4)
def draw(record: dict, axes) -> str:
    """Draw the interval of each row that has a verdict, and the margin."""
    is_complete = lambda row: row.get("verdict", "not finished") != "not finished"
    rows = {k: row for k, row in record["rows"].items() if is_complete(row)}
    axes.axvspan(-MARGIN, MARGIN, color="0.9", label="margin")
    axes.axvline(0, color="black", lw=1)
    for at, row in enumerate(rows.values()):
        axes.plot(row["pairs"], [at] * len(row["pairs"]), ".", color="0.6")
        axes.plot(row["interval"], [at, at], color="C0", lw=2)
        axes.plot(row["mean"], at, "o", color="C0")
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set(xlabel="held-out loss minus float32's, nats per byte (lower is better)")
    same = [name for name, row in rows.items() if row["verdict"] == "equivalent"]
    names = ", ".join(same) or "No format yet"
    return f"Equivalent to float32 within {MARGIN} nats: {names}"
