"""A network trained on a 16-bit unit: losses by rounding of the weights, and by format.

    .venv/bin/python -m benchmarks sixteen_bit_network

Zamirai et al. 2020, table 3: if every operation rounds to bfloat16, networks lose
accuracy, but not with float32 weights. Figure 11: stochastic rounding and Kahan
summation together match float32. Figure 12: without a loss scale, float16 networks lose
accuracy with either method. This benchmark trains a network with two hidden layers on
noisy digits, with SGD or AdamW. With float32 weights, the model reads weights rounded
to 16 bits, and 16-bit updates are added to a float32 copy. Additional float16 runs
multiply the loss by a power of two. SGD divides its learning rate by the same factor.
"""

from benchmarks import pictures, records
from benchmarks.papers.sixteen_bit_digits import FORMATS, RATES, ROUNDINGS, Run, train

MINUTES = 7
NEEDS = ("matplotlib", "sklearn")

POWERS = {"SGD": (-8, -12, -16, -20), "AdamW": (3, 6, 9, 12)}
UNITS = {f"{dtype}, {x}": (dtype, x) for dtype in FORMATS for x in ROUNDINGS}


def runs_of(optimizer: str) -> dict[str, Run]:
    """Return the runs of an optimizer by name."""
    runs = {"float32": Run(optimizer)}
    runs |= {name: Run(optimizer, *unit) for name, unit in UNITS.items()}
    scaled = {f"2^{k}": k for k in POWERS[optimizer]}
    name = "float16, Kahan"
    return runs | {f"{name}, {x}": runs[name]._replace(power=scaled[x]) for x in scaled}


def measure(args) -> dict:
    optimizers = {}
    for optimizer in RATES:
        runs = runs_of(optimizer)
        of = lambda name, seed, runs=runs: train(runs[name], args.steps, seed)
        found = records.of_seeds(runs, args.seeds, of)
        spreads, gaps = records.compared(found, "float32")
        optimizers[optimizer] = {**spreads, "gaps_to_float32": gaps}
    return {"optimizers": optimizers}


def text(record: dict) -> str:
    lines = []
    for name, found in record["optimizers"].items():
        lines += [name, records.comparison(found, found["gaps_to_float32"])]
    return "\n".join(lines)


@pictures.panels(4, (1, 1), sharey=True)
def draw(record: dict, *both) -> str:
    for axes, (name, found) in zip(both, record["optimizers"].items(), strict=True):
        rows = {x: y for x, y in found["loss"].items() if "2^" not in x}
        pictures.each_seed(axes, rows, "training loss, nats")
        axes.set(title=name)
    both[1].set(xscale="log")
    return (
        "With bfloat16, only nearest rounding raises the loss; float16 trains with SGD "
        "and fails with AdamW, whatever the rounding"
    )


def main(argv: list[str] | None = None) -> None:
    options = records.Options(__doc__, seeds=3, steps=(3000, 60_000))
    records.run(__name__, options.parse_args(argv), measure, text, draw)
