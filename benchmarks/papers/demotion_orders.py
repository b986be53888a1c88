"""Divergence in 8 bits: orders of demotion, promotion, and the usual assignments.

    .venv/bin/python -m benchmarks demotion_orders

Lee, Sharma and Aiken, figures 4 to 6: with the same share of low precision, demoting
large groups of tensors first is better than demoting small groups first or in random
order. Uniform and operator-based assignments may diverge because of overflows.
Promoting the tensors that overflow prevents this for little memory. In this benchmark,
a network with batch normalisation learns noisy digits at a learning rate of 1, so that
its weights grow until 8 bits overflow. Accuracy is measured in the training formats.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import pictures, records
from benchmarks.papers import narrowing_network, noisy_digits
from lowbit_optax import precision

MINUTES = 5
NEEDS = ("matplotlib", "sklearn")

ORDERS = {
    "decreasing": "largest groups first",
    "random": "groups in random order",
    "increasing": "smallest groups first",
}
PARTS = ("low_ratio", "accuracy")
RATIOS = (0.15, 0.3, 0.45, 0.6, 1.0)
BASELINES = {
    "uniform": precision.uniform,
    "operator-based": precision.operator_based,
    "operator-based, outputs": lambda plan: precision.operator_based(
        plan, outputs=True
    ),
}
POINTS = 50


def assignments(plan, seed: int) -> dict:
    """Return assignments by name. The random order depends on the seed."""
    found: dict = {"float32": None}
    all_low = precision.uniform(plan)
    found |= {name: choose(plan) for name, choose in BASELINES.items()}
    for order in ORDERS:
        for ratio in RATIOS:
            demoted = precision.demote(plan, ratio, order=order, seed=seed)
            found[f"{order}, {ratio:g}"] = demoted
    for i, group in enumerate(plan.groups):
        alone = np.isin(np.arange(len(plan.tensors)), group)
        low, low_backward = all_low.low & alone, all_low.low_backward & alone
        found[f"only group {i}"] = dataclasses.replace(
            all_low, low=low, low_backward=low_backward
        )
    return found


def summary(runs: list) -> dict:
    """Summarise an assignment, given the accuracy and the steps of each seed."""
    accuracy = [100 * float(right) for right, _ in runs]
    loss = np.stack([steps.loss for _, steps in runs])
    overflow = np.stack([steps.overflow for _, steps in runs])
    parts = lambda x: x.reshape(len(runs), POINTS, -1)
    return {
        "accuracy": records.spread(accuracy),
        "low_ratio": records.spread([steps.low_ratio.mean() for _, steps in runs]),
        "low_ratio_first": float(runs[0][1].low_ratio[0]),
        "diverged": int(sum(right < 50 for right in accuracy)),
        "loss": parts(loss).mean(2)[0],
        "overflow": parts(overflow).max(2)[0],
    }


def measure(args) -> dict:
    plan = narrowing_network.plan_of(args.batch_size)
    given = noisy_digits.data(narrowing_network.NOISE)
    numbers = args.learning_rate, args.steps, args.batch_size, given
    runs: dict[str, list] = {}
    for seed in range(args.seeds):
        same: dict = {}
        for name, assignment in assignments(plan, seed).items():
            for promotes in (False, True) if assignment else (False,):
                # Different ratios may demote the same groups.
                levels = [np.asarray(x) for x in jax.tree.leaves(assignment)]
                key = promotes, *(level.tobytes() for level in levels)
                if key not in same:
                    chosen = jnp.asarray(seed), assignment, jnp.asarray(promotes)
                    trained = narrowing_network.train(*numbers, *chosen)
                    same[key] = jax.device_get(trained)
                full = name + (", promotion" if promotes else "")
                runs.setdefault(full, []).append(same[key])
                print(f"seed {seed} {full}: {100 * same[key][0]:.1f} %", flush=True)
    return {"assignments": {name: summary(kept) for name, kept in runs.items()}}


def text(record: dict) -> str:
    heads = "", "low", "accuracy, %", "diverged"
    rows = [
        (
            name,
            f"{found['low_ratio']['mean']:.3f}",
            records.shown(found["accuracy"], 1),
            found["diverged"],
        )
        for name, found in record["assignments"].items()
    ]
    return records.table(heads, rows)


@pictures.panels(4.4, (1, 1), sharey=True)
def draw(record: dict, *both) -> str:
    found = record["assignments"]
    series = {ORDERS[o]: [f"{o}, {ratio:g}" for ratio in RATIOS] for o in ORDERS}
    series |= {name: [name] for name in BASELINES}
    looks = [
        *({"color": c, "marker": m} for c, m in pictures.OTHERS),
        *({"color": "black", "marker": m, "mfc": "none"} for m in "D<>"),
    ]
    for axes, promotion in zip(both, ("", ", promotion"), strict=True):
        for (name, runs), look in zip(series.items(), looks, strict=True):
            each = [found[run + promotion] for run in runs]
            x, y = ([x[part]["values"] for x in each] for part in PARTS)
            axes.plot(np.ravel(x), np.ravel(y), ls="", alpha=0.8, label=name, **look)
        float32 = found["float32"]["accuracy"]["mean"]
        axes.axhline(float32, color="black", lw=1, label="float32")
        axes.set(title="with promotion" if promotion else "without promotion")
        axes.set(xlabel="share of the elements in 8 bits", xlim=(0, 1), ylim=(0, 100))
    both[0].set(ylabel="accuracy of each seed, % (higher is better)")
    trained = [found[f"decreasing, {ratio:g}"] for ratio in RATIOS]
    shares = [x["low_ratio"]["mean"] for x in trained if not x["diverged"]]
    return (
        f"Up to {max(shares, default=0):.0%} of the elements train in 8 bits if the "
        "largest groups are demoted first; with promotion, every order trains"
    )


def main(argv: list[str] | None = None) -> None:
    sizes = {"steps": (800, 20_000), "batch_size": (64, 512)}
    options = records.Options(__doc__, seeds=4, **sizes, learning_rate=1.0)
    records.run(__name__, options.parse_args(argv), measure, text, draw)
