"""A ResNet-18 on CIFAR-10, trained by SGD with weights of 16 bits.

    python -m benchmarks cifar_optimizers --compare --width 8 --epochs 10
    python -m benchmarks cifar_optimizers --optimizer kahan_sgd
    python -m benchmarks cifar_optimizers --optimizer master_copy_sgd \
        --dtype float16 --loss-scale backoff

`--compare` trains several formats: weights in float32, rounded to nearest, rounded
stochastically, with Kahan summation and with extra bits, and 8-bit moments. All of them
start from the same weights and use the same batches. Each choice of options has its own
record in `runs/cifar_optimizers`.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import optax

import lowbit_optax as lo
from benchmarks import records
from benchmarks.training.images import cifar_data, training_loop
from tools.models.resnet import ResNet, cast_weights

NEEDS = ("flax", "matplotlib", "sklearn", "tqdm")

RATE, DECAY, MOMENTUM = 0.1, 5e-4, 0.9
FORMATS = {
    "nearest_sgd": {"weights": lo.nearest(), "moments": lo.cast(jnp.bfloat16)},
    "master_copy_sgd": {"weights": lo.master_copy(), "moments": "float32"},
}
"""The 16-bit baseline, and mixed precision with a float32 master."""
COMPARED = "sgd", "nearest_sgd", "sr_sgd", "kahan_sgd", "extra_bits_sgd", "lowbit_sgd"
LOSS_SCALES = {
    "backoff": lo.loss_scaling.backoff_scale,
    "lognormal": lo.loss_scaling.log_normal_scale,
}


def build(name: str, rate, args, seed: int) -> optax.GradientTransformation:
    """Return the optimizer of this name; `sgd` is optax's, with float32 weights."""
    if name == "sgd" or name in FORMATS:
        tx = optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(rate, MOMENTUM))
        tx = lo.lowbit(tx, **FORMATS[name]) if name in FORMATS else tx
    else:
        options = {"momentum": MOMENTUM, "weight_decay": DECAY, "seed": seed}
        if name == "extra_bits_sgd":
            # float16 has room for 13 extra bits.
            bits = 13 if args.dtype == "float16" else 16
            options |= {"bits": bits, "rounding": "nearest"}
        tx = getattr(lo, name)(rate, **options)
    scale = args.loss_scale
    return tx if scale is None else lo.with_loss_scale(tx, LOSS_SCALES[scale]())


def train(args, dataset: cifar_data.Dataset, name: str, seed: int) -> dict[str, float]:
    """Train a network with one optimizer and one seed, and return its figures."""
    steps = args.epochs * dataset.steps_per_epoch(args.batch_size)
    rate = optax.warmup_cosine_decay_schedule(0.0, RATE, steps // 20, steps)
    model = ResNet(args.width, dtype=jnp.dtype(args.compute_dtype))
    dtype = jnp.dtype("float32" if name == "sgd" else args.dtype)
    store = functools.partial(cast_weights, dtype=dtype)
    tx = build(name, rate, args, seed)
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


def measure(args: argparse.Namespace) -> dict:
    dataset = cifar_data.load(args)
    names = COMPARED if args.compare else [args.optimizer]
    of = lambda name, seed: train(args, dataset, name, seed)
    return cifar_data.record(dataset, records.of_seeds(names, args.seeds, of))


def main(argv: list[str] | None = None) -> None:
    sizes = {"epochs": 30, "batch_size": 128, "train_size": None, "test_size": None}
    options = records.Options(__doc__, seeds=1, **sizes, width=64)
    add = options.add_argument
    names = *COMPARED, "master_copy_sgd"
    add("--optimizer", choices=names, default="extra_bits_sgd")
    add("--compare", action="store_true", help="compare several formats")
    dtypes = "bfloat16", "float16"
    add("--dtype", choices=dtypes, default="bfloat16", help="of 16-bit weights")
    add("--loss-scale", choices=LOSS_SCALES, help="for float16 gradients")
    # 16-bit convolutions are slow on CPUs.
    default = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    dtypes = "float32", *dtypes
    add("--compute-dtype", choices=dtypes, default=default, help="of activations")
    args = options.parse_args(argv)
    records.run(__name__, args, measure, by_options=True)
