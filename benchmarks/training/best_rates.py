"""Rewards by learning rate, in plain bfloat16 and with exact updates.

    .venv/bin/python -m benchmarks best_rates

The model of ``reinforcement`` is fine-tuned at eight learning rates, once with weights
that are rounded to the nearest bfloat16 number and once with ``lowbit``. The record
contains the mean reward of the last tenth of the steps.
"""

import numpy as np

from benchmarks import records
from benchmarks.training import reinforcement

RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
ROWS = ("bfloat16, nearest", "lowbit")


def measure(args) -> dict:
    """Return the rewards at the end by row and rate, with one for each seed."""
    ends = lambda run: [float(np.mean(curve[-2:])) for curve in run["curves"]]
    rewards = {
        name: {
            f"{rate:g}": ends(reinforcement.train(name, rate, args)) for rate in RATES
        }
        for name in ROWS
    }
    return {"rewards": rewards}


def text(record: dict) -> str:
    """Return a Markdown table with a row for each format."""
    shown = lambda values: records.shown(records.spread(values), 3)
    rows = [
        [name, *map(shown, rewards.values())]
        for name, rewards in record["rewards"].items()
    ]
    heads = [f"{float(x):.0e}".replace("e-0", "e-") for x in record["rewards"][ROWS[0]]]
    return records.table(["format", *heads], rows)


main = records.program(__name__, seeds=2, steps=200)
