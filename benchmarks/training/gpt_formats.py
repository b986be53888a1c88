"""Learning curves of a small GPT in each format, compared with float32.

    .venv/bin/python -m benchmarks gpt_formats

The text is Python's standard library. All rows start from the same weights and use the
same batches, and each seed is compared with its own float32 run. Muon is compared with
Muon in float32, and has five times the learning rate. Two rows also keep a running
average of the weights, in float32 and in bfloat16 with 8 extra bits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.training import format_rows
from benchmarks.training.format_rows import Row, Run
from benchmarks.training.text import stdlib_text
from tools.models.gpt import GPT

EMA = lowbit_optax.ema_of_params(0.99)
NUMBERS = {"layers": 2, "width": 64, "context": 32, "batch_size": 16, "steps": 800}
NUMBERS |= {"learning_rate": 3e-3}
POINTS = 40
"""The number of points of a curve."""

AVERAGED = ("float32", "8 extra bits")
"""The rows that keep a running average of their weights."""

ROWS = format_rows.adamw() | {
    "Muon, float32": format_rows.of_float32(format_rows.muon, base="Muon, float32"),
    "Muon, 8 extra bits": format_rows.of(format_rows.muon, base="Muon, float32"),
    "Muon, 8 extra bits, bfloat16 momentum": format_rows.of(
        format_rows.muon,
        moments=lowbit_optax.cast(jnp.bfloat16),
        base="Muon, float32",
    ),
}

CHANGED_ON = "2026-11-25"
CHANGED = ("error into mu", "Muon, 8 extra bits")
"""The rounding of these rows changed then. Pictures of older records omit the rows."""


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(model: GPT, tx, is_averaged: bool, params, state, batches, windows):
    """Return the losses of all steps, and the held-out losses at the end."""

    def step(carry, tokens):
        params, state, average = carry
        loss, grads = jax.value_and_grad(model.loss)(params, tokens)
        params, state = lowbit_optax.step(tx, params, state, grads)
        if is_averaged:
            is_wide = params["embedding"].dtype == jnp.float32
            wide = params if is_wide else lowbit_optax.master_weights(params, state)
            average = lowbit_optax.step(EMA, *average, wide)
        return (params, state, average), loss

    average = (params, EMA.init(params)) if is_averaged else None
    carry, losses = jax.lax.scan(step, (params, state, average), batches)
    ends = {"held-out loss": model.loss(carry[0], windows)}
    if is_averaged:
        ends["of the average"] = model.loss(carry[2][0], windows)
    return losses, ends


def train(name: str, args, rows: dict[str, Row]) -> list[Run]:
    """Train one row with each seed, using one compiled program."""
    model = GPT(args.layers, args.width, 4, args.context)
    row, text = rows[name], stdlib_text.load()
    tx = row.build(optax.cosine_decay_schedule(args.learning_rate, args.steps, 0.1))
    windows = stdlib_text.even_windows(text.held_out, 1024, args.context + 1)
    runs = []
    for seed in range(args.seeds):
        batches = stdlib_text.random_windows(
            text.train, (seed,), (args.steps, args.batch_size), args.context + 1
        )
        begun = row.start(tx, model.init(jax.random.key(seed)))
        done = _run(model, tx, name in AVERAGED, *begun, batches, windows)
        losses, ends = jax.device_get(done)
        runs.append(Run(np.asarray(losses), {k: float(v) for k, v in ends.items()}))
        print(f"seed {seed} {name:28} {runs[-1].ends}", flush=True)
    return runs


def measure(args) -> dict:
    """Train all rows, and return their :func:`format_rows.figures`."""
    found = {name: train(name, args, ROWS) for name in ROWS}
    return {"runs": format_rows.figures(found, ROWS, POINTS)}


@pictures.panels(4.4, columns=2)
def draw(record: dict, axes) -> str:
    """Draw each training loss minus float32's, after three tenths of the steps."""
    runs = {
        name.replace("8 extra bits", "lowbit"): run
        for name, run in record["runs"].items()
        if ROWS[name].base != name
        and not (name in CHANGED and record["date"] < CHANGED_ON)
    }
    recent = lambda curve: np.convolve(curve, np.ones(3) / 3, "valid")
    for name, look in pictures.looks(runs).items():
        base = record["runs"]["Muon, float32" if "Muon" in name else "float32"]
        gap = np.subtract(runs[name]["curves"], base["curves"]).mean(0)
        at = record["options"]["steps"] // POINTS * np.arange(3, 1 + len(gap))
        late = at > 0.3 * at[-1]
        axes.plot(at[late], recent(gap)[late], label=name, markevery=4, **look)
    axes.axhline(0, color="black", lw=1)
    axes.set(xlabel="step (the learning rate falls to a tenth)")
    axes.set(ylabel="training loss minus float32's, nats per byte (lower is better)")
    return (
        "Plain bfloat16 falls behind float32 as the learning rate decays; the other "
        "formats of AdamW do not"
    )


main = records.program(__name__, seeds=3, **NUMBERS)
