"""Trains small networks under precision assignments and draws accuracy over memory.

    python -m benchmarks precision_assignment
    python -m benchmarks precision_assignment --models resnet --ratios 0 0.5 1
    python -m benchmarks precision_assignment --orders decreasing random

Every network trains in float32, under the uniform and the two operator-based
assignments, and under those that `precision.demote` finds for the given low-precision
ratios, with and without promotion of the tensors that overflow. Low precision is the
paper's HFP8 pair of 8-bit formats and high precision is fp(6, 9), both emulated.
Accuracy is that of the float32 master weights on the test images, so it shows what the
training lost and not what low-precision inference would.

Two assignments that are the same tensor by tensor are one run: demotion goes group by
group, so that neighbouring ratios may agree. So are runs with and without promotion
where nothing overflowed.

Results are written after every run, and a command that is started again goes on from
them. `--seed` and `--seeds` let processes share the work; `--merge a/results.json
b/results.json` draws what they wrote.

Besides lowbit_optax it needs flax, matplotlib, orbax-checkpoint and tqdm, and
scikit-learn where CIFAR-10 cannot be had.

References:
  Lee, Sharma, Aiken 2023, "Training with Mixed-Precision Floating-Point Assignments",
  section 5 and figure 4.
"""

import hashlib
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from benchmarks.training import command_line
from benchmarks.training.images import (
    cifar_data,
    mixed_training,
    precision_flags,
    reporting,
    tradeoff,
    training_loop,
)
from lowbit_optax import precision
from tools.models.resnet import ResNet
from tools.models.shufflenet import ShuffleNet
from tools.models.squeezenet import SqueezeNet

# By a multiplier of their widths. All halve the image first and are narrower (by 4, 8
# and 8) and less deep than the originals, so that a CPU trains one in a minute.
MODELS = {
    "squeezenet": lambda width: SqueezeNet(width / 4, stem_stride=2),
    "shufflenet": lambda width: ShuffleNet(width / 8, (1, 2, 1), stem_stride=2),
    "resnet": lambda width: ResNet(round(8 * width), (1, 1, 1, 1), stem_stride=2),
}


class Job(NamedTuple):
    """One training run.

    Attributes:
        assignment: "demote", or a name in `precision_flags.BASELINES`.
        order, ratio: of "demote" only.
        promotion: whether tensors that overflow are promoted.
        seed: of the initialisation and the order of the images.
    """

    model: str
    assignment: str
    order: str | None
    ratio: float | None
    promotion: bool
    seed: int


class Trainer(NamedTuple):
    """What all runs of a model share, so that they share compilations."""

    model: Any
    plan: Any
    step: Callable
    mixed: optax.GradientTransformation
    float32: optax.GradientTransformation


def jobs(args) -> list[Job]:
    """What the flags ask for, seed by seed so that a stopped grid has whole columns."""
    # With promotion first: where it changed nothing, runs without need not be made.
    promotions = {"on": [True], "off": [False], "both": [True, False]}[args.promotion]
    return [
        Job(model, *choice, seed)
        for seed in range(args.seed, args.seed + args.seeds)
        for model in args.models
        for choice in [
            *(
                ("demote", order, ratio, promotion)
                for order in args.orders
                for promotion in promotions
                for ratio in args.ratios
            ),
            *((name, None, None, False) for name in args.baselines),
        ]
    ]


def make_trainer(
    model: Any,
    numbers: mixed_training.Hyperparameters,
    batch_size: int,
    flip: bool,
) -> Trainer:
    """Traces the model and makes its training step and its optimizers."""
    return Trainer(
        model,
        mixed_training.make_plan(model, batch_size),
        mixed_training.make_train_step(model, flip),
        mixed_training.make_optimizer(numbers, is_float32=False),
        mixed_training.make_optimizer(numbers, is_float32=True),
    )


def assign(plan: Any, job: Job) -> Any:
    """The precision assignment at the start of `job`; None is float32."""
    if job.assignment == "float32":
        return None
    if job.assignment == "uniform":
        return precision.uniform(plan)
    if job.assignment == "demote":
        return precision.demote(plan, job.ratio, order=job.order, seed=job.seed)
    outputs = job.assignment == "operator_based_outputs"
    return precision.operator_based(plan, outputs=outputs)


