"""The picture of README: memory of GPT-2 by optimizer, beside losses of a small GPT.

    .venv/bin/python -m benchmarks memory_and_loss

Memory is that of ``memory_report`` for the shapes of GPT-2 124M; nothing is allocated.
The losses are those that ``compute_optimal`` has recorded.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks import ROOT, leaf_sets, pictures, records
from benchmarks.training.format_rows import Row
from benchmarks.training.text.optimal_rows import ROWS, adamw

MINUTES = 0.2
NEEDS = ("matplotlib",)

PICTURE = ROOT / "docs" / "memory_and_loss.png"
PARTS = {
    "params": "parameters",
    "residual": "master, or its low bits",
    "moments": "moments",
}
MASTER = Row(
    lambda rate: lowbit_optax.lowbit(
        adamw(rate), weights=lowbit_optax.master_copy(), moments="float32"
    )
)
SHOWN = {
    "float32": "float32 master",
    "bfloat16, nearest": "bfloat16, nearest",
    "lowbit": "lowbit_adamw",
    "LPMM, 12 bits": "lpmm_adam, 12 bits",
}
"""Rows of the record, by their names in the picture."""


def memory(row: Row) -> dict[str, float]:
    """Bytes per parameter of GPT-2, by part."""
    tx = row.build(optax.constant_schedule(1e-3))
    shapes = leaf_sets.gpt2().shapes
    master = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    params, _ = jax.eval_shape(functools.partial(row.start, tx), master)
    total = lowbit_optax.memory_report(tx, params).total
    return {part: getattr(total, part) / total.size for part in PARTS}


@pictures.panels(3.1, (5, 4))
def draw(record: dict, bars, curves) -> None:
    """Draw bars of memory, and curves of the loss to the right of them."""
    rows = {name: ROWS[row] for row, name in SHOWN.items()} | {"float32 master": MASTER}
    sizes = {name: memory(row) for name, row in rows.items()}
    texts = {name: f"{sum(each.values()):.2f}" for name, each in sizes.items()}
    pictures.stacked(bars, sizes, PARTS, 1, texts)
    bars.grid(False)
    bars.set(xlim=(0, 16), xlabel="bytes per parameter, GPT-2 124M, AdamW")
    bars.legend(loc="lower right")
    for row, name in SHOWN.items():
        run = record["runs"][row]
        curve = np.convolve(np.mean(run["curves"], 0), np.ones(5) / 5, "valid")
        label = f"{name}: {run['held_out']['mean']:.3f}"
        part = np.arange(5, 5 + len(curve)) / (4 + len(curve))
        late = part > 0.4  # where the curves part
        curves.plot(part[late], curve[late], color=ROWS[row].color, label=label)
    curves.set(xlabel="part of a GPT's training, on a CPU", ylabel="training loss")
    curves.legend(title="loss on held-out text", fontsize=8)


def main(argv: list[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(argv)
    draw(records.load(records.path_of("benchmarks.training.compute_optimal")), PICTURE)
