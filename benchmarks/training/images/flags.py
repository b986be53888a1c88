"""Options of the benchmarks that train on CIFAR-10, and their data set."""

import argparse
import pathlib

from benchmarks.training.images import cifar_data


def parser(doc: str | None, output: str, **defaults) -> argparse.ArgumentParser:
    """Return a parser with the shared options.

    Args:
      doc: a module's docstring; its first line is the description.
      output: the default folder of the results, in `runs`.
      **defaults: the default values of options, by name.
    """
    made = argparse.ArgumentParser(
        description=(doc or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = made.add_argument
    add("--epochs", type=int, help="passes over the images")
    add("--steps", type=int, help="stop after STEPS; the schedule spans all epochs")
    add("--batch-size", type=int, help="images per step")
    add("--learning-rate", type=float, help="at its peak")
    add("--weight-decay", type=float, help=" ")
    add("--seeds", type=int, default=1, help="number of seeds")
    choices = ("auto", "cifar10", "digits")
    add(
        "--dataset",
        choices=choices,
        default="auto",
        help="auto: digits if the download fails",
    )
    add("--data-dir", type=pathlib.Path, help="contains cifar-10-batches-py")
    add("--train-size", type=int, help="use only the first TRAIN_SIZE images")
    add("--test-size", type=int, help="use only the first TEST_SIZE images")
    folder = pathlib.Path("runs") / output
    add(
        "--output-dir",
        type=pathlib.Path,
        default=folder,
        help="where results.json goes",
    )
    made.set_defaults(**defaults)
    return made


def load(args: argparse.Namespace) -> cifar_data.Dataset:
    """Return the selected data set, reduced to the selected sizes."""
    dataset = cifar_data.load(args.dataset, args.data_dir)
    dataset = dataset._replace(
        train=dataset.train.first(args.train_size, "train"),
        test=dataset.test.first(args.test_size, "test"),
    )
    if args.batch_size > len(dataset.train.labels):
        raise cifar_data.DataError(
            f"--batch-size must be at most {len(dataset.train.labels)}, the number of "
            f"training images, got {args.batch_size}"
        )
    return dataset


def settings(args: argparse.Namespace, dataset: cifar_data.Dataset) -> dict:
    """Return the options that the results depend on, for JSON."""
    options = {k: v for k, v in vars(args).items() if not k.endswith("_dir")}
    return options | {"dataset": dataset.name}
