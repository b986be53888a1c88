"""Share of updates that rounding cancels in the training of a small DLRM, and its AUC.

    .venv/bin/python -m benchmarks cancelled_updates

Zamirai et al. 2020, figure 9: with bfloat16 weights rounded to nearest, the share of
canceled updates grows from the middle of the training on, in embeddings and in linear
layers. Table 4, DLRM: rounding to nearest loses AUC, and stochastic rounding and Kahan
summation do not. This benchmark uses SGD with a linear decay, on a generated click log.
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


def by_layer(shares: dict) -> dict[str, np.ndarray]:
    """Return the mean share of the embeddings, and of the matrices of linear layers."""
    linear = [layer["w"] for layer in shares["linear"].values()]
    return {
        "embeddings": np.asarray(shares["embeddings"]),
        "linear": np.mean(linear, 0),
    }


def measure(args) -> dict:
    log, held_out = click_log.both()
    cancelled: dict[str, list] = {"embeddings": [], "linear": []}

    def of(name: str, seed: int) -> dict:
        weights = RUNS[name]
        tx = optax.sgd(optax.linear_schedule(args.learning_rate, 0.0, args.steps))
        tx = lowbit_optax.lowbit(tx, weights=weights) if weights else tx
        dtype = jnp.dtype("bfloat16" if weights else "float32")
        start = click_log.init(jax.random.key(seed))
        order = click_log.order_of(seed, args.steps, log)
        params, shares = click_log.train(tx, dtype, start, log, order, COUNTS)
        if name == "nearest":
            for layer, share in by_layer(shares).items():
                cancelled[layer].append(share)
        return {"AUC": click_log.area_under_curve(params, held_out)}

    auc = records.of_seeds(RUNS, args.seeds, of)["AUC"]
    return {
        "auc": records.spreads(auc),
        "gaps_to_float32": records.gaps(auc, "float32"),
        "cancelled": cancelled,
    }


@pictures.panels(3.9, (4, 3), columns=4)
def draw(record: dict, curves, auc) -> str:
    x = np.arange(COUNTS) * record["options"]["steps"] / COUNTS
    color, ends = pictures.FORMATS["nearest"][0], []
    for (name, runs), line in zip(record["cancelled"].items(), "-:", strict=True):
        runs = 100 * np.array(runs)
        pictures.band(curves, x, runs, ls=line, color=color, label=name)
        ends.append(runs.mean(0)[-1])
    curves.set(title="nearest rounding: mean and range of the seeds", xlabel="step")
    curves.set(ylabel="canceled updates, %", ylim=(0, 100))
    label = "AUC on held-out clicks, %"
    pictures.each_seed(auc, record["auc"], label, 100, 2, "higher")
    lost = -100 * record["gaps_to_float32"]["nearest"]["mean"]
    return (
        f"Nearest rounding cancels {min(ends):.0f}% of the updates at the end of the "
        f"training, and costs {lost:.2f} percentage points of AUC"
    )


main = records.program(__name__, seeds=5, steps=5000, learning_rate=1.0)
