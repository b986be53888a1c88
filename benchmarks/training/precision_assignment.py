"""Small networks trained with precision assignments, and their accuracy.

    python -m benchmarks precision_assignment
    python -m benchmarks precision_assignment --models resnet --ratios 0 0.5 1
    python -m benchmarks precision_assignment --orders decreasing random

Each network is trained in float32, with the uniform and the two operator-based
assignments, and with the assignments that `precision.demote` finds for the given
low-precision ratios, with and without promotion of tensors that overflow. Low precision
is the paper's HFP8 pair of 8-bit formats, and high precision is fp(6, 9); both are
emulated. Test accuracy is measured with the float32 master weights, so it includes
losses in training but not in low-precision inference.

Equal assignments are trained only once. Demotion changes whole groups of tensors, so
neighbouring ratios may give the same assignment. Runs with and without promotion are
also equal if nothing overflows. Results are written after every run.

References:
  Lee, Sharma, Aiken 2023, "Training with Mixed-Precision Floating-Point Assignments",
  section 5 and figure 4.
"""

import argparse
import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from benchmarks import records
from benchmarks.training.images import (
    cifar_data,
    flags,
    mixed_training,
    reporting,
    training_loop,
)
from lowbit_optax import precision
from tools.models.resnet import ResNet
from tools.models.squeezenet import SqueezeNet

MINUTES = 20
NEEDS = ("flax", "sklearn", "tqdm")

# Functions of a factor for the width. Both networks halve the image first, and are
# narrower (by 4 and 8) and less deep than the originals, so that a CPU trains one in a
# minute.
MODELS = {
    "squeezenet": lambda width: SqueezeNet(width / 4, stem_stride=2),
    "resnet": lambda width: ResNet(round(8 * width), (1, 1, 1, 1), stem_stride=2),
}
BASELINES = ("float32", "uniform", "operator_based", "operator_based_outputs")
ORDERS = ("decreasing", "increasing", "random")
RATIOS = tuple(tenths / 10 for tenths in range(11))


class Job(NamedTuple):
    """One training run.

    Attributes:
        assignment: "demote", or a name in `BASELINES`.
        order, ratio: the arguments of `precision.demote`; None for `BASELINES`.
        promotion: whether tensors that overflow are promoted.
        seed: determines the initial weights and the order of the images.
    """

    model: str
    assignment: str
    order: str | None
    ratio: float | None
    promotion: bool
    seed: int


class Trainer(NamedTuple):
    """The objects that all runs of a model share, so that they share compilations."""

    model: Any
    plan: Any
    step: Callable
    mixed: optax.GradientTransformation
    float32: optax.GradientTransformation


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    numbers = {"learning_rate": 0.1, "weight_decay": 5e-4, "epochs": 10}
    numbers |= {"batch_size": 64, "train_size": 5000, "test_size": 2000}
    parser = flags.parser(__doc__, "precision_assignment", **numbers)
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), help=" ")
    text = "minimal low-precision ratios of the demoted assignments"
    add("--ratios", nargs="*", type=float, default=RATIOS, metavar="R", help=text)
    text = "order by size in which groups are demoted"
    add("--orders", nargs="+", choices=ORDERS, default=["decreasing"], help=text)
    add("--width", type=float, default=1.0, help="multiplies the channels")
    return parser.parse_args(argv)


def jobs(args) -> list[Job]:
    """Return the selected jobs, ordered by seed, so that each seed is completed."""
    demoted = [
        ("demote", order, ratio, promotion)
        for order in args.orders
        # With promotion first: if it changes nothing, both runs are equal.
        for promotion in (True, False)
        for ratio in args.ratios
    ]
    return [
        Job(model, *choice, seed)
        for seed in range(args.seeds)
        for model in args.models
        for choice in [*demoted, *((name, None, None, False) for name in BASELINES)]
    ]


def make_trainer(model: Any, args, per_epoch: int, flip: bool) -> Trainer:
    """Trace the model, and build its training step and optimizers."""
    rate = optax.cosine_decay_schedule(args.learning_rate, args.epochs * per_epoch)
    optimizer = lambda period: mixed_training.make_optimizer(
        rate, args.weight_decay, period
    )
    return Trainer(
        model,
        mixed_training.make_plan(model, args.batch_size),
        mixed_training.make_train_step(model, flip),
        mixed=optimizer(per_epoch),
        float32=optimizer(None),
    )


def assign(plan: Any, job: Job) -> Any:
    """Return the precision assignment at the start of `job`, or None for float32."""
    if job.assignment == "float32":
        return None
    if job.assignment == "uniform":
        return precision.uniform(plan)
    if job.assignment == "demote":
        return precision.demote(plan, job.ratio, order=job.order, seed=job.seed)
    outputs = job.assignment == "operator_based_outputs"
    return precision.operator_based(plan, outputs=outputs)


