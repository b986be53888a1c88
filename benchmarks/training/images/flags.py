"""The command line of `cifar_optimizers`."""

import argparse
import pathlib
from collections.abc import Callable

import jax

from benchmarks.training import command_line
from benchmarks.training.images import optimizer_choice

LEARNING_RATE = {"sgd": 0.1, "adamw": 1e-3}
WEIGHT_DECAY = {"sgd": 5e-4, "adamw": 0.05}
LPMM_BITS = range(4, 17)
MOST_EXTRA_BITS = {
    "bfloat16": 16, "float16": 13, "float8_e4m3fn": 20, "float8_e5m2": 21
}  # fmt: skip
LOW_BIT_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses and checks the flags, and fills in the defaults that depend on others."""
    parser = argparse.ArgumentParser(
        description="ResNet-18 on CIFAR-10 with weights of 16 bits or fewer."
    )
    _add_optimizer_flags(parser.add_argument_group("optimizer"))
    _add_training_flags(parser.add_argument_group("training"))
    _add_file_flags(parser.add_argument_group("data and files"))
    args = parser.parse_args(argv)

    family = optimizer_choice.family(args.optimizer)
    only_float32 = optimizer_choice.is_float32(args.optimizer) and not args.compare
    if only_float32 and args.dtype in LOW_BIT_DTYPES:
        parser.error(
            f"--optimizer {args.optimizer} trains in float32; for {args.dtype} weights "
            f"choose another, such as nearest_{args.optimizer}"
        )
    only_lpmm = optimizer_choice.is_lpmm(args.optimizer) and not args.compare
    has_extra = args.compare or args.optimizer.startswith("extra_bits")
    if only_lpmm:
        _check_lpmm(parser, args)
    elif args.rounding is not None and not has_extra:
        parser.error(
            "--rounding is for --optimizer extra_bits_*, lpmm_sgd and lpmm_adam; for "
            f"weights rounded to nearest choose nearest_{family}, stochastically "
            f"sr_{family}"
        )
    elif not only_float32 and args.dtype == "float32":
        parser.error(f"--dtype float32 goes with --optimizer {family} alone")
    if args.data_dir is not None and args.dataset == "digits":
        parser.error("--data-dir is for CIFAR-10: leave out --dataset digits")
    if args.dtype is None and not only_lpmm:
        args.dtype = "float32" if only_float32 else "bfloat16"
    if args.bits is None:
        extra = 13 if args.dtype == "float16" else 16
        args.bits = 12 if only_lpmm else extra
    most = MOST_EXTRA_BITS.get(args.dtype, args.bits)
    if has_extra and args.bits > most:
        parser.error(f"--bits {args.bits}: {args.dtype} takes 0 to {most} extra bits")
    if args.rounding is None:
        args.rounding = "nearest" if has_extra else "stochastic"
    if has_extra and not args.bits and args.rounding != "nearest":
        parser.error(
            f"--rounding {args.rounding} is how weights and extra bits are parted: it "
            "needs --bits of 1 or more"
        )
    if args.learning_rate is None:
        args.learning_rate = LEARNING_RATE[family]
    if args.weight_decay is None:
        args.weight_decay = WEIGHT_DECAY[family]
    if args.compute_dtype == "auto":
        on_cpu = jax.default_backend() == "cpu"
        args.compute_dtype = "float32" if on_cpu else "bfloat16"
        if args.dtype == "float16" and args.loss_scale is not None:
            args.compute_dtype = "float16"
    return args


def _check_lpmm(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.dtype is not None:
        parser.error(
            f"--dtype {args.dtype}: weights of {args.optimizer} are codes of --bits "
            "bits and have no dtype; leave out --dtype"
        )
    if args.loss_scale is not None:
        parser.error(
            f"--loss-scale {args.loss_scale}: gradients of {args.optimizer} are "
            "float32 and need none; leave out --loss-scale"
        )
    if args.rounding == "toward_zero":
        parser.error(
            f"--rounding toward_zero: weights of {args.optimizer} are rounded to "
            "nearest or stochastically; toward_zero is for extra_bits_*"
        )
    if args.bits is not None and args.bits not in LPMM_BITS:
        parser.error(
            f"--bits {args.bits}: weights of {args.optimizer} have {LPMM_BITS[0]} to "
            f"{LPMM_BITS[-1]} bits"
        )


def _at_least(least: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return integer


def _loss_scale(text: str) -> str | float:
    if text in optimizer_choice.LOSS_SCALES:
        return text
    try:
        value = float(text)
        optimizer_choice.loss_scaling(value)
    except ValueError:
        names = ", ".join(optimizer_choice.LOSS_SCALES)
        raise argparse.ArgumentTypeError(
            f"{text!r} is not {names} or a number from 2^-126 to 2^126"
        ) from None
    return value


def _add_optimizer_flags(group) -> None:
    group.add_argument(
        "--optimizer",
        choices=optimizer_choice.OPTIMIZERS,
        default="extra_bits_sgd",
        help="%(choices)s (default: %(default)s)",
        metavar="NAME",
    )
    group.add_argument(
        "--compare",
        action="store_true",
        help="run float32, nearest, stochastic, Kahan and extra bits, and 8-bit "
        "moments, side by side, in the family (sgd or adamw) that --optimizer ends in",
    )
    group.add_argument(
        "--dtype",
        choices=(*LOW_BIT_DTYPES, "float32"),
        help="dtype of the weights, BatchNorm's excepted (default: bfloat16; sgd and "
        "adamw are always float32; not for lpmm_*)",
    )
    group.add_argument(
        "--bits",
        type=_at_least(0),
        help="extra bits of extra_bits_* (default: 16, or 13 for float16, which has "
        "room for no more); bits of the weights of lpmm_*, 4 to 16 (default: 12)",
    )
    group.add_argument(
        "--rounding",
        choices=("stochastic", "nearest", "toward_zero"),
        help="of extra_bits_*'s weights when their extra bits are split off: nearest "
        "(default), toward_zero, as in the paper, or stochastic, which keeps one bit "
        "more to undo it; of lpmm_*'s weights, (first) moment and gradient sums: "
        "stochastic (default) or nearest",
    )
    group.add_argument(
        "--learning-rate",
        type=command_line.rate,
        help=f"the highest, after warmup (default: {LEARNING_RATE})",
    )
    group.add_argument(
        "--weight-decay", type=command_line.rate, help=f"(default: {WEIGHT_DECAY})"
    )
    group.add_argument(
        "--loss-scale",
        type=_loss_scale,
        metavar="SCALE",
        help="multiply the loss, so that float16 gradients do not vanish, and skip the "
        "steps in which any overflows: backoff (halved then, doubled after 2,000 good "
        "steps), lognormal (from the statistics of the largest gradient) or a number "
        "(default: no scale)",
    )


def _add_training_flags(group) -> None:
    positive = _at_least(1)
    group.add_argument(
        "--width",
        type=positive,
        default=64,
        help="channels of the first stage (default: %(default)s)",
    )
    group.add_argument(
        "--compute-dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of activations; auto is float16 for --dtype float16 with --loss-scale, "
        "else bfloat16, but float32 on a CPU, whose bfloat16 convolutions are slow",
    )
    group.add_argument(
        "--epochs", type=positive, default=30, help="(default: %(default)s)"
    )
    group.add_argument(
        "--steps",
        type=positive,
        help="stop after so many steps; the learning rate's schedule stays that of "
        "--epochs",
    )
    group.add_argument(
        "--batch-size",
        type=positive,
        default=128,
        help="images per step (default: %(default)s)",
    )
    group.add_argument(
        "--microbatches",
        type=positive,
        default=1,
        metavar="N",
        help="update the weights every N steps, with the mean of N gradients, summed "
        "in 8 bits (in float32 for sgd and adamw). The learning rate is that of an "
        "update; its schedule counts updates (default: %(default)s)",
    )
    group.add_argument(
        "--seed", type=_at_least(0), default=0, help="(default: %(default)s)"
    )
    group.add_argument(
        "--seeds",
        type=positive,
        default=1,
        help="repeat with so many seeds, from --seed up, and report mean and spread",
    )


def _add_file_flags(group) -> None:
    group.add_argument(
        "--dataset",
        choices=("auto", "cifar10", "digits"),
        default="auto",
        help="auto (the default) is CIFAR-10, or scikit-learn's digits where CIFAR-10 "
        "cannot be had",
    )
    group.add_argument(
        "--data-dir",
        type=pathlib.Path,
        help="folder that holds cifar-10-batches-py (default: download)",
    )
    group.add_argument(
        "--train-size", type=_at_least(1), help="use only the first so many images"
    )
    group.add_argument(
        "--test-size", type=_at_least(1), help="use only the first so many images"
    )
    group.add_argument(
        "--checkpoint-dir",
        type=pathlib.Path,
        help="save here after every epoch, and resume from what is here",
    )
    group.add_argument(
        "--output-dir",
        type=pathlib.Path,
        default=pathlib.Path("runs/cifar_optimizers"),
        help="folder for curves.png and results.json (default: %(default)s)",
    )
