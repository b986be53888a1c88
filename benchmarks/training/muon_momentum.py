"""Muon with its momentum in several codes, beside float32, on a small GPT.

    .venv/bin/python -m benchmarks muon_momentum

The model, text, starts and batches of ``gpt_formats``, by more seeds. Weights have 8
extra bits in all rows but the first, and AdamW's second moment, of embeddings and
norms, has 8 bits where the momentum has codes.
"""

import jax
import jax.numpy as jnp
import numpy as np

import lowbit_optax
from benchmarks import records
from benchmarks.training import format_rows, gpt_formats
from benchmarks.training.format_rows import Row, Run
from benchmarks.training.text import stdlib_text
from lowbit_optax import block_quantized
from tools.models.gpt import GPT

BASE = "float32, and weights"


def _row(moments) -> Row:
    return Row(BASE, gpt_formats.muon, moments=moments)


def _codes(**options) -> Row:
    """With these codes for AdamW's first moment as well."""
    return _row({"mu": block_quantized(8, **options), "nu": block_quantized(8)})


ROWS = {
    BASE: Row(BASE, gpt_formats.muon, dtype=jnp.float32),
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


def figures(found: dict[str, list[Run]]) -> dict:
    """By row, the spreads of its figures and of gaps to float32 for the record."""
    half = lambda run: float(np.mean(run.losses[len(run.losses) // 2 :]))
    runs = {
        name: [Run([half(run)], run.ends) for run in each]
        for name, each in found.items()
    }
    large = jax.eval_shape(GPT(12, 768, 12, 1024).init, jax.random.key(0))
    made = format_rows.figures(runs, ROWS, 1, large)
    return {
        name: {key: x for key, x in each.items() if key != "curves"}
        for name, each in made.items()
    }


def main(argv: list[str] | None = None) -> None:
    parser = records.parser(__doc__, seeds=5, has_full=False)
    gpt_formats.add_options(parser)
    args = parser.parse_args(argv)
    path = records.path_of(__name__, args.is_apart)
    if not args.draw:
        text = stdlib_text.load()
        found = {name: gpt_formats.train(name, args, text, ROWS) for name in ROWS}
        records.save(path, args, records.ran_here(), runs=figures(found))
    runs = records.load(path)["runs"]
    print(format_rows.table(runs, ROWS, {"held-out loss": 4, "training": 4}))
