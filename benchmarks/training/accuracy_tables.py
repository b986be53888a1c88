"""Test accuracy and memory of LPMM and low-bit moments, compared with float32.

    python -m benchmarks accuracy_tables --width 8 --epochs 5 \
        --train-size 10000 --test-size 5000 --seeds 3 --output tables.json

This command prints tables 1 to 3 of LPMM's paper at small scale: weights of 12, 10 and
8 bits, rounded to nearest or stochastically, with an update after every microbatch or
after N microbatches. The learning rate of SGD is proportional to N, as in the paper.
All rows use the same seeds and batches. `--rows` selects rows; the rows with
N = 16 are trained only if they are selected. `cifar_optimizers` documents all other
options.

References:
  "Training Neural Networks with Low-Precision Model Memory", section 6.
"""

import argparse
import pathlib
import sys

from benchmarks import records
from benchmarks.training import cifar_optimizers
from benchmarks.training.images import cifar_data, flags, reporting

NEEDS = ("flax", "matplotlib", "sklearn", "tqdm")

SGD = "--batch-size 32 --learning-rate {rate} --weight-decay 5e-4"
ADAMW = "--batch-size 128 --learning-rate 1e-3 --weight-decay 0.05"
BITS = (12, 10, 8)


def _sgd(flags: str, n: int = 1) -> str:
    rate = SGD.format(rate=0.025 * n)
    return f"--optimizer {flags} --microbatches {n} {rate}"


# The options that each row passes to `cifar_optimizers`.
ROWS = {
    "sgd": _sgd("sgd"),
    "sgd-n4": _sgd("sgd", 4),
    "sgd-n16": _sgd("sgd", 16),
    "lowbit_sgd": _sgd("lowbit_sgd"),
    "adamw": f"--optimizer adamw {ADAMW}",
    "lowbit_adamw": f"--optimizer lowbit_adamw {ADAMW}",
    "factored_adamw": f"--optimizer factored_adamw {ADAMW}",
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
    """Train rows with every seed, and write all finished runs after each run.

    Args:
        rows: names in `ROWS`.
        rest: more options of `cifar_optimizers`, for all rows.
        output: the JSON file to write; an existing file is replaced.
    """
    runs: list[dict] = []
    parse = cifar_optimizers.parse_args
    parsed = {row: parse([*ROWS[row].split(), *rest]) for row in rows}
    # One seed at a time, so that an interrupted run has all rows of some seeds.
    for seed in range(parsed[rows[0]].seeds):
        for row, args in parsed.items():
            dataset = flags.load(args)
            result = cifar_optimizers.train(args, dataset, args.optimizer, seed)
            runs.append(
                {
                    "row": row,
                    "label": result.label,
                    "seed": seed,
                    "settings": flags.settings(args, dataset),
                    "bytes_per_parameter": result.bytes_per_parameter,
                    "test_accuracy": result.test_accuracy,
                    "train_loss": result.train_loss,
                    "seconds": result.metrics["seconds"],
                    "test": result.metrics["test"],
                }
            )
            reporting.write(output, runs=runs)
    return runs


def table(runs: list[dict]) -> str:
    """Return a Markdown table of all rows, with their memory."""
    groups = {row: [run for run in runs if run["row"] == row] for row in ROWS}
    groups = {row: found for row, found in groups.items() if found}
    heads = "row", "weights", "test accuracy, %", "training loss", "bytes per parameter"
    lines = [
        (
            f"`{row}`",
            found[0]["label"],
            reporting.spread([100 * run["test_accuracy"] for run in found], 2),
            reporting.spread([run["train_loss"] for run in found], 3),
            f"{found[0]['bytes_per_parameter']:.2f}",
        )
        for row, found in groups.items()
    ]
    return records.table(heads, lines)


def main(argv: list[str] | None = None) -> list[dict]:
    """Train the selected rows, print the table, and return the runs."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="Other options are passed to cifar_optimizers, for all rows.",
        allow_abbrev=False,
    )
    default = [row for row in ROWS if not row.endswith("-n16")]
    add = parser.add_argument
    add("--rows", nargs="+", choices=ROWS, default=default, metavar="ROW")
    add("--output", type=pathlib.Path, default="runs/accuracy_tables.json")
    args, rest = parser.parse_known_args(argv)
    try:
        runs = train(args.rows, rest, args.output)
    except cifar_data.DataError as error:
        sys.exit(f"error: {error}")
    print(table(runs))
    return runs
