"""A ResNet-18 on CIFAR-10, trained with weights of 16 bits or fewer.

    python -m benchmarks cifar_optimizers --optimizer kahan_sgd
    python -m benchmarks cifar_optimizers --optimizer extra_bits_adamw --bits 8
    python -m benchmarks cifar_optimizers --optimizer lpmm_sgd --microbatches 4
    python -m benchmarks cifar_optimizers --optimizer master_copy_sgd \
        --dtype float16 --loss-scale backoff
    python -m benchmarks cifar_optimizers --compare --optimizer sgd --seeds 3

`--compare` trains several formats: weights in float32, rounded to nearest, rounded
stochastically, with Kahan summation and with extra bits, and 8-bit moments. All of them
start from the same weights and use the same batches. `accuracy_tables` compares formats
of LPMM, whose weights are codes of 4 to 16 bits. Each choice of options has its own
record in `runs/cifar_optimizers`.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

from benchmarks import records
from benchmarks.training.images import cifar_data, optimizer_choice, training_loop
from tools.models.resnet import ResNet

NEEDS = ("flax", "matplotlib", "sklearn", "tqdm")

LEARNING_RATE = {"sgd": 0.1, "adamw": 1e-3}
WEIGHT_DECAY = {"sgd": 5e-4, "adamw": 0.05}


def options(doc: str | None) -> records.Options:
    """Return the options of a benchmark that trains with :func:`train`."""
    sizes = {"epochs": 30, "batch_size": 128, "train_size": None, "test_size": None}
    made = records.Options(doc, seeds=1, **sizes, width=64, microbatches=1)
    add = made.add_argument
    for name in ("--learning-rate", "--weight-decay"):
        add(name, type=float, help="the default depends on the optimizer")
    names, default = optimizer_choice.NAMES, "extra_bits_sgd"
    add("--optimizer", choices=names, default=default, help="%(choices)s", metavar="X")
    text = "compare several formats with SGD or AdamW, as in --optimizer"
    add("--compare", action="store_true", help=text)
    dtypes = ("bfloat16", "float16")
    add("--dtype", choices=dtypes, help="of weights, except BatchNorm; not for lpmm_*")
    add("--bits", type=int, help="extra bits (extra_bits_*), or weight bits (lpmm_*)")
    roundings = ("stochastic", "nearest", "toward_zero")
    add("--rounding", choices=roundings, help="for extra_bits_* and lpmm_*")
    text = "for float16 gradients: backoff, lognormal or a number"
    add("--loss-scale", type=_loss_scale, metavar="SCALE", help=text)
    computed = ("auto", "float32", "bfloat16", "float16")
    add("--compute-dtype", choices=computed, default="auto", help="for activations")
    return made


def parse_args(
    argv: list[str] | None = None, given: argparse.Namespace | None = None
) -> argparse.Namespace:
    """Parse the options, and fill in the defaults that depend on other options.

    Args:
      argv: the command line.
      given: parsed :func:`options`, which replace the defaults.
    """
    parser = options(__doc__)
    args = parser.parse_args(argv, given)
    if not args.compare:
        of_all = optimizer_choice.OPTIONS
        chosen = {x for x in of_all if getattr(args, x) is not None}
        for option in chosen - optimizer_choice.options_of(args.optimizer):
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
) -> dict[str, float]:
    """Train a network with one optimizer and one seed, and return its figures."""
    steps = args.epochs * dataset.steps_per_epoch(args.batch_size)
    updates = steps // args.microbatches
    rate = optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, updates // 20, updates
    )
    model = ResNet(args.width, dtype=jnp.dtype(args.compute_dtype))
    tx = optimizer_choice.build(optimizer, rate, args, seed)
    store = optimizer_choice.weight_storage(optimizer, args)
    state = training_loop.init_state(model, tx, store, seed)
    step = training_loop.make_train_step(model, dataset.flip)
    state, loss = training_loop.fit(step, state, dataset, args, seed)
    accuracy = training_loop.evaluate(model, state, dataset.test, args.batch_size)
    found = {
        "test accuracy, %": 100 * accuracy,
        "training loss": loss,
        "bytes per parameter": training_loop.bytes_per_parameter(state),
    }
    if args.loss_scale is not None:
        found["skipped steps"] = int(state.opt_state.skipped)
    return found


def measure(args) -> dict:
    dataset = cifar_data.load(args)
    names = [args.optimizer]
    if args.compare:
        names = optimizer_choice.compared(args.optimizer)
    of = lambda name, seed: train(args, dataset, name, seed)
    return cifar_data.record(dataset, records.of_seeds(names, args.seeds, of))


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    records.run(__name__, args, measure, cifar_data.text, by_options=True)
