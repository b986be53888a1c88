"""Trains a ResNet-18 on CIFAR-10 with weights of 16 bits or fewer.

    python -m benchmarks cifar_optimizers --optimizer kahan_sgd
    python -m benchmarks cifar_optimizers --optimizer extra_bits_adamw --bits 8
    python -m benchmarks cifar_optimizers --optimizer lpmm_sgd --microbatches 4
    python -m benchmarks cifar_optimizers --optimizer master_copy_sgd \
        --dtype float16 --loss-scale backoff
    python -m benchmarks cifar_optimizers --compare --optimizer sgd --seeds 3

`--compare` trains the same network from the same start on the same batches with
float32, nearest, stochastic, Kahan and extra-bits weights, and with 8-bit moments, and
shows them side by side. `accuracy_tables.py` does so for LPMM, whose weights are codes
of 4 to 16 bits, with and without stochastic rounding and microbatches.

Besides lowbit_optax it needs flax, orbax-checkpoint, matplotlib and tqdm, and
scikit-learn where CIFAR-10 cannot be had.
"""

import argparse
import sys

import jax
import jax.numpy as jnp

from benchmarks.training import command_line
from benchmarks.training.images import (
    cifar_data,
    optimizer_choice,
    reporting,
    training_loop,
)
from benchmarks.training.images.checkpoints import CheckpointError, Checkpoints
from benchmarks.training.images.flags import parse_args
from tools.models.resnet import ResNet


def train(
    args: argparse.Namespace, dataset: cifar_data.Dataset, optimizer: str, seed: int
) -> reporting.Result:
    """Trains a network with one optimizer, from one seed."""
    dtype = "float32" if optimizer_choice.is_float32(optimizer) else args.dtype
    run = training_loop.Run(
        seed=seed,
        epochs=args.epochs,
        stop_after=args.steps,
        batch_size=args.batch_size,
    )
    steps_per_epoch = run.steps_per_epoch(len(dataset.train.labels))
    updates = args.epochs * steps_per_epoch // args.microbatches
    options = optimizer_choice.Options(
        learning_rate=optimizer_choice.cosine_schedule(args.learning_rate, updates),
        weight_decay=args.weight_decay,
        bits=args.bits,
        seed=seed,
        rounding=args.rounding,
        microbatches=args.microbatches,
        loss_scale=args.loss_scale,
    )
    model = ResNet(args.width, dtype=jnp.dtype(args.compute_dtype))
    state = training_loop.init_state(
        model,
        optimizer_choice.build(optimizer, options),
        optimizer_choice.weight_storage(optimizer, dtype, args.bits),
        seed,
    )

    checkpoints = None
    if args.checkpoint_dir is not None:
        identity = {"optimizer": optimizer, "seed": seed, "dtype": dtype}
        checkpoints = Checkpoints(
            args.checkpoint_dir / f"{optimizer}-seed{seed}",
            settings(args, dataset) | identity,
        )
    label = optimizer_choice.label(optimizer, dtype, options)
    description = f"{label}, seed {seed}" if args.seeds > 1 else label
    try:
        state, metrics = training_loop.fit(
            model, state, dataset, run, description, checkpoints
        )
    finally:
        if checkpoints:
            checkpoints.close()
    return reporting.Result(
        label=label,
        optimizer=optimizer,
        seed=seed,
        bytes_per_parameter=training_loop.bytes_per_parameter(state),
        steps_per_epoch=steps_per_epoch,
        metrics=metrics,
    )


def settings(args: argparse.Namespace, dataset: cifar_data.Dataset) -> dict:
    """What all runs have in common and their numbers follow from, for JSON."""
    names = (
        "epochs",
        "batch_size",
        "learning_rate",
        "weight_decay",
        "width",
        "bits",
        "rounding",
        "microbatches",
        "dtype",
        "compute_dtype",
        "loss_scale",
    )
    return {
        "dataset": dataset.name,
        "train_size": len(dataset.train.labels),
        "test_size": len(dataset.test.labels),
    } | {name: getattr(args, name) for name in names}


def load_dataset(args: argparse.Namespace) -> cifar_data.Dataset:
    """The dataset that the flags ask for, or as much of it."""
    dataset = cifar_data.load(args.dataset, args.data_dir)
    dataset = dataset._replace(
        train=dataset.train.first(args.train_size, "train"),
        test=dataset.test.first(args.test_size, "test"),
    )
    steps = args.epochs * (len(dataset.train.labels) // args.batch_size)
    if 0 < steps < args.microbatches:
        raise cifar_data.DataError(
            f"--microbatches {args.microbatches} is more than the {steps} steps of "
            f"--epochs {args.epochs}: no update would be made"
        )
    if args.batch_size > len(dataset.train.labels):
        raise cifar_data.DataError(
            f"--batch-size {args.batch_size} is more than the "
            f"{len(dataset.train.labels)} training images"
        )
    return dataset


def main(argv: list[str] | None = None) -> list[reporting.Result]:
    """Runs what the command line asks for; returns what it reports."""
    args = parse_args(argv)
    hint = "with --checkpoint-dir FOLDER a run can be resumed"
    if args.checkpoint_dir is not None:
        hint = "the same command goes on from the last epoch's checkpoint"
    try:
        with command_line.sentences(hint):
            return _run(args)
    except (cifar_data.DataError, CheckpointError) as error:
        sys.exit(f"error: {error}")


def _run(args: argparse.Namespace) -> list[reporting.Result]:
    command_line.make_writable(args.output_dir)
    dataset = load_dataset(args)
    print(
        f"{dataset.name}: {len(dataset.train.labels)} training and "
        f"{len(dataset.test.labels)} test images; ResNet-18 of width {args.width}, "
        f"{args.compute_dtype} computation on {jax.devices()[0].device_kind}"
    )
    optimizers = (
        optimizer_choice.compared(args.optimizer) if args.compare else [args.optimizer]
    )
    results = [
        train(args, dataset, optimizer, seed)
        for seed in range(args.seed, args.seed + args.seeds)
        for optimizer in optimizers
    ]
    print(reporting.table(results))
    curves = args.output_dir / "curves.png"
    numbers = args.output_dir / "results.json"
    reporting.write_json(numbers, settings(args, dataset), results)
    reporting.plot(curves, f"ResNet-18, width {args.width}, on {dataset.name}", results)
    print(f"curves in {curves}, numbers in {numbers}")
    return results


if __name__ == "__main__":
    main()
