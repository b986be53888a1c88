"""Clocks and compilers of ``gpu_step.py``: budgets, medians, and a copy's bandwidth."""

import concurrent.futures
import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

COPY_BYTES = (1 << 28, 1 << 30, 1 << 31)


class Budget:
    """Seconds that may be spent, from now on."""

    def __init__(self, seconds: float):
        self.start = time.perf_counter()
        self.end = self.start + seconds

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.start

    @property
    def left(self) -> float:
        return self.end - time.perf_counter()

    def part(self, share: float) -> "Budget":
        """A budget of a share of what is left."""
        return Budget(max(0.0, share * self.left))


def progress(items: Sequence, label: str) -> Iterable:
    """The items, behind a progress bar if tqdm can be imported."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=label, leave=False, mininterval=1)


@dataclasses.dataclass
class Compiled:
    """A compiled step, and what its compiler says of it."""

    call: Callable
    seconds: float
    temp_bytes: int


def compile_donated(step: Callable, arguments: tuple) -> Compiled:
    """Compile ``(params, state, grads) -> (params, state)``, in place."""
    start = time.perf_counter()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*shapes).compile()
    memory = compiled.memory_analysis()
    temp = getattr(memory, "temp_size_in_bytes", 0)
    return Compiled(compiled, time.perf_counter() - start, temp)


def looped(step: Callable, count: int) -> Callable:
    """``count`` steps in one program, so that one dispatch serves them all."""

    def body(_, carry):
        # Without the barrier XLA could move work on the gradients out of the loop.
        params, state, grads = jax.lax.optimization_barrier(carry)
        return *step(params, state, grads), grads

    def steps(params, state, grads):
        carry = params, state, grads
        params, state, _ = jax.lax.fori_loop(0, count, body, carry)
        return params, state

    return steps


def run_all(jobs: Sequence[Callable], budget: Budget, label: str) -> list:
    """Each job's result or exception, by threads; None where time had run out."""

    def attempt(job):
        if budget.left <= 0:
            return None
        try:
            return job()
        except Exception as error:
            return error

    workers = min(8, os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(attempt, job) for job in jobs]
        return [future.result() for future in progress(futures, label)]


def timed(advance: Callable[[int], None], calls: int) -> float:
    """Seconds a call, in a run of ``calls``."""
    start = time.perf_counter()
    advance(calls)
    return (time.perf_counter() - start) / calls


def calls_for(advance: Callable[[int], None], seconds: float) -> int:
    """How many calls take about so many seconds, after warming up."""
    advance(1)
    once = max(timed(advance, 2), 1e-7)
    return max(1, min(2000, math.ceil(seconds / once)))


@functools.partial(jax.jit, donate_argnums=0)
def _scaled(array, factor):
    return array * factor


def copy_bandwidth(shrink: int, rounds: int, seconds: float) -> list[dict]:
    """Bytes read and written a second by a donated scaling of arrays.

    Args:
      shrink: divides the sizes.
      rounds: of which the median is taken.
      seconds: of one measurement.
    """
    cases = [(n, d) for d in (jnp.bfloat16, jnp.float32) for n in COPY_BYTES]
    return [
        _copy(max(4096, n // shrink), jnp.dtype(dtype), rounds, seconds)
        for n, dtype in progress(cases, "copy")
    ]


def _copy(size: int, dtype, rounds: int, seconds: float) -> dict:
    elements = size // dtype.itemsize
    pattern = jax.random.normal(jax.random.key(0), (4096,), dtype)
    array = jnp.resize(pattern, (elements,))
    one = jnp.ones((), dtype)

    def advance(calls):
        nonlocal array
        for _ in range(calls):
            array = _scaled(array, one)
        array.block_until_ready()

    calls = calls_for(advance, seconds)
    once = statistics.median(timed(advance, calls) for _ in range(rounds))
    moved = 2 * elements * dtype.itemsize
    return {
        "dtype": dtype.name,
        "bytes": elements * dtype.itemsize,
        "ms": 1e3 * once,
        "gb_per_s": 1e-9 * moved / once,
    }
