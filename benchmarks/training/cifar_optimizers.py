"""A ResNet-18 on CIFAR-10, trained with weights of 16 bits or fewer.

    python -m benchmarks cifar_optimizers --optimizer kahan_sgd
    python -m benchmarks cifar_optimizers --optimizer extra_bits_adamw --bits 8
    python -m benchmarks cifar_optimizers --optimizer lpmm_sgd --microbatches 4
    python -m benchmarks cifar_optimizers --optimizer master_copy_sgd \
        --dtype float16 --loss-scale backoff
    python -m benchmarks cifar_optimizers --compare --optimizer sgd --seeds 3

`--compare` trains several formats and compares them: weights in float32, rounded to
nearest, rounded stochastically, with Kahan summation and with extra bits, and 8-bit
moments. All of them start from the same weights and use the same batches.
`accuracy_tables.py` compares formats of LPMM, whose weights are codes of 4 to 16 bits.
"""

import argparse
import sys

import jax
import jax.numpy as jnp

from benchmarks.training.images import (
    cifar_data,
    flags,
    optimizer_choice,
    reporting,
    training_loop,
)
from tools.models.resnet import ResNet

NEEDS = ("flax", "matplotlib", "sklearn", "tqdm")

LEARNING_RATE = {"sgd": 0.1, "adamw": 1e-3}
WEIGHT_DECAY = {"sgd": 5e-4, "adamw": 0.05}
DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options, and fill in the defaults that depend on other options."""
    output = "cifar_optimizers"
    parser = flags.parser(__doc__, output, epochs=30, batch_size=128)
    add = parser.add_argument
    names = optimizer_choice.LABELS
    text = "%(choices)s"
    default = "extra_bits_sgd"
    add("--optimizer", choices=names, default=default, help=text, metavar="NAME")
    text = "compare several formats with SGD or AdamW, as in --optimizer"
    add("--compare", action="store_true", help=text)
    add("--dtype", choices=DTYPES, help="of weights, except BatchNorm; not for lpmm_*")
    add("--bits", type=int, help="extra bits (extra_bits_*), or weight bits (lpmm_*)")
    roundings = ("stochastic", "nearest", "toward_zero")
    add("--rounding", choices=roundings, help="for extra_bits_* and lpmm_*")
    text = "for float16 gradients: backoff, lognormal or a number"
    add("--loss-scale", type=_loss_scale, metavar="SCALE", help=text)
    add("--width", type=int, default=64, help="channels of the first stage")
    computed = ("auto", "float32", "bfloat16", "float16")
    add("--compute-dtype", choices=computed, default="auto", help="for activations")
    text = "update every N steps, with the mean of N gradients"
    add("--microbatches", type=int, default=1, metavar="N", help=text)
    args = parser.parse_args(argv)

    if not args.compare:
        given = [x for x in optimizer_choice.OPTIONS if getattr(args, x) is not None]
        for option in set(given) - optimizer_choice.options_of(args.optimizer):
            flag = "--" + option.replace("_", "-")
            parser.error(f"{args.optimizer} does not support {flag}")
    _fill_in(args)
    return args


def _fill_in(args: argparse.Namespace) -> None:
    family = optimizer_choice.family(args.optimizer)
    is_lpmm = optimizer_choice.is_lpmm(args.optimizer) and not args.compare
    is_float32 = optimizer_choice.is_float32(args.optimizer) and not args.compare
    has_extra = args.compare or args.optimizer.startswith("extra_bits")
    if args.dtype is None and not is_lpmm:
        args.dtype = "float32" if is_float32 else "bfloat16"
    if args.bits is None:
        # float16 has room for 13 extra bits.
        args.bits = 12 if is_lpmm else 13 if args.dtype == "float16" else 16
    args.rounding = args.rounding or ("nearest" if has_extra else "stochastic")
    if args.learning_rate is None:
        args.learning_rate = LEARNING_RATE[family]
    if args.weight_decay is None:
        args.weight_decay = WEIGHT_DECAY[family]
    if args.compute_dtype == "auto":
        # 16-bit convolutions are slow on CPUs.
        on_cpu = jax.default_backend() == "cpu"
        args.compute_dtype = "float32" if on_cpu else "bfloat16"
        if args.dtype == "float16" and args.loss_scale is not None:
            args.compute_dtype = "float16"


def _loss_scale(text: str) -> str | float:
    return text if text in optimizer_choice.LOSS_SCALES else float(text)


def train(
    args: argparse.Namespace, dataset: cifar_data.Dataset, optimizer: str, seed: int
) -> reporting.Result:
    """Train a network with one optimizer and one seed."""
    dtype = "float32" if optimizer_choice.is_float32(optimizer) else args.dtype
    run = training_loop.Run(seed, args.epochs, args.steps, args.batch_size)
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
    label = optimizer_choice.label(optimizer, dtype, options)
    description = f"{label}, seed {seed}"
    state, metrics = training_loop.fit(model, state, dataset, run, description)
    return reporting.Result(
        label=label,
        optimizer=optimizer,
        seed=seed,
        bytes_per_parameter=training_loop.bytes_per_parameter(state),
        steps_per_epoch=steps_per_epoch,
        metrics=metrics,
    )


def main(argv: list[str] | None = None) -> list[reporting.Result]:
    """Train the selected optimizers, show the results, and return them."""
    args = parse_args(argv)
    try:
        dataset = flags.load(args)
    except cifar_data.DataError as error:
        sys.exit(f"error: {error}")
    optimizers = [args.optimizer]
    if args.compare:
        optimizers = optimizer_choice.compared(args.optimizer)
    results = [
        train(args, dataset, optimizer, seed)
        for seed in range(args.seeds)
        for optimizer in optimizers
    ]
    print(reporting.table(results))
    derived = ("test_accuracy", "train_loss")
    runs = [run._asdict() | {x: getattr(run, x) for x in derived} for run in results]
    common = flags.settings(args, dataset)
    reporting.write(args.output_dir / "results.json", settings=common, runs=runs)
    reporting.plot(results, args.output_dir / "curves.png")
    print(f"wrote results.json and curves.png to {args.output_dir}")
    return results
