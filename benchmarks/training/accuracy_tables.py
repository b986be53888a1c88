"""Tables of test accuracy and memory: LPMM and 8-bit moments against float32.

    python -m benchmarks accuracy_tables --width 8 --epochs 5 \
        --train-size 10000 --test-size 5000 --seeds 3 --output tables.json

trains every row below with every seed, on the same batches, and prints tables 1 to 3 of
LPMM's paper in small: weights of 12, 10 and 8 bits, rounded to nearest or
stochastically, with updates after every microbatch or after N of them. The learning
rate of SGD is proportional to N, as in the paper. All other flags are those of
`cifar_optimizers`.

`--rows 'lpmm_sgd-8*' adamw` trains some of the rows, so that processes can share the
work; `--merge a.json b.json` prints the tables of what they wrote.

References:
  "Training Neural Networks with Low-Precision Model Memory", section 6.
"""

import argparse
import fnmatch
import json
import math
import pathlib
import sys

from benchmarks import records
from benchmarks.training import cifar_optimizers, command_line
from benchmarks.training.images import cifar_data, flags, reporting

SGD = "--batch-size 32 --learning-rate {rate} --weight-decay 5e-4"
ADAMW = "--batch-size 128 --learning-rate 1e-3 --weight-decay 0.05"
BITS = (12, 10, 8)
METHODS = {
    "-nearest": "nearest",
    "": "stochastic",
    "-n4": "stochastic, N = 4",
    "-n16": "stochastic, N = 16",
}


def _sgd(flags: str, n: int = 1) -> str:
    rate = SGD.format(rate=0.025 * n)
    return f"--optimizer {flags} --microbatches {n} {rate}"


# Rows by name, as flags of `cifar_optimizers`. Those with N = 16 are extra: name them.
ROWS = {
    "sgd": _sgd("sgd"),
    "sgd-n4": _sgd("sgd", 4),
    "sgd-n16": _sgd("sgd", 16),
    "lowbit_sgd": _sgd("lowbit_sgd"),
    "adamw": f"--optimizer adamw {ADAMW}",
    "lowbit_adamw": f"--optimizer lowbit_adamw {ADAMW}",
    "lowbit4_adamw": f"--optimizer lowbit4_adamw {ADAMW}",
    "lowbit44_adamw": f"--optimizer lowbit44_adamw {ADAMW}",
    "lpmm_adam-12": f"--optimizer lpmm_adam --bits 12 {ADAMW}",
}
for _bits in BITS:
    _lpmm = f"lpmm_sgd --bits {_bits}"
    ROWS |= {
        f"lpmm_sgd-{_bits}-nearest": _sgd(f"{_lpmm} --rounding nearest"),
        f"lpmm_sgd-{_bits}": _sgd(_lpmm),
        f"lpmm_sgd-{_bits}-n4": _sgd(_lpmm, 4),
        f"lpmm_sgd-{_bits}-n16": _sgd(_lpmm, 16),
    }


def train(rows: list[str], rest: list[str], output: pathlib.Path) -> list[dict]:
    """Trains rows with every seed; `output` has what is done after every run.

    Args:
        rows: names in `ROWS`.
        rest: more flags of `cifar_optimizers`, for all rows.
        output: a JSON file, written anew.
    """
    runs: list[dict] = []
    parsed = {row: flags.parse_args([*ROWS[row].split(), *rest]) for row in rows}
    seeds = next(iter(parsed.values()))
    # Seed by seed, so that a stopped grid has whole columns.
    for seed in range(seeds.seed, seeds.seed + seeds.seeds):
        for row, args in parsed.items():
            dataset = cifar_optimizers.load_dataset(args)
            result = cifar_optimizers.train(args, dataset, args.optimizer, seed)
            runs.append(
                {
                    "row": row,
                    "label": result.label,
                    "seed": seed,
                    "settings": cifar_optimizers.settings(args, dataset),
                    "bytes_per_parameter": result.bytes_per_parameter,
                    "test_accuracy": result.test_accuracy,
                    "train_loss": result.train_loss,
                    "seconds": result.metrics["seconds"],
                    "test": result.metrics["test"],
                }
            )
            document = {"command": records.command(), "runs": runs}
            reporting.write_document(output, document)
    return runs


