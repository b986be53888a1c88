"""Processor time to compile programs for a CPU, and a bound for each.

    .venv/bin/python -m benchmarks cpu_compilation [--all]

The first table lists ``split_array`` for several numbers of extra bits, and the second
a step of 24 matrices with optax's wrappers and loss scaling. With ``--all``, the first
table has all numbers of bits, ten shapes and three kinds of rounding, and the second
has more formats and also ``update``. Seconds include the time to trace and to lower.
The command fails if a program needs more time than its bound.
"""

import argparse
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import optax

import lowbit_optax
from benchmarks import records
from benchmarks.programs.compile_cost import RATE, cost_of
from lowbit_optax import extra_bits, loss_scaling, lowbit, split_array
from tools.stages import compile_in_stages

MINUTES = 3

SECONDS_TO_SPLIT = 3.0
SECONDS_OF_A_STEP = 10.0

SHAPES = (
    (1,),
    (7,),
    (4096,),
    (100003,),
    (64, 64),
    (96, 64),
    (512, 512),
    (33, 130),
    (8, 64, 96),
    (3, 3, 64, 128),
)
LEAVES = 24

FORMATS = {
    "lowbit_adamw": lowbit_optax.lowbit_adamw,
    "kahan_adamw": lowbit_optax.kahan_adamw,
    "sr_adamw": lowbit_optax.sr_adamw,
    "extra_bits_adamw(bits=13)": functools.partial(
        lowbit_optax.extra_bits_adamw, bits=13
    ),
    "lowbit(lion)": lambda rate: lowbit(optax.lion(rate)),
}
WRAPPERS = {
    "": lambda tx: tx,
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
    "with_loss_scale": lambda tx: lowbit_optax.with_loss_scale(
        tx, loss_scaling.backoff_scale()
    ),
    "clip": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 4),
    "accumulate_gradients": lambda tx: lowbit_optax.accumulate_gradients(tx, 4),
}


def seconds_to_split(shape: tuple[int, ...], bits: int, rounding: str) -> float:
    """Return the seconds to compile ``split_array`` for an array of this shape."""
    split = functools.partial(
        split_array,
        dtype=jnp.bfloat16,
        weight_format=extra_bits(bits, rounding=rounding),
    )
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    return sum(compile_in_stages(split, x).processor.values())


def seconds_of_a_step(tx, advance: Callable) -> float:
    """Return the seconds to compile a step of 24 small matrices."""
    leaf = jax.ShapeDtypeStruct((64, 96), jnp.bfloat16)
    params = {f"{number:02d}": leaf for number in range(LEAVES)}
    return sum(cost_of(functools.partial(advance, tx), tx, params, params).values())


def update(tx, params, state, grads):
    """Run a step with ``update`` and ``apply_updates``."""
    updates, state = tx.update(grads, state, params)
    return lowbit_optax.apply_updates(params, updates), state


def _row(found: float, bound: float, **of) -> dict[str, str]:
    return of | {
        "seconds": f"{found:.2f}",
        "bound": f"{bound:g}",
        "": "" if found <= bound else "too slow",
    }


def splits(everything: bool) -> Iterator[dict[str, str]]:
    """Measure ``split_array``."""
    shapes = SHAPES if everything else ((4096,), (512, 512))
    roundings = ("nearest", "stochastic", "toward_zero")
    for rounding in roundings if everything else roundings[:2]:
        for bits in range(17) if everything else (8, 12, 13):
            for shape in shapes:
                found = seconds_to_split(shape, bits, rounding)
                of = {"bits": str(bits), "rounding": rounding, "shape": str(shape)}
                yield _row(found, SECONDS_TO_SPLIT, **of)


def steps(everything: bool) -> Iterator[dict[str, str]]:
    """Measure steps."""
    names = list(FORMATS) if everything else ["lowbit_adamw"]
    ways = {"step": lowbit_optax.step, "update": update}
    for name in names:
        for wrapper, wrap in WRAPPERS.items():
            for way in ways if everything else ["step"]:
                found = seconds_of_a_step(wrap(FORMATS[name](RATE)), ways[way])
                of = {"step": f"`{name}`", "wrapper": wrapper, "with": f"`{way}`"}
                yield _row(found, SECONDS_OF_A_STEP, **of)


def main(argv: list[str] | None = None) -> int:
    """Measure, print tables, and return 1 if a program exceeds its bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="measure all programs")
    everything = parser.parse_args(argv).all
    seconds_to_split((8, 8), 8, "nearest")  # warms up
    slow = 0
    for measure in (splits, steps):
        rows = list(measure(everything))
        records.print_rows(rows)
        slow += sum(bool(row[""]) for row in rows)
    return min(slow, 1)
