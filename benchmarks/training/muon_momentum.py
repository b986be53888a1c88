"""Muon with several codes for its momentum, compared with float32, on a small GPT.

    .venv/bin/python -m benchmarks muon_momentum

The model, the text, the initial weights and the batches are the same as in
``gpt_formats``, with more seeds. Except in the first row, weights have 8 extra bits.
AdamW trains the embeddings and norms, and its second moment has 8 bits if the momentum
has codes.
"""

import jax.numpy as jnp
import numpy as np

import lowbit_optax
from benchmarks import records
from benchmarks.training import format_rows, gpt_formats
from benchmarks.training.format_rows import Row, Run
from lowbit_optax import block_quantized

BASE = "float32, and weights"


def _row(moments) -> Row:
    return format_rows.of(format_rows.muon, moments=moments, base=BASE)


def _companded(rounding: str) -> Row:
    """Return a row with AdamW's code for both first moments."""
    first = block_quantized(8, code="companded", rounding=rounding)
    return _row({"mu": first, "nu": block_quantized(8)})


ROWS = {
    BASE: format_rows.of_float32(format_rows.muon, base=BASE),
    "float32 momentum": _row("float32"),
    "bfloat16 momentum": _row(lowbit_optax.cast(jnp.bfloat16)),
    "8 bits, the default": _row(None),
    "companded, nearest": _companded("nearest"),
    "companded, stochastic": _companded("stochastic"),
}


def measure(args) -> dict:
    """Train all rows, and return their figures without curves.

    The training loss of a run is the mean loss of the second half of its steps.
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


main = records.program(__name__, seeds=5, **gpt_formats.NUMBERS)
