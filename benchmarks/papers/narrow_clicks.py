"""A small DLRM whose bfloat16 weights have fewer than 16 bits.

    .venv/bin/python -m benchmarks narrow_clicks

Zamirai et al. 2020, figure 10: with 14 bits, Kahan summation still matches float32,
and stochastic rounding does not. With 12 and 10 bits, both lose AUC. The formats have 8
bits of exponent, so weights of 14, 12 and 10 bits have 5, 3 and 1 bits of mantissa. As
in the paper, only weights have fewer bits here; activations are bfloat16. The click log
is generated, and SGD has a constant rate.
"""

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.papers import click_log
from lowbit_optax.precision import FloatFormat

BITS = (16, 14, 12, 10)
METHODS = {
    "stochastic": lowbit_optax.stochastic_rounding,
    "Kahan": lowbit_optax.kahan,
}
RUNS = {"float32": None} | {
    f"{method}, {bits} bits": make(float_format=FloatFormat(8, bits - 9))
    if bits < 16
    else make()
    for method, make in METHODS.items()
    for bits in BITS
}


def measure(args) -> dict:
    return click_log.areas(RUNS, args)


@pictures.panels(3)
def draw(record: dict, axes) -> str:
    gaps = record["gaps_to_float32"]["auc"]
    found = {name: gaps[name] for name in RUNS if name != "float32"}
    text = "AUC minus the float32 AUC, percentage points"
    pictures.each_seed(axes, found, text, 100, 2, "higher")
    lost = {m: -100 * gaps[f"{m}, 10 bits"]["mean"] for m in METHODS}
    return (
        f"With 10 bits, stochastic rounding loses {lost['stochastic']:.1f} percentage "
        f"points of AUC, and Kahan summation {lost['Kahan']:.1f}"
    )


main = records.program(__name__, seeds=5, steps=5000, learning_rate=0.1)