def fingerprint(assignment: Any) -> str:
    """Return a hash that is equal for equal assignments of one plan."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(assignment):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:12]


def train(
    trainer: Trainer, job: Job, dataset: cifar_data.Dataset, run: training_loop.Run
) -> dict:
    """Train a network, and return its entry for results.json."""
    assignment = assign(trainer.plan, job)
    is_float32 = assignment is None
    tx = trainer.float32 if is_float32 else trainer.mixed
    state = mixed_training.init_state(trainer.model, tx, job.seed)
    state = mixed_training.start(state, assignment, job.promotion)
    state, metrics = training_loop.fit(
        trainer.model, state, dataset, run, describe(job), train_step=trainer.step
    )
    per_epoch = run.steps_per_epoch(len(dataset.train.labels))
    found = {
        "fingerprint": fingerprint(assignment),
        "promoted": fingerprint(state.assignment) != fingerprint(assignment),
        "low_ratio": None,
        "train_loss": _rounded(np.mean(metrics["loss"][-per_epoch:])),
        "last_accuracy": metrics["test"][-1][1],
        "best_accuracy": max(accuracy for _, accuracy in metrics["test"]),
        "test": [accuracy for _, accuracy in metrics["test"]],
    }
    if not is_float32:
        found["low_ratio"] = _rounded(state.ratio_sum / state.step)
    return job._asdict() | found


def _rounded(value: Any) -> float:
    return round(float(value), 5)


def repeated(job: Job, mark: str, runs: list[dict]) -> dict | None:
    """Return a run in `runs` with the same results as `job` would have, or None."""
    for run in runs:
        same = (run["model"], run["seed"], run["fingerprint"])
        without = run["promotion"] and not run["promoted"]
        if same == (job.model, job.seed, mark) and (
            run["promotion"] == job.promotion or without
        ):
            return run | job._asdict()
    return None


def label(run: dict) -> str:
    """Return the name of a run, which is the same for all ratios and seeds."""
    if run["assignment"] == "demote":
        promotion = "promotion" if run["promotion"] else "no promotion"
        return f"{run['order']}, {promotion}"
    return run["assignment"]


def table(runs: Sequence[dict]) -> str:
    """Return a table with a row for each model, assignment and ratio."""
    heads = ["model", "assignment", "requested ratio", "low-precision ratio"]
    heads += ["last accuracy, %", "best accuracy, %", "training loss", "diverged"]
    groups: dict[tuple, list[dict]] = {}
    for run in runs:
        groups.setdefault((run["model"], label(run), run["ratio"]), []).append(run)
    rows = []
    for (model, name, ratio), found in groups.items():
        lows = [run["low_ratio"] for run in found]
        percent = lambda key, found=found: reporting.spread(
            [100 * run[key] for run in found], 1
        )
        row = [
            model,
            name,
            "" if ratio is None else f"{ratio:g}",
            "" if None in lows else reporting.spread(lows, 3),
            percent("last_accuracy"),
            percent("best_accuracy"),
            reporting.spread([run["train_loss"] for run in found], 3),
            f"{sum(not math.isfinite(x['train_loss']) for x in found)}/{len(found)}",
        ]
        rows.append(row)
    return records.table(heads, rows)


def describe(job: Job) -> str:
    """Return a description such as "resnet, decreasing, promotion 0.3, seed 0"."""
    ratio = "" if job.ratio is None else f" {job.ratio:g}"
    return f"{job.model}, {label(job._asdict())}{ratio}, seed {job.seed}"


def train_all(args, dataset: cifar_data.Dataset) -> list[dict]:
    """Train the selected runs, and write all results after each run."""
    run = training_loop.Run(0, args.epochs, args.steps, args.batch_size)
    per_epoch = run.steps_per_epoch(len(dataset.train.labels))
    trainers = {
        name: make_trainer(MODELS[name](args.width), args, per_epoch, dataset.flip)
        for name in args.models
    }
    common = flags.settings(args, dataset)
    runs: list[dict] = []
    for job in jobs(args):
        trainer = trainers[job.model]
        mark = fingerprint(assign(trainer.plan, job))
        found = repeated(job, mark, runs)
        if found is None:
            found = train(trainer, job, dataset, run._replace(seed=job.seed))
        runs.append(found)
        reporting.write(args.output_dir / "results.json", settings=common, runs=runs)
    return runs


def main(argv: list[str] | None = None) -> list[dict]:
    """Train the selected runs, print the table, and return the runs."""
    args = parse_args(argv)
    try:
        dataset = flags.load(args)
    except cifar_data.DataError as error:
        sys.exit(f"error: {error}")
    runs = train_all(args, dataset)
    print(table(runs))
    print(f"numbers in {args.output_dir}")
    return runs
