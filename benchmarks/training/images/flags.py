"""Options that trainings on CIFAR-10 share, and the data set that they ask for."""

import argparse
import pathlib

from benchmarks.training.images import cifar_data


def parser(doc: str | None, output: str, **defaults) -> argparse.ArgumentParser:
    """The options.

    Args:
      doc: a module's docstring; its first line is the description.
      output: the folder of the results by default.
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
    add("--learning-rate", type=float, help="the highest")
    add("--weight-decay", type=float, help=" ")
    add("--seeds", type=int, default=1, help="how many seeds, from 0 up")
    choices = ("auto", "cifar10", "digits")
    add(
        "--dataset", choices=choices, default="auto", help="auto: digits if no CIFAR-10"
    )
    add("--data-dir", type=pathlib.Path, help="with cifar-10-batches-py; or download")
    add("--train-size", type=int, help="use only the first TRAIN_SIZE images")
    add("--test-size", type=int, help="use only the first TEST_SIZE images")
    folder = pathlib.Path("runs") / output
    add("--output-dir", type=pathlib.Path, default=folder, help="of results.json")
    made.set_defaults(**defaults)
    return made


def load(args: argparse.Namespace) -> cifar_data.Dataset:
    """The data set that the options name, cut to the sizes that they give."""
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


def settings(args: argparse.Namespace, dataset: cifar_data.Dataset) -> dict:
    """The options that numbers follow from, for JSON."""
    options = {k: v for k, v in vars(args).items() if not k.endswith("_dir")}
    return options | {"dataset": dataset.name}
