"""The overflows of each tensor before training in 8 bits diverges.

    .venv/bin/python -m benchmarks overflow_spikes

Lee, Sharma and Aiken, figure 6(b): shortly before training diverges, the overflow
ratios of a few tensors rise, and then the ratios of other tensors. The overflow ratio
of a tensor is the share of its elements above the largest number of its format. The
benchmark uses the network and the assignments of ``demotion_orders``, without
promotion. A tensor overflows from the first step at which its ratio exceeds 1%, above
which promotion would move it to the higher precision. The loss is smoothed: it is the
mean of a step and the next 15 steps. A run diverges at the first step from which this
loss stays above 1.5 nats. If all classes have the same probability, the loss is 2.3
nats.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import pictures, records
from benchmarks.papers import demotion_orders, noisy_digits
from benchmarks.papers.demotion_orders import NOISE, NUMBERS

DIVERGING = ("uniform", "operator-based, outputs", "increasing, 0.15")
CASES = (*DIVERGING, "decreasing, 0.6")
WINDOW, HIGH = 16, 1.5
SMALL, LARGE = 0.01, 0.1
RANKS = 5
SHOWN, POINT = 240, 4
"""The steps that the picture shows, and the steps of each of its points."""


class Run(NamedTuple):
    """The loss of each step, and the overflow ratio of each tensor."""

    loss: np.ndarray
    overflow: np.ndarray


def smoothed(loss: np.ndarray) -> np.ndarray:
    """Return the mean of each step and the next steps, except for the last steps."""
    return np.convolve(loss, np.ones(WINDOW) / WINDOW, "valid")


def divergence(loss: np.ndarray) -> int | None:
    """Return the first step from which the smoothed loss stays high, or None."""
    low = smoothed(loss) <= HIGH
    first = len(low) - int(low[::-1].argmax()) if low.any() else 0
    return None if first == len(low) else first


def onsets(overflow: np.ndarray, ratio: float) -> dict[int, int]:
    """Return the first step at which each tensor exceeds a ratio, in this order."""
    above = overflow > ratio
    first = {int(i): int(above[:, i].argmax()) for i in np.flatnonzero(above.any(0))}
    return dict(sorted(first.items(), key=lambda item: item[1]))


def summary(runs: list[Run], names: list[str]) -> dict:
    """Return the steps from events of each run to its divergence.

    The events are the lowest smoothed loss, the first five times that a ratio exceeds
    1%, each for another tensor, and the first time that a ratio exceeds 10%.
    """
    ends = [divergence(run.loss) for run in runs]
    found = {
        "diverged": sum(end is not None for end in ends),
        "largest ratio": records.spread([run.overflow.max() for run in runs]),
    }
    if None in ends:
        return found
    small = [list(onsets(run.overflow, SMALL).items()) for run in runs]
    large = [next(iter(onsets(run.overflow, LARGE).values())) for run in runs]
    lowest = [
        smoothed(run.loss)[:end].argmin() for run, end in zip(runs, ends, strict=True)
    ]
    before = lambda steps: records.spread(np.subtract(ends, steps))
    ranks = range(min(RANKS, *map(len, small)))
    return found | {
        "step": records.spread(ends),
        "from the lowest loss": before(lowest),
        "from 1%": {str(k + 1): before([each[k][1] for each in small]) for k in ranks},
        "from 10%": before(large),
        "first": [names[each[0][0]] for each in small],
    }


def series(run: Run, names: list[str]) -> dict:
    """Return means of the loss, and of the largest ratios until shortly after."""
    end = divergence(run.loss)
    order = np.argsort(-run.overflow[: end + WINDOW].max(0))[:RANKS]
    mean = lambda x: x[:SHOWN].reshape(-1, POINT).mean(1)
    ratios = {names[i]: mean(run.overflow[:, i]) for i in order}
    return {"end": end, "loss": mean(run.loss), "overflow": ratios}


def measure(args) -> dict:
    plan = demotion_orders.plan_of(args.batch_size)
    given = noisy_digits.data(NOISE)
    names = [tensor.name for tensor in plan.tensors]
    runs: dict[str, list[Run]] = {name: [] for name in CASES}
    for seed in range(args.seeds):
        assignments = demotion_orders.assignments(plan, seed)
        for name, found in runs.items():
            _, steps = demotion_orders.train(
                *(args.learning_rate, args.steps, args.batch_size, given),
                *(jnp.asarray(seed), assignments[name], jnp.asarray(False)),
            )
            found.append(Run(*jax.device_get((steps.loss, steps.overflow))))
            print(f"seed {seed}, {name}: {divergence(found[-1].loss)}", flush=True)
    return {
        "cases": {name: summary(found, names) for name, found in runs.items()},
        "series": series(runs["uniform"][0], names),
    }


def label(name: str) -> str:
    """Return a reader's name of a tensor."""
    kind, _, number = name.partition(".")
    return f"output of layer {int(number) + 1}" if kind == "dot_general" else name


@pictures.panels(4.2, (2, 3), stack=True, sharex=True)
def draw(record: dict, losses, ratios) -> str:
    found = record["series"]
    steps = POINT * (np.arange(SHOWN // POINT) + 0.5)
    losses.plot(steps, found["loss"], color="black")
    losses.set(ylabel="loss, nats")
    for axes in (losses, ratios):
        axes.axvline(found["end"], color="black", ls=":", label="diverges")
    marks = (*pictures.OTHERS, ("#0072b2", "D"), ("#cc79a7", "v"))
    for (name, each), (color, mark) in zip(
        found["overflow"].items(), marks, strict=True
    ):
        ratios.plot(steps, each, color=color, marker=mark, ms=3, label=label(name))
    ratios.set(ylabel="overflow ratio", xlabel="step", yscale="log", ylim=(3e-4, 1.2))
    before = record["cases"]["uniform"]["from 1%"]["1"]["mean"]
    return (
        "With the uniform assignment, overflows of the first tensor exceed 1% "
        f"{before:.0f} steps before training diverges"
    )


main = records.program(__name__, seeds=10, **NUMBERS)
