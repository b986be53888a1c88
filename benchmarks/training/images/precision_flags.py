"""The command line of `precision_assignment`."""

import argparse
import pathlib

from benchmarks.training import command_line

BASELINES = ("float32", "uniform", "operator_based", "operator_based_outputs")
ORDERS = ("decreasing", "increasing", "random")
RATIOS = tuple(tenths / 10 for tenths in range(11))


def parse_args(argv: list[str] | None, models: list[str]) -> argparse.Namespace:
    """Parses and checks the flags.

    Args:
        argv: the flags; None is those of the process.
        models: the names that `--models` accepts.
    """
    parser = argparse.ArgumentParser(
        description="Accuracy and memory of precision assignments on CIFAR-10.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_assignment_flags(parser.add_argument_group("assignments"), models)
    _add_training_flags(parser.add_argument_group("training"))
    _add_file_flags(parser.add_argument_group("data and files"))
    args = parser.parse_args(argv)
    if args.data_dir is not None and args.dataset == "digits":
        parser.error("--data-dir is for CIFAR-10: leave out --dataset digits")
    if not args.ratios and not args.baselines:
        parser.error("--ratios and --baselines are both empty: nothing to train")
    for name in ("models", "ratios", "orders", "baselines"):
        # A name given twice would be one run twice in every mean.
        setattr(args, name, list(dict.fromkeys(getattr(args, name))))
    return args


def _ratio(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 1")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _add_assignment_flags(group, models: list[str]) -> None:
    group.add_argument(
        "--models",
        nargs="+",
        choices=models,
        default=["squeezenet", "resnet"],
        help="(default: %(default)s; a CPU's depthwise convolutions are slow)",
    )
    group.add_argument(
        "--ratios",
        nargs="*",
        type=_ratio,
        default=list(RATIOS),
        metavar="R",
        help="least low-precision ratios of the demoted assignments",
    )
    group.add_argument(
        "--orders",
        nargs="+",
        choices=ORDERS,
        default=["decreasing"],
        help="of the groups' sizes, in which they are demoted",
    )
    group.add_argument(
        "--promotion",
        choices=("on", "off", "both"),
        default="both",
        help="whether demoted tensors that overflow are promoted; those of the "
        "baselines never are",
    )
    group.add_argument(
        "--baselines",
        nargs="*",
        choices=BASELINES,
        default=list(BASELINES),
        metavar="NAME",
        help=f"of {', '.join(BASELINES)}",
    )


def _add_training_flags(group) -> None:
    group.add_argument(
        "--width", type=float, default=1.0, help="multiplies the channels"
    )
    group.add_argument(
        "--epochs", type=_positive, default=10, help="passes over the images"
    )
    group.add_argument(
        "--steps",
        type=_positive,
        help="stop after so many steps; the learning rate's schedule stays that of "
        "--epochs",
    )
    group.add_argument(
        "--batch-size", type=_positive, default=64, help="images per step"
    )
    group.add_argument(
        "--learning-rate",
        type=command_line.rate,
        default=0.1,
        help="at the start of its cosine",
    )
    group.add_argument(
        "--weight-decay", type=command_line.rate, default=5e-4, help="of SGD"
    )
    group.add_argument("--seed", type=int, default=0, help="the first seed")
    group.add_argument(
        "--seeds", type=_positive, default=1, help="so many seeds, from --seed up"
    )


def _add_file_flags(group) -> None:
    group.add_argument(
        "--dataset",
        choices=("auto", "cifar10", "digits"),
        default="auto",
        help="auto is CIFAR-10, or scikit-learn's digits where it cannot be had",
    )
    group.add_argument(
        "--data-dir",
        type=pathlib.Path,
        help="folder that holds cifar-10-batches-py (default: download)",
    )
    group.add_argument(
        "--train-size", type=_positive, default=5000, help="the first so many images"
    )
    group.add_argument(
        "--test-size", type=_positive, default=2000, help="the first so many images"
    )
    group.add_argument(
        "--output-dir",
        type=pathlib.Path,
        default=pathlib.Path("runs/precision_assignment"),
        help="folder for tradeoff.png and results.json; runs in results.json are "
        "not made again",
    )
    group.add_argument(
        "--accuracy",
        choices=("last", "best"),
        default="last",
        help="what the figure shows: of the last epoch, or of each run's best",
    )
    group.add_argument(
        "--merge",
        nargs="+",
        type=pathlib.Path,
        metavar="FILE",
        help="train nothing; draw the runs of these results.json",
    )
