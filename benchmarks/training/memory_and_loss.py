"""The picture of README: memory of GPT-2 by optimizer, beside losses of a small GPT.

    .venv/bin/python -m benchmarks memory_and_loss            # draws the JSON beside it
    .venv/bin/python -m benchmarks memory_and_loss --train    # trains, and writes it

Memory is that of ``memory_report`` for the shapes of GPT-2 124M; nothing is allocated.
The losses are those of a small GPT on the sources of Python's standard library,
with the same start and batches for all. It needs the ``examples`` extra.
"""

import argparse
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks import ROOT, leaf_sets, pictures, records
from benchmarks.training.text import stdlib_text
from lowbit_optax import lpmm
from tools.models.gpt import GPT

RECORD = records.path_of(__name__)
PICTURE = ROOT / "docs" / "memory_and_loss.png"
PARTS = {
    "params": "parameters",
    "residual": "master, or its low bits",
    "moments": "moments",
}


class Row(NamedTuple):
    """An optimizer of the picture."""

    color: str
    build: Callable[[optax.ScalarOrSchedule], optax.GradientTransformation]
    is_quantized: bool = False


def _in_format(weights, moments):
    return lambda rate: lowbit_optax.lowbit(
        optax.adamw(rate), weights=weights, moments=moments
    )


ROWS = {
    "float32 master": Row(
        pictures.COLORS["float32"],
        _in_format(lowbit_optax.master_copy(), "float32"),
    ),
    "bfloat16, nearest": Row(
        pictures.COLORS["nearest"],
        _in_format(lowbit_optax.nearest(), lowbit_optax.cast(jnp.bfloat16)),
    ),
    "lowbit_adamw": Row(pictures.COLORS["lowbit"], lowbit_optax.lowbit_adamw),
    "lpmm_adam, 12 bits": Row(
        pictures.COLORS["LPMM"],
        functools.partial(lowbit_optax.lpmm_adam, weight_decay=1e-4),
        True,
    ),
}


def start(row: Row, tx, master):
    """Parameters and state of a row from float32 weights."""
    if row.is_quantized:
        params = lowbit_optax.quantize_params(master, bits=12)
        return params, tx.init(params)
    keep = lambda path, leaf: leaf.ndim < 2 or "norm" in path
    dtypes = lowbit_optax.param_dtypes(master, jnp.bfloat16, keep)
    return lowbit_optax.from_master(tx, master, dtypes)


def memory(row: Row) -> dict[str, float]:
    """Bytes per parameter of GPT-2, by part."""
    tx = row.build(1e-3)
    shapes = leaf_sets.gpt2().shapes
    master = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    params, _ = jax.eval_shape(functools.partial(start, row, tx), master)
    total = lowbit_optax.memory_report(tx, params).total
    return {part: getattr(total, part) / total.size for part in PARTS}


def train(row: Row, args: argparse.Namespace, text: stdlib_text.Text) -> dict:
    """The mean loss of each ten steps, and the loss on held-out text."""
    model = GPT(args.layers, args.width, 4, args.context, "none", jnp.dtype("float32"))
    tx = row.build(optax.cosine_decay_schedule(args.learning_rate, args.steps))
    params, state = start(row, tx, model.init(jax.random.key(0)))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, tokens):
        loss, grads = lpmm.value_and_grad(model.loss, lazy=True)(params, tokens)
        return *lowbit_optax.step(tx, params, state, grads), loss

    losses = []
    for step in range(args.steps):
        tokens = stdlib_text.random_windows(
            text.train, (0, step), args.batch_size, args.context + 1
        )
        params, state, loss = train_step(params, state, tokens)
        losses.append(loss)
    windows = stdlib_text.even_windows(text.held_out, 512, args.context + 1)
    held_out = jax.jit(model.loss)(params, windows)
    means = np.reshape(jax.device_get(losses), (-1, 10)).mean(1)
    return {
        "losses": [round(float(x), 4) for x in means],
        "held_out": round(float(held_out), 4),
    }


def draw(record: dict) -> None:
    """Bars of memory beside curves of the loss, into a PNG."""
    with pictures.drawn(PICTURE, 3.1, (5, 4)) as (bars, curves):
        _draw_memory(bars, record["memory"])
        _draw_losses(curves, record["runs"])


def _draw_memory(bars, memory: dict) -> None:
    names = list(memory)
    left = np.zeros(len(names))
    for (part, label), color in zip(PARTS.items(), pictures.PARTS, strict=False):
        sizes = np.array([memory[name][part] for name in names])
        bars.barh(names, sizes, left=left, color=color, label=label)
        left += sizes
    for name, total in zip(names, left, strict=True):
        bars.text(total + 0.15, name, f"{total:.2f}", va="center")
    bars.invert_yaxis()
    bars.grid(False)
    bars.set(xlim=(0, 16), xlabel="bytes per parameter, GPT-2 124M, AdamW")
    bars.legend(loc="lower right")


def _draw_losses(curves, runs: dict) -> None:
    for name, run in runs.items():
        steps = 10 * np.arange(1, len(run["losses"]) + 1)
        recent = np.convolve(run["losses"], np.ones(5) / 5, "valid")
        label = f"{name}: {run['held_out']:.3f}"
        curves.plot(steps[4:], recent, color=ROWS[name].color, label=label, lw=1.2)
    # From a third of the training on, where the curves part.
    length = max(len(run["losses"]) for run in runs.values())
    highest = max(run["losses"][length // 3] for run in runs.values())
    curves.set(xlim=(10 * (length // 3), None), ylim=(None, highest))
    curves.set(xlabel="step of a small GPT, on a CPU", ylabel="training loss")
    curves.legend(title="loss on held-out text", fontsize=8)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--train", action="store_true", help="train, write the JSON")
    parser.add_argument("--layers", type=int, default=4, help="of the small GPT")
    parser.add_argument("--width", type=int, default=64, help="of the small GPT")
    parser.add_argument("--context", type=int, default=64, help="bytes of an example")
    parser.add_argument("--batch-size", type=int, default=16, help="examples per step")
    parser.add_argument("--steps", type=int, default=1200, help="a multiple of 10")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="the first")
    args = parser.parse_args(argv)
    if args.train:
        text = stdlib_text.load()
        runs = {name: train(row, args, text) for name, row in ROWS.items()}
        sizes = {name: memory(row) for name, row in ROWS.items()}
        records.save(RECORD, args, records.ran_here(), memory=sizes, runs=runs)
    record = records.load(RECORD)
    for name, parts in record["memory"].items():
        held_out = record["runs"][name]["held_out"]
        print(f"{name:24} {sum(parts.values()):6.3f} bytes, held-out loss {held_out}")
    draw(record)