def fingerprint(assignment: Any) -> str:
    """Equal for assignments of one plan that agree in all tensors."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(assignment):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:12]


def train(
    trainer: Trainer, job: Job, dataset: cifar_data.Dataset, run: training_loop.Run
) -> dict:
    """Trains a network; returns a run for results.json."""
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
        "train_accuracy": _rounded(np.mean(metrics["accuracy"][-per_epoch:])),
        "last_accuracy": metrics["test"][-1][1],
        "best_accuracy": max(accuracy for _, accuracy in metrics["test"]),
        "test": [accuracy for _, accuracy in metrics["test"]],
        "seconds": _rounded(metrics["seconds"]),
    }
    if not is_float32:
        found |= {
            "low_ratio": _rounded(state.ratio_sum / state.step),
            "low_ratio_first": _rounded(assignment.low_ratio),
            "low_ratio_last": _rounded(state.assignment.low_ratio),
            "skipped_steps": int(state.opt_state.skipped),
            "loss_scale": float(state.opt_state.scale),
        }
    return job._asdict() | found


def _rounded(value: Any) -> float:
    return round(float(value), 5)


def repeated(job: Job, mark: str, runs: list[dict]) -> dict | None:
    """The run in `runs`, if any, that has the very numbers `job` would have."""
    for run in runs:
        same = (run["model"], run["seed"], run["fingerprint"])
        without = run["promotion"] and not run["promoted"]
        if same == (job.model, job.seed, mark) and (
            run["promotion"] == job.promotion or without
        ):
            return run | job._asdict()
    return None


def describe(job: Job) -> str:
    """Such as "resnet, decreasing 0.3, promotion, seed 0"."""
    parts = [job.model, tradeoff.label(job._asdict()), f"seed {job.seed}"]
    if job.ratio is not None:
        parts[1] += f" {job.ratio:g}"
    return ", ".join(parts)


def settings(args, dataset: cifar_data.Dataset) -> dict:
    """What all runs have in common and their numbers follow from, for JSON."""
    names = ("epochs", "steps", "batch_size", "learning_rate", "weight_decay", "width")
    return {
        "dataset": dataset.name,
        "train_size": len(dataset.train.labels),
        "test_size": len(dataset.test.labels),
        "threshold": mixed_training.THRESHOLD,
    } | {name: getattr(args, name) for name in names}


def train_all(args, dataset: cifar_data.Dataset, path: pathlib.Path) -> list[dict]:
    """Makes the runs that `path` does not have yet, and writes it after each.

    Returns:
        The runs that the flags ask for.

    Raises:
        ValueError: `path` has runs with other settings.
    """
    common = settings(args, dataset)
    runs: list[dict] = tradeoff.merged([path], common) if path.exists() else []
    run = training_loop.Run(args.seed, args.epochs, args.steps, args.batch_size)
    per_epoch = run.steps_per_epoch(len(dataset.train.labels))
    numbers = mixed_training.Hyperparameters(
        args.learning_rate, args.weight_decay, args.epochs * per_epoch, per_epoch
    )
    trainers = {
        name: make_trainer(
            MODELS[name](args.width), numbers, args.batch_size, dataset.flip
        )
        for name in args.models
    }
    wanted = jobs(args)
    done = {Job(*(found[name] for name in Job._fields)): found for found in runs}
    for job in wanted:
        if job in done:
            continue
        trainer = trainers[job.model]
        mark = fingerprint(assign(trainer.plan, job))
        found = repeated(job, mark, runs)
        if found is None:
            found = train(trainer, job, dataset, run._replace(seed=job.seed))
        runs.append(found)
        done[job] = found
        path.parent.mkdir(parents=True, exist_ok=True)
        reporting.write_document(path, {"settings": common, "runs": runs})
    return [done[job] for job in wanted]


def load_dataset(args) -> cifar_data.Dataset:
    """The dataset that the flags ask for, or as much of it."""
    dataset = cifar_data.load(args.dataset, args.data_dir)
    dataset = dataset._replace(
        train=dataset.train.first(args.train_size, "train"),
        test=dataset.test.first(args.test_size, "test"),
    )
    if args.batch_size > len(dataset.train.labels):
        raise cifar_data.DataError(
            f"--batch-size {args.batch_size} is more than the "
            f"{len(dataset.train.labels)} training images"
        )
    return dataset


def main(argv: list[str] | None = None) -> list[dict]:
    """Runs what the command line asks for; returns the runs in the figure."""
    args = precision_flags.parse_args(argv, list(MODELS))
    path = args.output_dir / "results.json"
    try:
        if args.merge:
            common = json.loads(args.merge[0].read_text(encoding="utf-8"))["settings"]
            runs = tradeoff.merged(args.merge, common)
            args.output_dir.mkdir(parents=True, exist_ok=True)
            reporting.write_document(path, {"settings": common, "runs": runs})
        else:
            hint = f"the same command goes on from the runs in {path}"
            with command_line.sentences(hint):
                command_line.make_writable(args.output_dir)
                dataset = load_dataset(args)
                common = settings(args, dataset)
                runs = train_all(args, dataset, path)
    except (cifar_data.DataError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")

    print(tradeoff.table(runs))
    picture = args.output_dir / "tradeoff.png"
    title = "{dataset}, {train_size} images, {epochs} epochs, width {width:g}"
    tradeoff.plot(picture, title.format(**common), runs, args.accuracy)
    print(f"figure in {picture}, numbers in {path}")
    return runs


if __name__ == "__main__":
    main()
