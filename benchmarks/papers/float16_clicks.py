"""A small DLRM with weights in float16, with and without 8 extra bits.

    .venv/bin/python -m benchmarks float16_clicks

Lewandowski and Kosson 2023, figure 4: a DLRM in float16 without a loss scale loses AUC
against float32, and with 8 extra bits it does not. As in the paper, SGD has a constant
rate and batches of 128. The click log is generated. Activations are float16 too. The
weight and its last extra bit are rounded to nearest; the paper cuts the weight off.
"""

import jax

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.papers import click_log

RUNS = {
    "float32": None,
    "float16": lowbit_optax.nearest(),
    "float16, +8": lowbit_optax.extra_bits(8, residual_rounding="nearest"),
}
NAMES = {"float16": "float16, nearest", "float16, +8": "float16, 8 extra bits"}
PARTS = {
    "auc": ("AUC minus float32's, percentage points", 100, 3, "higher"),
    "loss": ("held-out loss minus float32's, nats", 1, 5, "lower"),
}


def measure(args) -> dict:
    trained, held_out = click_log.trainer(RUNS, "float16", args)

    def of(name: str, seed: int) -> dict:
        params = trained(name, seed)
        loss = jax.jit(click_log.loss_fn)(params, *held_out)
        return {"auc": click_log.area_under_curve(params, held_out), "loss": loss}

    found = records.of_seeds(RUNS, args.seeds, of)
    spreads, gaps = records.compared(found, "float32")
    return {**spreads, "gaps_to_float32": gaps}


@pictures.panels(3, (1, 1), sharey=True)
def draw(record: dict, *both) -> str:
    for axes, (part, options) in zip(both, PARTS.items(), strict=True):
        gaps = record["gaps_to_float32"][part]
        found = {label: gaps[name] for name, label in NAMES.items()}
        pictures.each_seed(axes, found, *options)
    lost = -100 * record["gaps_to_float32"]["auc"]["float16"]["mean"]
    return (
        f"float16 weights lose {lost:.2f} percentage points of AUC on a click log; "
        "with 8 extra bits, they lose nothing"
    )


main = records.program(__name__, seeds=5, steps=5000, learning_rate=0.1)
