"""A small DLRM in bfloat16: AUC with float32 weights, and by rounding of the weights.

    .venv/bin/python -m benchmarks sixteen_bit_clicks

Zamirai et al. 2020, tables 3 and 4, and figure 11: a DLRM whose activations, gradients
and weights are rounded to bfloat16 loses AUC. It matches float32 with float32 weights,
with stochastic rounding, with Kahan summation, and with both together. With float32
weights, the model reads weights rounded to bfloat16, and updates are added to a float32
copy. As in the paper, SGD has a constant rate of 0.1 and batches of 128. The click log
is generated.
"""

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.papers import click_log

RUNS = {
    "float32": None,
    "float32 weights": lowbit_optax.master_copy(),
    "nearest": lowbit_optax.nearest(),
    "stochastic": lowbit_optax.stochastic_rounding(),
    "Kahan": lowbit_optax.kahan(),
    "stochastic + Kahan": lowbit_optax.kahan(rounding="stochastic"),
}


def measure(args) -> dict:
    return click_log.areas(RUNS, args)


@pictures.panels(2.6)
def draw(record: dict, axes) -> str:
    gaps = record["gaps_to_float32"]["auc"]
    text = "AUC minus the float32 AUC, percentage points"
    pictures.each_seed(axes, gaps, text, 100, 2, "higher")
    lost = -100 * gaps["nearest"]["mean"]
    return f"Nearest rounding of the weights loses {lost:.1f} percentage points of AUC"


main = records.program(__name__, seeds=10, steps=5000, learning_rate=0.1)
