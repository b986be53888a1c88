"""One job of ``first_device``, in a process of its own.

It reads a line of JSON that says what to do, and answers in lines of JSON. Before it
needs the device to itself it says so, and waits until it is told to go on: then nothing
else runs there, while other jobs may still compile.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

LONGEST = 4000
"""Characters of an error that are kept."""


@dataclasses.dataclass
class Job:
    """What a section's function works with.

    Attributes:
      small: sizes for a quick try, on any device.
      mesh: of the GPU to compile for without running; None where programs run.
      skip: trials that are done, or that ended an earlier process of this job.
      has_device: whether no other job uses the device.
    """

    small: bool
    mesh: Mesh | None
    skip: frozenset[str]
    has_device: bool = False

    @property
    def runs(self) -> bool:
        """Whether programs run, and are not only compiled."""
        return self.mesh is None

    @property
    def for_gpus(self) -> bool:
        """Whether programs are for GPUs."""
        return self.mesh is not None or jax.default_backend() == "gpu"

    def say(self, **message) -> None:
        """Write a line to the supervisor."""
        print(json.dumps(message), file=_answers, flush=True)

    def attempt(self, trial: str, measure: Callable[[], dict]) -> None:
        """A part of the job whose failure does not stop the rest.

        Args:
          trial: its name.
          measure: what returns its figures.
        """
        if trial in self.skip:
            return
        self.say(begin=trial)
        self.has_device = False
        try:
            figures = measure()
        except Exception as error:
            text = "".join(traceback.format_exception_only(error)).strip()
            *_, where = traceback.extract_tb(error.__traceback__)
            at = f"{os.path.basename(where.filename)}:{where.lineno}"
            self.say(trial=trial, error=text[:LONGEST], at=at)
        else:
            self.say(trial=trial, figures=figures)

    def take_device(self) -> None:
        """Wait until no other job uses the device, and keep it for this trial."""
        if self.has_device or not self.runs:
            return
        self.say(wants_device=True)
        _told.get()
        self.has_device = True

    def in_force(self) -> contextlib.AbstractContextManager:
        """The mesh of what is compiled for without running; else none."""
        return contextlib.nullcontext() if self.runs else jax.set_mesh(self.mesh)

    def compile(self, name: str, fn: Callable, *args, donate=()) -> Callable:
        """Compile a program, and say how long that took.

        Args:
          name: of the program.
          fn: what to compile.
          *args: trees of arrays or ShapeDtypeStructs.
          donate: argument numbers.
        """
        from tools.gpu_program.targets import trace_for

        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        clocks = [_clocks()]
        with self.in_force():
            if self.runs:
                traced = jax.jit(fn, donate_argnums=donate).trace(*shapes)
            else:
                traced = trace_for(self.mesh, fn, *shapes, donate=donate)
            clocks.append(_clocks())
            lowered = traced.lower()
            clocks.append(_clocks())
            compiled = lowered.compile()
            clocks.append(_clocks())
        spent = np.diff(clocks, axis=0).tolist()
        memory = compiled.memory_analysis()
        self.say(
            program=name,
            seconds=dict(zip(STAGES, [wall for wall, _ in spent], strict=True)),
            processor=dict(zip(STAGES, [busy for _, busy in spent], strict=True)),
            temporary=getattr(memory, "temp_size_in_bytes", None),
        )
        return compiled


STAGES = ("trace", "lower", "compile")


def _clocks() -> tuple[float, float]:
    """Wall time, and processor time of this process with its compilers."""
    return time.perf_counter(), sum(os.times()[:4])


def seconds_of(call: Callable[[int], None], calls: int) -> float:
    """Seconds a call, in a run of ``calls`` that ends when the last is done."""
    start = time.perf_counter()
    call(calls)
    return (time.perf_counter() - start) / calls


def describe(job: Job) -> None:
    """What there is: the first job of all, so that no other process need ask."""
    device = jax.devices()[0]
    stats = getattr(device, "memory_stats", lambda: None)() or {}
    job.say(
        device=device.device_kind,
        platform=jax.default_backend(),
        capability=getattr(device, "compute_capability", None),
        memory=stats.get("bytes_limit"),
        platform_version=device.client.platform_version,
        jax=jax.__version__,
    )


def run_job(request: dict) -> None:
    """Do what a request of the supervisor asks for."""
    mesh = None
    if request["target"]:
        from tools.gpu_program.targets import TARGETS, gpu_mesh

        mesh = gpu_mesh(target=TARGETS[request["target"]])
    job = Job(request["small"], mesh, frozenset(request["skip"]))
    if request["section"] == "describe":
        return describe(job)
    section = importlib.import_module(f"benchmarks.device.{request['section']}")
    section.run(job, request["name"])


def listen() -> None:
    """Pass on what the supervisor says, and end with it."""
    # Python cannot end while a thread waits in a buffered file.
    with open(0, "rb", buffering=0) as lines:
        for line in lines:
            _told.put(line)
    os._exit(1)


_told: queue.SimpleQueue[bytes] = queue.SimpleQueue()

if __name__ == "__main__":
    # What libraries print is not an answer.
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=listen, daemon=True).start()
    run_job(json.loads(_told.get()))
else:
    _answers = sys.stdout
