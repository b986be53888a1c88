"""Compile a program, and measure the time of each stage."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh


class Stages(NamedTuple):
    """A compiled program, and seconds by stage: "trace", "lower" and "compile".

    Attributes:
      compiled: the program.
      wall: seconds of wall time.
      processor: seconds of processor time, including child processes that
        have ended, such as ``ptxas``.
    """

    compiled: jax.stages.Compiled
    wall: dict[str, float]
    processor: dict[str, float]


def compile_in_stages(
    fn: Callable, *args, mesh: Mesh | None = None, donate: Sequence[int] = ()
) -> Stages:
    """Compile a program, and measure the time of each stage.

    Args:
      fn: the function to compile.
      *args: its arguments, as trees of arrays or ShapeDtypeStructs.
      mesh: the GPUs to compile for, from ``gpu_mesh``; None for this machine's device.
      donate: the indices of the arguments to donate.
    """
    wall, processor = {}, {}

    def timed(stage: str, call: Callable):
        start = time.perf_counter(), _processor_seconds()
        found = call()
        wall[stage] = time.perf_counter() - start[0]
        processor[stage] = _processor_seconds() - start[1]
        return found

    traced = timed("trace", lambda: _traced(fn, args, mesh, donate))
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        lowered = timed("lower", traced.lower)
        compiled = timed("compile", lowered.compile)
    return Stages(compiled, wall, processor)


def _traced(fn, args, mesh: Mesh | None, donate) -> jax.stages.Traced:
    if mesh is None:
        return jax.jit(fn, donate_argnums=donate).trace(*args)
    # The module tools.gpu_program.targets needs the gpu-program extra.
    from tools.gpu_program.targets import trace_for

    return trace_for(mesh, fn, *args, donate=donate)


def _processor_seconds() -> float:
    return sum(os.times()[:4])
