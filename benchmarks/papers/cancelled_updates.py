"""Share of updates that rounding cancels in the training of a small DLRM, and its AUC.

    .venv/bin/python -m benchmarks cancelled_updates

Zamirai et al. 2020, figure 9: with bfloat16 weights rounded to nearest the share of
cancelled updates grows from the middle of the training on, in embeddings and linear
layers; and the row DLRM of table 4: nearest loses AUC, stochastic rounding and Kahan
summation do not. SGD with a rate that falls to 0 linearly, on a generated click log.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.papers import click_log

COUNTS = 50
RUNS = {
    "float32": None,
    "nearest": lowbit_optax.nearest(),
    "stochastic": lowbit_optax.stochastic_rounding(),
    "Kahan": lowbit_optax.kahan(),
}


def optimizer(weights, steps: int, rate: float):
    inner = optax.sgd(optax.linear_schedule(rate, 0.0, steps))
    return lowbit_optax.lowbit(inner, weights=weights) if weights else inner


def by_layer(shares: dict) -> dict[str, np.ndarray]:
    """The mean of the leaves' shares: of embeddings and of linear layers' matrices."""
    linear = [layer["w"] for layer in shares["linear"].values()]
    return {
        "embeddings": np.asarray(shares["embeddings"]),
        "linear": np.mean(linear, 0),
    }


def draw(record: dict, is_apart: bool) -> None:
    path = pictures.picture_of("cancelled_updates", is_apart)
    with pictures.drawn(path, 3.2, (3, 2)) as (curves, bars):
        x = np.arange(COUNTS) * record["options"]["steps"] / COUNTS
        for (name, runs), line in zip(record["cancelled"].items(), "-:", strict=True):
            runs = 100 * np.array(runs)
            color = pictures.COLORS["nearest"]
            curves.plot(x, runs.mean(0), line, color=color, label=name)
            low, high = runs.min(0), runs.max(0)
            curves.fill_between(x, low, high, color=color, alpha=0.2, lw=0)
        curves.set(xlabel="step", ylabel="cancelled updates, %", ylim=(0, 100))
        curves.set_title("bfloat16, nearest")
        curves.legend(loc="upper left")
        for name, found in record["auc"].items():
            values = 100 * np.array(found["values"])
            color = pictures.COLORS[name]
            bars.plot(values, [name] * len(values), ".", color=color, alpha=0.5)
            bars.plot(100 * found["mean"], name, "|", color=color, ms=18, mew=2.5)
        bars.invert_yaxis()
        bars.set(xlabel="AUC on held-out clicks, %, of each seed")
        bars.margins(y=0.2)


def main(argv: list[str] | None = None) -> None:
    parser = records.parser(__doc__, seeds=5)
    parser.add_argument("--steps", type=int, help="a multiple of 50, 5000 by default")
    parser.add_argument("--learning-rate", type=float, default=1.0, help="the first")
    args = parser.parse_args(argv)
    args.steps = args.steps or (200_000 if args.full else 5000)
    path = records.path_of(__name__, args.is_apart)
    if not args.draw:
        log, held_out = click_log.both()
        auc: dict[str, list] = {name: [] for name in RUNS}
        cancelled: dict[str, list] = {"embeddings": [], "linear": []}
        for seed in range(args.seeds):
            start = click_log.init(jax.random.key(seed))
            shape = args.steps, click_log.BATCH
            order = np.random.default_rng(seed).integers(len(log.clicks), size=shape)
            for name, weights in RUNS.items():
                tx = optimizer(weights, args.steps, args.learning_rate)
                dtype = jnp.dtype("bfloat16" if weights else "float32")
                every = args.steps // COUNTS if name == "nearest" else 0
                params, shares = click_log.train(tx, dtype, start, log, order, every)
                auc[name].append(click_log.area_under_curve(params, held_out))
                print(f"seed {seed} {name:12} AUC {auc[name][-1]:.4f}", flush=True)
                if shares is not None:
                    for layer, share in by_layer(shares).items():
                        cancelled[layer].append(share)
        records.save(
            path,
            args,
            records.ran_here(),
            auc={name: records.spread(values) for name, values in auc.items()},
            gaps_to_float32=records.gaps(auc, "float32"),
            cancelled=cancelled,
        )
    record = records.load(path)
    for name, found in record["auc"].items():
        gap = record["gaps_to_float32"].get(name)
        gap = f"  to float32 {records.shown(gap, 4)}" if gap else ""
        print(f"{name:12} AUC {records.shown(found, 4)}{gap}")
    draw(record, args.is_apart)
