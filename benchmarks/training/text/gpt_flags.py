"""The command line of `gpt_release`, and its table of optimizers."""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import jax
import optax

import lowbit_optax
from benchmarks.training import command_line
from tools.models import gpt
from tools.models.gpt import to_bfloat16


class Choice(NamedTuple):
    """How to build an optimizer, and what its weights are stored in.

    Attributes:
        build: of a learning rate and a seed.
        store: takes float32 parameters; `to_bfloat16` where weights are bfloat16.
    """

    build: Callable
    store: Callable


# fmt: off
OPTIMIZERS = {
    "adamw": Choice(lambda rate, seed: optax.adamw(rate), lambda params: params),
    "kahan_adamw": Choice(
        lambda rate, seed: lowbit_optax.kahan_adamw(rate, seed=seed), to_bfloat16),
    "sr_adamw": Choice(
        lambda rate, seed: lowbit_optax.sr_adamw(rate, seed=seed), to_bfloat16),
    "extra_bits_adamw": Choice(
        lambda rate, seed: lowbit_optax.extra_bits_adamw(rate, bits=8, seed=seed),
        to_bfloat16),
    "lowbit_adamw": Choice(
        lambda rate, seed: lowbit_optax.lowbit_adamw(rate, seed=seed), to_bfloat16),
    "lowbit_lion": Choice(
        lambda rate, seed: lowbit_optax.lowbit_lion(rate / 10, seed=seed), to_bfloat16),
    "lpmm_adam": Choice(
        lambda rate, seed: lowbit_optax.lpmm_adam(rate, seed=seed),
        lowbit_optax.quantize_params),
}
# fmt: on

SIZES = [
    ("--layers", 6, "layers"),
    ("--width", 192, "width of the residual stream"),
    ("--heads", 4, "attention heads"),
    ("--context", 64, "bytes of a training example"),
    ("--batch-size", 16, "examples per step"),
    ("--steps", 200, "training steps"),
]
"""Flags that take positive integers, with their defaults and help."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses and checks the flags."""
    parser = argparse.ArgumentParser(
        description="A small GPT on Python's standard library, with the optimizer's "
        "step inside the backward pass.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--release",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="update each layer inside the backward pass",
    )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="lowbit_adamw",
        help="adamw is optax's on float32 weights; those of lpmm_adam have 12 bits, of "
        "all others 16",
    )
    parser.add_argument(
        "--remat",
        choices=gpt.REMAT,
        default="full",
        help="what of a layer is computed again for its gradient: none, full, or all "
        "but the products with weights (dots)",
    )
    for flag, default, text in SIZES:
        parser.add_argument(
            flag, type=command_line.positive, default=default, help=text
        )
    parser.add_argument(
        "--learning-rate",
        type=command_line.rate,
        default=3e-3,
        help="the highest, after warmup; lowbit_lion takes a tenth of it",
    )
    parser.add_argument(
        "--max-grad-norm",
        type=command_line.rate,
        help="clip to this global norm; with --release it takes a second backward pass",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument(
        "--compute-dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of activations; auto is bfloat16, but float32 on a CPU, whose bfloat16 "
        "products are slow",
    )
    args = parser.parse_args(argv)
    if args.width % args.heads:
        parser.error(f"--width {args.width} does not divide into {args.heads} --heads")
    if args.compute_dtype == "auto":
        on_cpu = jax.default_backend() == "cpu"
        args.compute_dtype = "float32" if on_cpu else "bfloat16"
    return args
