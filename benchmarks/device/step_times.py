"""Measure the time of a step, and the bytes that it moves per second.

On 16 matrices of 4096 x 4096, Python calls one step after the other, faster than the
device can run them. On GPT-2's 148 leaves, Python would be slower than the device, so
each call runs a loop of 20 steps on the device. A measurement makes many calls, waits
once for all of them, and takes about 0.1 s. The result is the median of seven
measurements.
"""

import functools
import math
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device.job import Job, seconds_of
from benchmarks.device.optimizers import OPTIMIZERS, RATE, Optimizer, nbytes
from benchmarks.leaf_sets import LeafSet, gpt2

SETS = {"16x4096": LeafSet("16x4096", ((4096, 4096),) * 16), "gpt2": gpt2()}
LOOPED = {"16x4096": 1, "gpt2": 20}
"""For each set of leaves, the number of steps that one program runs."""
ROUNDS, MEASURE = 7, 0.1


def steps_in_one(step: Callable, count: int) -> Callable:
    """Return a function that runs ``count`` steps, so one call dispatches all."""
    if count == 1:
        return step

    def body(_, carry):
        # Without the barrier, XLA could move work on the gradients out of the loop.
        params, state, grads = jax.lax.optimization_barrier(carry)
        return *step(params, state, grads), grads

    def steps(params, state, grads):
        carry = params, state, grads
        params, state, _ = jax.lax.fori_loop(0, count, body, carry)
        return params, state

    return steps


def leaf_set_of(name: str, small: bool) -> LeafSet:
    """Return a set of leaves. If ``small``, use 14 leaves at 1/64 of their widths."""
    if not small:
        return SETS[name]
    return LeafSet(name, SETS[name].shrunk(64).shapes[:14])


def structs_of(leaf_set: LeafSet) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of the leaves, with dtype bfloat16."""
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in leaf_set.shapes]


def gradients(shapes) -> list[np.ndarray]:
    """Return gradients on the host, which repeat 2^20 normal bfloat16 numbers."""
    rng = np.random.default_rng(0)
    pattern = rng.standard_normal(2**20, np.float32).astype(jnp.bfloat16)
    return [np.resize(pattern, shape) for shape in shapes]


def timed(advance: Callable[[int], None]) -> list[float]:
    """Return the seconds per call of each round."""
    advance(1)
    once = max(seconds_of(advance, 2), 1e-7)
    calls = max(1, min(2000, math.ceil(MEASURE / once)))
    return [seconds_of(advance, calls) for _ in range(ROUNDS)]


def time_donated(compiled: Callable, kept: tuple, *rest) -> list[float]:
    """Return seconds per call of a program that updates ``kept``, which is donated."""

    def advance(calls: int) -> None:
        nonlocal kept
        for _ in range(calls):
            kept = compiled(*kept, *rest)
        jax.block_until_ready(kept)

    return timed(advance)


def measure(job: Job, optimizer: Optimizer, leaf_set: LeafSet, count: int) -> dict:
    """Measure the step of an optimizer on a set of leaves.

    Args:
      job: the job, which compiles the program and waits for the device.
      optimizer: the optimizer.
      leaf_set: the leaves.
      count: the number of steps per call.
    """
    grads = structs_of(leaf_set)
    params, state = jax.eval_shape(optimizer.init, grads)
    moved = (1 + optimizer.reads_params) * nbytes(params)
    moved += 2 * nbytes(state) + nbytes(grads)
    name, stored = leaf_set.name, nbytes((params, state))
    several = steps_in_one(optimizer.step, count)
    donate = (0, 1)
    step = job.compile(f"{name}: step", several, params, state, grads, donate=donate)
    figures = {
        "leaves": len(grads),
        "parameters": leaf_set.parameters,
        "stored_bytes": stored,
        "moved_bytes": moved,
        "steps_in_one_call": count,
    }
    if not job.runs:
        return figures
    job.take_device()
    # XLA needs up to a minute to compile the init of some optimizers. A state of zeros
    # is good enough, because a step or two fill it with ordinary values.
    kept = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (params, state))
    steps = time_donated(step, kept, jax.device_put(gradients(leaf_set.shapes)))
    return figures | _summary([x / count for x in steps], leaf_set, moved)


def _summary(steps, leaf_set: LeafSet, moved: int) -> dict:
    """Return the median, minimum and maximum of the times."""
    step = statistics.median(steps)
    return {
        "ms": 1e3 * step,
        "ms_low": 1e3 * min(steps),
        "ms_high": 1e3 * max(steps),
        "ps_per_parameter": 1e12 * step / leaf_set.parameters,
        "gb_per_s": 1e-9 * moved / step,
    }


def run(job: Job, name: str) -> None:
    """Measure one optimizer on both sets of leaves."""
    for each, count in LOOPED.items():
        leaf_set = leaf_set_of(each, job.small)
        optimizer = OPTIMIZERS[name](RATE)
        job.attempt(each, functools.partial(measure, job, optimizer, leaf_set, count))
