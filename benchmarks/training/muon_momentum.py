"""Muon with its momentum in several codes, beside float32, on a small GPT.

    .venv/bin/python -m benchmarks muon_momentum

The model, text, starts and batches of ``gpt_formats``, by more seeds. Weights have 8
extra bits in all rows but the first, and AdamW's second moment, of embeddings and
norms, has 8 bits where the momentum has codes.
"""

import jax.numpy as jnp
import numpy as np

import lowbit_optax
from benchmarks import records
from benchmarks.training import format_rows, gpt_formats
from benchmarks.training.format_rows import Row, Run
from lowbit_optax import block_quantized

MINUTES = 30

BASE = "float32, and weights"


def _row(moments) -> Row:
    return format_rows.of(format_rows.muon, moments=moments, base=BASE)


def _codes(**options) -> Row:
    """With these codes for AdamW's first moment as well."""
    return _row({"mu": block_quantized(8, **options), "nu": block_quantized(8)})


ROWS = {
    BASE: format_rows.of_float32(format_rows.muon, base=BASE),
    "float32 momentum": _row("float32"),
    "bfloat16 momentum": _row(lowbit_optax.cast(jnp.bfloat16)),
    "8 bits, the default": _row(None),
    "linear, nearest": _codes(code="linear", rounding="nearest"),
    "the same, blocks of 128": _codes(
        code="linear", rounding="nearest", block_size=128
    ),
    "linear, stochastic": _codes(code="linear", rounding="stochastic"),
    "companded, nearest": _codes(code="companded", rounding="nearest"),
    "companded, stochastic": _codes(code="companded", rounding="stochastic"),
    "4 bits": _row({"mu": block_quantized(4), "nu": block_quantized(8)}),
}


def measure(args) -> dict:
    """The figures of all rows, without curves.

    A run's training loss is the mean loss of the second half of its steps.
    """
    half = lambda run: float(np.mean(run.losses[len(run.losses) // 2 :]))
    runs = {
        name: [
            Run([half(run)], run.ends) for run in gpt_formats.train(name, args, ROWS)
        ]
        for name in ROWS
    }
    made = format_rows.figures(runs, ROWS, 1)
    for each in made.values():
        del each["curves"]
    return {"runs": made}


def text(record: dict) -> str:
    ends = {"held-out loss": 4, "training": 4}
    return format_rows.table(record["runs"], ROWS, ends)


def main(argv: list[str] | None = None) -> None:
    args = gpt_formats.options(__doc__, seeds=5).parse_args(argv)
    records.run(__name__, args, measure, text)
