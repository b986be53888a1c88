"""Test accuracy and memory of LPMM and low-bit moments, compared with float32.

    python -m benchmarks accuracy_tables --width 8 --epochs 5 \
        --train-size 10000 --test-size 5000 --seeds 3

This command prints tables 1 to 3 of LPMM's paper at small scale: weights of 12, 10 and
8 bits, rounded to nearest or stochastically, with an update after every microbatch or
after N microbatches. The learning rate of SGD is proportional to N, as in the paper.
All rows use the same seeds and batches. `--rows` selects rows; the rows with
N = 16 are trained only if they are selected. The other options are those of
`cifar_optimizers` that no row sets.

References:
  "Training Neural Networks with Low-Precision Model Memory", section 6.
"""

import copy

from benchmarks import records
from benchmarks.training import cifar_optimizers
from benchmarks.training.images import cifar_data

NEEDS = ("flax", "matplotlib", "sklearn", "tqdm")

SGD = "--batch-size 32 --learning-rate {rate} --weight-decay 5e-4"
ADAMW = "--batch-size 128 --learning-rate 1e-3 --weight-decay 0.05"
BITS = (12, 10, 8)
OF_ROWS = (
    *("optimizer", "compare", "dtype", "bits", "rounding", "loss_scale"),
    *("batch_size", "microbatches", "learning_rate", "weight_decay"),
)
"""The options of `cifar_optimizers` that depend on the row."""


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


def measure(args) -> dict:
    rows = {}
    for row in args.rows:
        rows[row] = cifar_optimizers.parse_args(ROWS[row].split(), copy.copy(args))
    # There must be enough images for every row.
    dataset = cifar_data.load(max(rows.values(), key=lambda row: row.batch_size))

    def of(row: str, seed: int) -> dict:
        return cifar_optimizers.train(rows[row], dataset, rows[row].optimizer, seed)

    return cifar_data.record(dataset, records.of_seeds(rows, args.seeds, of))


def main(argv: list[str] | None = None) -> None:
    options = cifar_optimizers.options(__doc__)
    default = [row for row in ROWS if not row.endswith("-n16")]
    options.add_argument("--rows", nargs="+", choices=ROWS, default=default)
    args = options.parse_args(argv)
    for name in OF_ROWS:
        if getattr(args, name) != options.get_default(name):
            options.error(f"--{name.replace('_', '-')} is an option of the rows")
    records.run(__name__, args, measure, cifar_data.text)
