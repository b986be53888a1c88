"""nanoGPT's training on the characters of Shakespeare, in each format.

    .venv/bin/python -m benchmarks shakespeare --text tinyshakespeare.txt
    .venv/bin/python -m benchmarks shakespeare --text PATH --rows float32 --seeds 1

The sizes, the schedule and the options of AdamW are nanoGPT's for a CPU; the benchmark
``first_device`` uses those for one GPU. The first 90% of the text is for training. The
validation loss is the mean over the rest, not over a sample. It leaves out only the end
of the text, which is shorter than a window. All rows start from the same weights, and
use the same batches. Each seed is compared with its own float32 run.

A run takes two to four minutes on one core, and is stored in its own file when it is
complete. Runs that have a file, or are in the record, are not trained again, so several
processes may train different rows, and you can interrupt the benchmark.
"""

import pathlib
import sys

from tqdm import tqdm

from benchmarks import ROOT, pictures, records
from benchmarks.training import format_rows
from benchmarks.training.text import kept_runs
from benchmarks.training.text.shakespeare_rows import (
    CONTROLS,
    CPU,
    POINTS,
    ROWS,
    characters,
    train,
)

SOURCE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
    "input.txt"
)
ENDS = "validation", "training"
"""The final figures of a run."""


def main(argv: list[str] | None = None) -> None:
    parser = records.Options(__doc__, seeds=10)
    add = parser.add_argument
    add("--text", type=pathlib.Path, help=f"the text, from {SOURCE}")
    add("--rows", nargs="+", choices=ROWS, metavar="ROW", help="train only these")
    args = parser.parse_args(argv)
    path = records.path_of(__name__)
    if not args.draw:
        if args.text is None or not args.text.is_file():
            sys.exit(f"error: --text must be the file from {SOURCE}, got {args.text}")
        record = records.load(path) if path.exists() else {"runs": {}}
        folder = ROOT / "runs" / path.stem
        _train_all(args, folder, record)
        del args.text, args.rows
        records.save(path, args, records.ran_here(), runs=_gathered(folder, record))
    record = records.load(path)
    print(records.figures(record))
    draw(record, pictures.picture_of(path.stem))


def _train_all(args, folder: pathlib.Path, record: dict) -> None:
    """Train the selected runs that are not complete, and write a file for each."""
    text = characters(args.text)
    rows = args.rows or [name for name in ROWS if name not in CONTROLS]

    def run(name: str, seed: int) -> dict:
        parts = tqdm(range(POINTS), f"{name}, seed {seed}", disable=None)
        return train(name, seed, text, CPU, parts)

    found = _complete(folder, record)
    kept_runs.train_missing(rows, args.seeds, folder, found, run)


def _complete(folder: pathlib.Path, record: dict) -> kept_runs.Runs:
    """Return the complete runs by row and seed."""
    recorded = {
        name: {int(seed): run for seed, run in runs["each"].items()}
        for name, runs in record["runs"].items()
    }
    return kept_runs.complete(folder, recorded)


def _gathered(folder: pathlib.Path, record: dict) -> dict:
    """Return the figures of all complete runs, next to float32 with the same seed."""
    found = _complete(folder, record)
    ends = lambda runs: {
        seed: {end: run[end] for end in ENDS} for seed, run in runs.items()
    }
    return {
        name: {
            "bytes_per_parameter": ROWS[name].bytes_per_parameter(format_rows.OF_BYTES),
            "each": found[name],
            **format_rows.compared(ends(found[name]), ends(found["float32"])),
        }
        for name in filter(found.get, ROWS)
    }


@pictures.panels(4)
def draw(record: dict, axes) -> str:
    runs = {
        name: run
        for name, run in record["runs"].items()
        if name != "float32" and name not in CONTROLS
    }
    gaps = {name: run["gaps"]["validation"] for name, run in runs.items()}
    sizes = {name: run["bytes_per_parameter"] for name, run in runs.items()}
    label = "validation loss minus float32's, nats per character"
    pictures.each_seed(axes, gaps, label, sizes=sizes)
    ends = {name: f"{gap['mean']:+.3f}" for name, gap in gaps.items()}
    if not {"bfloat16, nearest", "lowbit", "factored"} <= ends.keys():
        return ""
    plain, lowbit, factored = map(ends.get, ("bfloat16, nearest", "lowbit", "factored"))
    return (
        f"Minus float32's validation loss: plain bfloat16 {plain}, lowbit {lowbit}, "
        f"factored_adamw {factored}"
    )
