"""Learning curves of a small GPT in each format, beside float32, on real text.

    .venv/bin/python -m benchmarks gpt_formats

The text is the sources of Python's standard library. The same starts and batches for
all rows, over several seeds; the figures are differences of each seed to itself in
float32. Muon has its own float32, and five times the learning rate. Two rows keep a
running average of the weights as well: in float32, and in bfloat16 and 8 extra bits.
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
AVERAGED = ("float32", "8 extra bits")
"""The rows of whose weights a running average is kept."""


def muon(rate: optax.Schedule) -> optax.GradientTransformation:
    """Muon for the layers' matrices, Adam for embeddings and norms."""
    of_stack = optax.contrib.MuonDimensionNumbers(1, 2)
    return optax.contrib.muon(
        lambda step: 5 * rate(step),
        adam_learning_rate=rate,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(
            lambda x: of_stack if x.ndim == 3 else None, params
        ),
    )


ROWS = format_rows.adamw() | {
    "Muon, float32": Row("Muon, float32", muon, dtype=jnp.float32, style="-."),
    "Muon, 8 extra bits": Row(
        "Muon, float32", muon, color=pictures.PARTS[3], style="-."
    ),
    "Muon, 8 extra bits, bfloat16 momentum": Row(
        "Muon, float32",
        muon,
        moments=lowbit_optax.cast(jnp.bfloat16),
        color=pictures.PARTS[4],
        style="-.",
    ),
}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(model: GPT, tx, is_averaged: bool, params, state, batches, windows):
    """Losses of all steps, and on held-out text that of the weights and the average."""

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


def train(name: str, args, text: stdlib_text.Text, rows: dict[str, Row]) -> list[Run]:
    """A run of each seed, by one compiled program."""
    model = GPT(args.layers, args.width, 4, args.context)
    row = rows[name]
    tx = row.build(optax.cosine_decay_schedule(args.learning_rate, args.steps, 0.1))
    windows = stdlib_text.even_windows(text.held_out, 1024, args.context + 1)
    runs = []
    for seed in range(args.seeds):
        batches = stdlib_text.random_windows(
            text.train, (seed,), args.steps * args.batch_size, args.context + 1
        )
        batches = batches.reshape(args.steps, args.batch_size, -1)
        begun = row.start(tx, model.init(jax.random.key(seed)))
        done = _run(model, tx, name in AVERAGED, *begun, batches, windows)
        losses, ends = jax.device_get(done)
        runs.append(Run(np.asarray(losses), {k: float(v) for k, v in ends.items()}))
        print(f"seed {seed} {name:28} {runs[-1].ends}", flush=True)
    return runs


def measure(args) -> dict:
    """Of all rows, what :func:`format_rows.figures` makes of their runs."""
    text = stdlib_text.load()
    found = {name: train(name, args, text, ROWS) for name in ROWS}
    large = jax.eval_shape(GPT(12, 768, 12, 1024).init, jax.random.key(0))
    return format_rows.figures(found, ROWS, 40, large)


def add_options(parser) -> None:
    """The sizes of the model and of the training."""
    add = functools.partial(parser.add_argument, type=int)
    add("--layers", default=2, help="of the GPT")
    add("--width", default=64, help="of the GPT")
    add("--context", default=32, help="bytes of an example")
    add("--batch-size", default=16, help="examples per step")
    add("--steps", default=800, help="a multiple of 40")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="the first")


def main(argv: list[str] | None = None) -> None:
    parser = records.parser(__doc__, seeds=3, has_full=False)
    add_options(parser)
    args = parser.parse_args(argv)
    path = records.path_of(__name__, args.is_apart)
    if not args.draw:
        records.save(path, args, records.ran_here(), runs=measure(args))
    record = records.load(path)
    ends = {"held-out loss": 4, "of the average": 4}
    print(format_rows.table(record["runs"], ROWS, ends))
    picture = pictures.picture_of("gpt_formats", args.is_apart)
    format_rows.draw(record, ROWS, picture, record["options"]["steps"] // 40, 0.3)