def merged(paths: list[pathlib.Path]) -> list[dict]:
    """The runs of several files.

    Raises:
        ValueError: a row and seed that two files have, or a row whose settings differ.
    """
    runs: list[dict] = []
    settings: dict[str, dict] = {}
    seen: dict[tuple, pathlib.Path] = {}
    for path in paths:
        for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
            row, key = run["row"], (run["row"], run["seed"])
            if key in seen:
                raise ValueError(
                    f"{path}: row {row}, seed {run['seed']} is in {seen[key]} too"
                )
            seen[key] = path
            if settings.setdefault(row, run["settings"]) != run["settings"]:
                raise ValueError(f"{path}: row {row} has other settings than elsewhere")
            runs.append(run)
    return runs


def tables(runs: list[dict]) -> str:
    """Markdown: every row with its memory, then LPMM's accuracy by bits and method."""
    groups = {
        row: found
        for row in ROWS
        if (found := [run for run in runs if run["row"] == row])
    }
    lines = [
        "| row | weights | test accuracy, % | training loss | bytes/param | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for row, found in groups.items():
        cells = [
            f"`{row}`",
            found[0]["label"],
            _accuracy(found),
            _mean([run["train_loss"] for run in found], ".3f"),
            f"{found[0]['bytes_per_parameter']:.2f}",
            str(len(found)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| LPMM-SGDM, test accuracy, % | "
        + " | ".join(f"{bits} bits" for bits in BITS)
        + " | float32 |",
        "|---|" + "---|" * (len(BITS) + 1),
    ]
    for suffix, method in METHODS.items():
        names = [*(f"lpmm_sgd-{bits}{suffix}" for bits in BITS), f"sgd{suffix}"]
        if any(name in groups for name in names):
            cells = [_accuracy(groups[n]) if n in groups else "" for n in names]
            lines.append(f"| {' | '.join([method, *cells])} |")
    return "\n".join([*lines, "", "Mean ± standard deviation over the seeds."])


def _accuracy(runs: list[dict]) -> str:
    return _mean([100 * run["test_accuracy"] for run in runs], ".2f")


def _mean(values: list[float | None], form: str) -> str:
    # JSON has None for a loss that is not finite.
    return reporting.spread([math.nan if v is None else v for v in values], form)


def _selected(patterns: list[str], parser: argparse.ArgumentParser) -> list[str]:
    for pattern in patterns:
        if not fnmatch.filter(ROWS, pattern):
            parser.error(f"--rows {pattern}: no such row; there are {', '.join(ROWS)}")
    return [row for row in ROWS if any(fnmatch.fnmatch(row, p) for p in patterns)]


def main(argv: list[str] | None = None) -> list[dict]:
    """Runs what the command line asks for; returns the runs in the tables."""
    parser = argparse.ArgumentParser(
        description="Accuracy and memory of LPMM and 8-bit moments.",
        epilog="Other flags go to cifar_optimizers, for all rows.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--rows", nargs="+", help=f"names, with * and ? as in file names: {list(ROWS)}"
    )
    parser.add_argument(
        "--merge", nargs="+", type=pathlib.Path, help="print the tables of these files"
    )
    parser.add_argument(
        "--output",
        type=command_line.output_file,
        default="runs/accuracy_tables.json",
        help="file of the runs (default: %(default)s)",
    )
    args, rest = parser.parse_known_args(argv)
    try:
        if args.merge:
            if rest or args.rows:
                parser.error("--merge trains nothing: leave out all other flags")
            runs = merged(args.merge)
        else:
            default = [row for row in ROWS if not row.endswith("-n16")]
            rows = _selected(args.rows, parser) if args.rows else default
            runs = train(rows, rest, pathlib.Path(args.output))
    except (
        cifar_data.DataError,
        cifar_optimizers.CheckpointError,
        ValueError,
    ) as error:
        sys.exit(f"error: {error}")
    print(tables(runs))
    return runs


if __name__ == "__main__":
    main()
