"""A small network trained with precision assignments, and its accuracy.

    python -m benchmarks precision_assignment
    python -m benchmarks precision_assignment --ratios 0 0.5 1

A small ResNet is trained in float32, with the uniform and the two operator-based
assignments, and with the assignments that `precision.demote` finds for the given
low-precision ratios, with and without promotion of tensors that overflow. Low precision
is the paper's HFP8 pair of 8-bit formats, and high precision is fp(6, 9); both are
emulated. Test accuracy is measured with the float32 master weights, so it includes
losses in training but not in low-precision inference.

A seed has diverged if its training loss in the last epoch is NaN or infinite. The
column "diverged" is the share of these seeds. All means include them, so the mean loss
is then not finite either.

Equal assignments are trained only once. Demotion changes whole groups of tensors, so
neighboring ratios may give the same assignment. Runs with and without promotion are
also equal if nothing overflows.

References:
  Lee, Sharma, Aiken 2023, "Training with Mixed-Precision Floating-Point Assignments",
  section 5 and figure 4.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from benchmarks import records
from benchmarks.papers.demotion_orders import BASELINES
from benchmarks.training.images import cifar_data, mixed_training
from lowbit_optax import precision
from tools.models.classifier import arguments_of, make_loss_fn
from tools.models.resnet import ResNet

# It halves the image first, and is narrower (by 8) and less deep than the original, so
# that a CPU trains it in a minute.
MODEL = ResNet(8, (1, 1, 1, 1), stem_stride=2)
RATIOS = tuple(tenths / 10 for tenths in range(11))


class Trainer(NamedTuple):
    """The objects that all runs share, so that they share compilations."""

    model: Any
    plan: precision.PrecisionPlan
    step: Callable
    mixed: optax.GradientTransformation
    float32: optax.GradientTransformation


class Run(NamedTuple):
    """A run without its seed; the assignment is None for float32."""

    trainer: Trainer
    assignment: Any
    promotes: bool


def make_trainer(model: Any, args, per_epoch: int, flip: bool) -> Trainer:
    """Trace the model, and build its training step and optimizers."""
    arguments = arguments_of(model, args.batch_size)
    rate = optax.cosine_decay_schedule(args.learning_rate, args.epochs * per_epoch)
    optimizer = lambda period: mixed_training.make_optimizer(
        rate, args.weight_decay, period
    )
    return Trainer(
        model,
        precision.trace(make_loss_fn(model), *arguments, has_aux=True),
        mixed_training.make_train_step(model, flip),
        mixed=optimizer(per_epoch),
        float32=optimizer(None),
    )


def runs_of(trainer: Trainer, ratios) -> dict[str, Run]:
    """Return the runs by name."""
    found = {}
    # With promotion first: if it changes nothing, both runs are equal.
    for end, promotes in ((", promotion", True), ("", False)):
        for ratio in ratios:
            assignment = precision.demote(trainer.plan, ratio)
            found[f"r = {ratio:g}{end}"] = Run(trainer, assignment, promotes)
    for name, assign in BASELINES.items():
        found[name] = Run(trainer, assign(trainer.plan), False)
    return found | {"float32": Run(trainer, None, False)}


def contents(assignment: Any) -> tuple[bytes, ...]:
    """Return bytes that are equal for equal assignments of one plan."""
    return tuple(np.asarray(x).tobytes() for x in jax.tree.leaves(assignment))


def train(run: Run, dataset: cifar_data.Dataset, args, seed: int) -> tuple[dict, bool]:
    """Train a network, and return its figures, and whether a tensor was promoted."""
    trainer, assignment, promotes = run
    tx = trainer.float32 if assignment is None else trainer.mixed
    state = mixed_training.init_state(trainer.model, tx, seed)
    state = mixed_training.start(state, assignment, promotes)
    state, loss = mixed_training.fit(trainer.step, state, dataset, args, seed)
    accuracy = mixed_training.evaluate(
        trainer.model, state, dataset.test, args.batch_size
    )
    figures = {
        "low-precision ratio": float(state.ratio_sum / state.step),
        "accuracy, %": 100 * accuracy,
        "training loss": loss,
        "diverged": float(not np.isfinite(loss)),
    }
    return figures, contents(state.assignment) != contents(assignment)


def measure(args) -> dict:
    dataset = cifar_data.load(args)
    per_epoch = dataset.steps_per_epoch(args.batch_size)
    trainer = make_trainer(MODEL, args, per_epoch, dataset.flip)
    runs = runs_of(trainer, args.ratios)
    done: dict[tuple, dict] = {}

    def of(name: str, seed: int) -> dict:
        run = runs[name]
        same = seed, contents(run.assignment)
        if (same, run.promotes) not in done:
            figures, is_promoted = train(run, dataset, args, seed)
            done[same, run.promotes] = figures
            if not is_promoted:
                done[same, False] = figures
        return done[same, run.promotes]

    found = records.of_seeds(runs, args.seeds, of)
    figures = {figure: records.spreads(each) for figure, each in found.items()}
    return {"dataset": dataset.name, "figures": figures}


def main(argv: list[str] | None = None) -> None:
    numbers = {"learning_rate": 0.1, "weight_decay": 5e-4, "epochs": 10}
    numbers |= {"batch_size": 64, "train_size": 5000, "test_size": 2000}
    options = records.Options(__doc__, seeds=1, **numbers)
    text = "minimal low-precision ratios of the demoted assignments"
    options.add_argument("--ratios", nargs="*", type=float, default=RATIOS, help=text)
    records.run(__name__, options.parse_args(argv), measure)
