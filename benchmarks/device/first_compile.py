"""Time the first compilation of a step on GPT-2's 148 leaves.

Each optimizer compiles in its own process, while nothing else compiles, and without a
compilation cache.
"""

import functools

import jax

from benchmarks.device.job import Job
from benchmarks.device.optimizers import OPTIMIZERS, RATE
from benchmarks.device.step_times import leaf_set_of, structs_of

NAMES = ("lowbit_adamw", "optax, float32 master")


def measure(job: Job, name: str) -> dict:
    """Compile the step. The record of the program contains the time of each stage."""
    optimizer, leaf_set = OPTIMIZERS[name](RATE), leaf_set_of("gpt2", job.small)
    grads = structs_of(leaf_set)
    params, state = jax.eval_shape(optimizer.init, grads)
    job.take_device()
    job.compile("step", optimizer.step, params, state, grads, donate=(0, 1))
    return {"leaves": len(grads), "parameters": leaf_set.parameters}


def run(job: Job, name: str) -> None:
    """Compile the step of one optimizer."""
    job.attempt("GPT-2's leaves", functools.partial(measure, job, name))
