"""Compare the time of optimizer steps with optax, on this machine.

    .venv/bin/python -m benchmarks step_time --parameters 16777216

All variants run once per round, so that other programs disturb them equally. The table
has the median time, and two ratios to optax's float32 step: wall time, and processor
time of all threads. Each ratio is a median over the rounds. Gradients have the dtype of
the parameters. Every step is jitted and donates parameters and state.
"""

import argparse
import dataclasses
import math
import platform
import statistics
import time
import typing

import jax
import jax.numpy as jnp
import optax

import lowbit_optax
from benchmarks import records
from benchmarks.leaf_sets import LeafSet, resnet18, small_leaves
from tools.gpu_program.steps import fast, replaced, with_master

MINUTES = 2

RATE, DECAY, MOMENTUM = 1e-3, 1e-4, 0.9
MODELS = {
    "resnet18": resnet18(),
    "small": small_leaves(),
    "halves": LeafSet("32 leaves of 2^19", ((1024, 512),) * 32),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A named optimizer, with the dtype of its parameters and its step."""

    name: str
    family: str
    dtype: typing.Any
    tx: optax.GradientTransformation
    step: typing.Callable


def applied(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def low_bit(family: str, **options) -> dict[str, optax.GradientTransformation]:
    """Return the optimizers of this package, by name.

    Args:
      family: "adamw" or "sgd".
      **options: options for every optimizer.
    """
    if family == "sgd":
        options["momentum"] = MOMENTUM

    def make(method: str, **more):
        alias = getattr(lowbit_optax, f"{method}_{family}")
        return alias(RATE, weight_decay=DECAY, **options, **more)

    found = {f"{method}_{family}": make(method) for method in ("kahan", "sr")}
    found[f"extra_bits_{family}(bits=16)"] = make("extra_bits")
    found[f"extra_bits_{family}(bits=8)"] = make("extra_bits", bits=8)
    if family == "adamw":
        found["lowbit_adamw"] = make("lowbit")
    return found


def variants(implementation: str | None = None):
    bf16 = jnp.bfloat16
    adamw = optax.adamw(RATE, weight_decay=DECAY)
    sgd = optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(RATE, MOMENTUM))
    for family, tx in {"adamw": adamw, "sgd": sgd}.items():
        optimizers = low_bit(family, implementation=implementation)
        yield Variant(f"optax {family} float32", family, jnp.float32, tx, applied(tx))
        master = with_master(tx)
        yield Variant(
            f"optax {family} float32 master", family, bf16, master, replaced(master)
        )
        yield Variant(f"optax {family} bfloat16", family, bf16, tx, applied(tx))
        for name, low in optimizers.items():
            yield Variant(f"{name}, step", family, bf16, low, fast(low))
        name = f"kahan_{family}"
        low = optimizers[name]
        yield Variant(f"{name}, update", family, bf16, low, applied(low))


class Running:
    """The compiled step of a variant, with its parameters and state."""

    def __init__(self, variant: Variant, leaf_set: LeafSet):
        keys = jax.random.split(jax.random.key(0), len(leaf_set.shapes))
        self.params = [jnp.ones(shape, variant.dtype) for shape in leaf_set.shapes]
        self.grads = [
            jax.random.normal(key, shape, variant.dtype)
            for key, shape in zip(keys, leaf_set.shapes, strict=True)
        ]
        self.state = variant.tx.init(self.params)
        if variant.name.endswith("master"):
            # A buffer cannot be donated twice, so the master needs its own.
            self.state = jax.tree.map(jnp.copy, self.state)
        self.step = jax.jit(variant.step, donate_argnums=(0, 1))
        live = sum(x.nbytes for x in jax.tree.leaves((self.params, self.state)))
        self.bytes_per_param = live / leaf_set.parameters
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        lowered = self.step.lower(self.params, self.state, self.grads)
        memory = lowered.compile().memory_analysis()
        self.temp_per_param = memory.temp_size_in_bytes / leaf_set.parameters
        self()
        self.seconds.clear()
        self.cpu_seconds.clear()

    def __call__(self) -> None:
        start, cpu_start = time.perf_counter(), time.process_time()
        self.params, self.state = self.step(self.params, self.state, self.grads)
        jax.block_until_ready((self.params, self.state))
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.process_time() - cpu_start)


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=1 << 24)
    parser.add_argument("--leaves", type=int, default=1, help="equal square leaves")
    parser.add_argument("--model", choices=MODELS, help="use the leaves of this model")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--implementation", help="implementation= of the optimizers, such as 'xla'"
    )
    parser.add_argument(
        "--only",
        help="besides optax's float32 step, only names that contain this text",
    )
    parser.add_argument("--family", choices=("adamw", "sgd", "both"), default="both")
    return parser.parse_args(argv)


def row(variant: Variant, run: Running, running: list) -> dict[str, str]:
    """Return a variant's figures, with ratios to the first variant of its family."""
    base = next(r for v, r in running if v.family == variant.family)
    pairs = lambda some, others: zip(some, others, strict=True)
    ratio = lambda *both: statistics.median(a / b for a, b in pairs(*both))
    return {
        "step": variant.name,
        "ms": f"{1e3 * statistics.median(run.seconds):.1f}",
        "ratio": f"{ratio(run.seconds, base.seconds):.2f}",
        "cpu ratio": f"{ratio(run.cpu_seconds, base.cpu_seconds):.2f}",
        "B/param": f"{run.bytes_per_param:.2f}",
        "temp B/param": f"{run.temp_per_param:.2f}",
    }


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    side = round(math.sqrt(args.parameters / args.leaves))
    equal = LeafSet(f"{args.leaves} x {side} x {side}", ((side, side),) * args.leaves)
    leaf_set = MODELS[args.model] if args.model else equal
    every = variants(args.implementation)
    chosen = [v for v in every if args.family in (v.family, "both")]
    if args.only:
        is_base = lambda v: v.name == f"optax {v.family} float32"
        chosen = [v for v in chosen if is_base(v) or args.only in v.name]
    running = [(v, Running(v, leaf_set)) for v in chosen]
    for _ in range(args.rounds):
        for _, run in running:
            run()
    device = jax.devices()[0]
    print(
        f"{leaf_set.name}, {leaf_set.parameters:,} parameters, {args.rounds} rounds, "
        f"jax {jax.__version__} on {device.device_kind} ({platform.machine()})"
    )
    records.print_rows(row(variant, run, running) for variant, run in running)
