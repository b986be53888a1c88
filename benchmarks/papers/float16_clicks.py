"""A small DLRM with weights in float16, with and without 8 extra bits.

    .venv/bin/python -m benchmarks float16_clicks

Lewandowski and Kosson 2023, figure 4: trained in float16 without a loss scale a DLRM
loses AUC against float32, and with 8 extra bits it does not. SGD at a constant rate in
batches of 128, as theirs; on a generated click log. Activations are float16 too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.papers import click_log

RUNS = {
    "float32": None,
    "float16": lowbit_optax.nearest(),
    "float16, +8": lowbit_optax.extra_bits(8, residual_rounding="nearest"),
}
KINDS = dict(zip(RUNS, ("float32", "nearest", "extra bits"), strict=True))
"""Of ``pictures.COLORS``."""
PARTS = {"auc": "AUC, %", "loss": "loss"}


def optimizers(rate: float) -> dict:
    """Optimizer and dtype by name."""
    sgd, float16 = optax.sgd(rate), jnp.dtype("float16")
    return {
        name: (lowbit_optax.lowbit(sgd, weights=weights), float16)
        if weights
        else (sgd, jnp.dtype("float32"))
        for name, weights in RUNS.items()
    }


def draw(record: dict, is_apart: bool) -> None:
    path = pictures.picture_of("float16_clicks", is_apart)
    with pictures.drawn(path, 2.6, (1, 1)) as both:
        for axes, (part, label) in zip(both, PARTS.items(), strict=True):
            for name, found in record["gaps_to_float32"][part].items():
                values = np.array(found["values"])
                factor = 100 if part == "auc" else 1
                color = pictures.COLORS[KINDS[name]]
                names = [name] * len(values)
                axes.plot(factor * values, names, ".", color=color, alpha=0.5)
                axes.plot(factor * found["mean"], name, "|", color=color, ms=18, mew=2)
            axes.axvline(0, color="black", lw=1)
            axes.margins(y=0.5)
            axes.locator_params(axis="x", nbins=5)
            axes.invert_yaxis()
            axes.set(xlabel=f"{label}, minus float32's of the same seed")


def main(argv: list[str] | None = None) -> None:
    parser = records.parser(__doc__, seeds=5)
    parser.add_argument("--steps", type=int, help="5000 by default")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    args = parser.parse_args(argv)
    args.steps = args.steps or (200_000 if args.full else 5000)
    path = records.path_of(__name__, args.is_apart)
    if not args.draw:
        log, held_out = click_log.both()
        found: dict = {part: {name: [] for name in RUNS} for part in PARTS}
        runs = optimizers(args.learning_rate)
        for seed in range(args.seeds):
            start = click_log.init(jax.random.key(seed))
            shape = args.steps, click_log.BATCH
            order = np.random.default_rng(seed).integers(len(log.clicks), size=shape)
            for name, (tx, dtype) in runs.items():
                params, _ = click_log.train(tx, dtype, start, log, order)
                auc = click_log.area_under_curve(params, held_out)
                loss = float(jax.jit(click_log.loss_fn)(params, *held_out))
                found["auc"][name].append(auc)
                found["loss"][name].append(loss)
                print(
                    f"seed {seed} {name:12} AUC {auc:.4f} loss {loss:.4f}", flush=True
                )
        spreads = {
            part: {name: records.spread(values) for name, values in each.items()}
            for part, each in found.items()
        }
        gaps = {part: records.gaps(each, "float32") for part, each in found.items()}
        ran = records.ran_here()
        records.save(path, args, ran, **spreads, gaps_to_float32=gaps)
    record = records.load(path)
    for part, gaps in record["gaps_to_float32"].items():
        for name, gap in gaps.items():
            print(f"{part:5} {name:12} to float32 {records.shown(gap, 5)}")
    draw(record, args.is_apart)
