"""Compare the time of this package's AdamW steps with optax's, on this machine.

    .venv/bin/python -m benchmarks step_time --parameters 16777216

All variants run once per round, so that other programs disturb them equally. The table
has the median time, and two ratios to optax's float32 step: wall time, and processor
time of all threads. Each ratio is a median over the rounds. Gradients have the dtype of
the parameters. Every step is jitted and donates parameters and state.
"""

import argparse
import functools
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
from tools.gpu_program.steps import applied, fast, replaced, with_master

MINUTES = 2

RATE, DECAY = 1e-3, 1e-4
MODELS = {
    "resnet18": resnet18(),
    "small": small_leaves(),
    "halves": LeafSet("32 leaves of 2^19", ((1024, 512),) * 32),
}


class Variant(typing.NamedTuple):
    """An optimizer, with the dtype of its parameters and its step."""

    dtype: typing.Any
    tx: optax.GradientTransformation
    step: typing.Callable


def low_bit(implementation: str | None) -> dict[str, optax.GradientTransformation]:
    """Return the optimizers of this package, by name."""
    options = {"weight_decay": DECAY, "implementation": implementation}
    return {
        "kahan_adamw": lowbit_optax.kahan_adamw(RATE, **options),
        "sr_adamw": lowbit_optax.sr_adamw(RATE, **options),
        "extra_bits_adamw(bits=16)": lowbit_optax.extra_bits_adamw(RATE, **options),
        "extra_bits_adamw(bits=8)": lowbit_optax.extra_bits_adamw(
            RATE, bits=8, **options
        ),
        "lowbit_adamw": lowbit_optax.lowbit_adamw(RATE, **options),
    }


def variants(implementation: str | None = None) -> dict[str, Variant]:
    """Return the variants by name; the first one is the baseline."""
    adamw = optax.adamw(RATE, weight_decay=DECAY)
    by_optax = functools.partial(applied, apply=optax.apply_updates)
    master = with_master(adamw)
    found = {
        "optax adamw float32": Variant(jnp.float32, adamw, by_optax(adamw)),
        "optax adamw float32 master": Variant(jnp.bfloat16, master, replaced(master)),
        "optax adamw bfloat16": Variant(jnp.bfloat16, adamw, by_optax(adamw)),
    }
    optimizers = low_bit(implementation)
    for name, tx in optimizers.items():
        found[f"{name}, step"] = Variant(jnp.bfloat16, tx, fast(tx))
    kahan = optimizers["kahan_adamw"]
    found["kahan_adamw, update"] = Variant(jnp.bfloat16, kahan, by_optax(kahan))
    return found


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
        # A buffer cannot be donated twice, so a master needs its own.
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


def row(name: str, run: Running, base: Running) -> dict[str, str]:
    """Return a variant's figures, with ratios to the baseline."""
    pairs = lambda some, others: zip(some, others, strict=True)
    ratio = lambda *both: statistics.median(a / b for a, b in pairs(*both))
    return {
        "step": name,
        "ms": f"{1e3 * statistics.median(run.seconds):.1f}",
        "ratio": f"{ratio(run.seconds, base.seconds):.2f}",
        "cpu ratio": f"{ratio(run.cpu_seconds, base.cpu_seconds):.2f}",
        "B/param": f"{run.bytes_per_param:.2f}",
        "temp B/param": f"{run.temp_per_param:.2f}",
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--parameters", type=int, default=1 << 24, help="of one square leaf")
    add("--model", choices=MODELS, help="use the leaves of this model instead")
    add("--rounds", type=int, default=15)
    add("--implementation", help="of the optimizers, such as 'xla'")
    args = parser.parse_args(argv)
    side = round(math.sqrt(args.parameters))
    square = LeafSet(f"{side} x {side}", ((side, side),))
    leaf_set = MODELS[args.model] if args.model else square
    chosen = variants(args.implementation)
    running = {name: Running(each, leaf_set) for name, each in chosen.items()}
    for _ in range(args.rounds):
        for run in running.values():
            run()
    device = jax.devices()[0]
    print(
        f"{leaf_set.name}, {leaf_set.parameters:,} parameters, {args.rounds} rounds, "
        f"jax {jax.__version__} on {device.device_kind} ({platform.machine()})"
    )
    base = next(iter(running.values()))
    records.print_rows(row(name, run, base) for name, run in running.items())
