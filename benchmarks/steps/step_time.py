"""Times a jitted, donated optimizer step of every alias against optax, on this host.

    .venv/bin/python -m benchmarks step_time --parameters 16777216 --json step_time.json

All variants run in turn, round after round, so that a noisy machine disturbs them
alike; the table gives the median time, and the medians over the rounds of the ratios to
optax's float32 step, in time and in the processor time of all threads. Gradients are in
the parameters' dtype, and every step donates parameters and state, the baselines' too.
"""

import argparse
import dataclasses
import json
import math
import platform
import statistics
import time
import typing

import jax
import jax.numpy as jnp
import optax

import lowbit_optax
from benchmarks.leaf_sets import LeafSet, resnet18, small_leaves
from benchmarks.training import command_line

RATE, DECAY, MOMENTUM = 1e-3, 1e-4, 0.9
MODELS = {
    "resnet18": resnet18(),
    "small": small_leaves(),
    "halves": LeafSet("32 leaves of 2^19", ((1024, 512),) * 32),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A named optimizer: its parameters' dtype, transformation, and step."""

    name: str
    family: str
    dtype: typing.Any
    tx: optax.GradientTransformation
    step: typing.Callable


def fast(tx):
    return lambda params, state, grads: lowbit_optax.step(tx, params, state, grads)


def applied(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def float32_master(tx):
    """The usual mixed precision by hand: state is (float32 master, tx's state)."""

    def init(params):
        master = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return master, tx.init(master)

    def step(params, state, grads):
        del params
        master, inner = state
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, inner = tx.update(grads, inner, master)
        master = optax.apply_updates(master, updates)
        return jax.tree.map(lambda m: m.astype(jnp.bfloat16), master), (master, inner)

    return optax.GradientTransformation(init, None), step


def variants(implementation: str | None = None):
    bf16 = jnp.bfloat16
    ours = {"weight_decay": DECAY, "implementation": implementation}
    adamw = optax.adamw(RATE, weight_decay=DECAY)
    sgd = optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(RATE, MOMENTUM))
    families = {
        "adamw": (
            adamw,
            {
                "kahan_adamw": lowbit_optax.kahan_adamw(RATE, **ours),
                "sr_adamw": lowbit_optax.sr_adamw(RATE, **ours),
                "extra_bits_adamw(bits=16)": lowbit_optax.extra_bits_adamw(
                    RATE, **ours
                ),
                "extra_bits_adamw(bits=8)": lowbit_optax.extra_bits_adamw(
                    RATE, **ours, bits=8
                ),
                "lowbit_adamw": lowbit_optax.lowbit_adamw(RATE, **ours),
            },
        ),
        "sgd": (
            sgd,
            {
                "kahan_sgd": lowbit_optax.kahan_sgd(RATE, MOMENTUM, **ours),
                "sr_sgd": lowbit_optax.sr_sgd(RATE, MOMENTUM, **ours),
                "extra_bits_sgd(bits=16)": lowbit_optax.extra_bits_sgd(
                    RATE, MOMENTUM, **ours
                ),
                "extra_bits_sgd(bits=8)": lowbit_optax.extra_bits_sgd(
                    RATE, MOMENTUM, **ours, bits=8
                ),
            },
        ),
    }
    for family, (tx, low_bit) in families.items():
        yield Variant(f"optax {family} float32", family, jnp.float32, tx, applied(tx))
        holder, step = float32_master(tx)
        yield Variant(f"optax {family} float32 master", family, bf16, holder, step)
        yield Variant(f"optax {family} bfloat16", family, bf16, tx, applied(tx))
        for name, low in low_bit.items():
            yield Variant(f"{name}, step", family, bf16, low, fast(low))
        name = f"kahan_{family}"
        low = low_bit[name]
        yield Variant(f"{name}, update", family, bf16, low, applied(low))


class Running:
    """One variant's compiled step and its live parameters and state."""

    def __init__(self, variant: Variant, leaf_set: LeafSet):
        keys = jax.random.split(jax.random.key(0), len(leaf_set.shapes))
        self.params = [jnp.ones(shape, variant.dtype) for shape in leaf_set.shapes]
        self.grads = [
            jax.random.normal(key, shape, variant.dtype)
            for key, shape in zip(keys, leaf_set.shapes, strict=True)
        ]
        self.state = variant.tx.init(self.params)
        if variant.name.endswith("master"):
            # The master must not share a buffer with anything that is donated.
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
    parser.add_argument("--model", choices=MODELS, help="its leaves in place of these")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--implementation", help="'xla': of whole leaves")
    parser.add_argument("--only", help="with float32: names that contain this")
    parser.add_argument("--family", choices=("adamw", "sgd", "both"), default="both")
    file, text = command_line.output_file, "also write the table to this file"
    parser.add_argument("--json", type=file, help=text)
    return parser.parse_args(argv)


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
    print(
        f"{'step':38}{'ms':>8}{'ratio':>8}{'cpu ratio':>11}{'B/param':>9}"
        f"{'temp B/param':>14}"
    )
    rows = []
    for variant, run in running:
        base = next(r for v, r in running if v.family == variant.family)
        pairs = zip(run.seconds, base.seconds, strict=True)
        cpu_pairs = zip(run.cpu_seconds, base.cpu_seconds, strict=True)
        row = {
            "step": variant.name,
            "median_ms": 1e3 * statistics.median(run.seconds),
            "ratio_to_float32": statistics.median(a / b for a, b in pairs),
            "cpu_ratio_to_float32": statistics.median(a / b for a, b in cpu_pairs),
            "bytes_per_param": run.bytes_per_param,
            "temp_bytes_per_param": run.temp_per_param,
        }
        rows.append(row)
        print(
            f"{row['step']:38}{row['median_ms']:8.1f}{row['ratio_to_float32']:8.2f}"
            f"{row['cpu_ratio_to_float32']:11.2f}"
            f"{row['bytes_per_param']:9.2f}{row['temp_bytes_per_param']:14.2f}"
        )
    if args.json:
        record = {
            "device": device.device_kind,
            "jax": jax.__version__,
            "leaves": leaf_set.name,
            "rounds": args.rounds,
            "rows": rows,
        }
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)
            file.write("\n")
