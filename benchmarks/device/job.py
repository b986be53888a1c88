"""Run one job of ``first_device`` in its own process.

The process reads its task from standard input as a line of JSON, and answers in lines
of JSON. Before it uses the device, it asks the supervisor and waits for an answer.
After the answer, no other job runs on the device, but other jobs may still compile.
"""

import contextlib
import dataclasses
import importlib
import json
import math
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from tools.stages import compile_in_stages

LONGEST = 4000
"""The number of characters of an error message that the record keeps."""


@dataclasses.dataclass
class Job:
    """The task of this process, and its connection to the supervisor.

    Attributes:
      small: whether to use small sizes, for a quick try on any device.
      mesh: a mesh of the GPU to compile for; None if the programs also run.
      skip: trials that are done, or that ended an earlier process of this job.
      text: the path of the text for ``shakespeare_runs``, or None.
      end: the value of ``time.monotonic`` at which the job is killed.
      has_device: whether this job is the only one that uses the device.
    """

    small: bool
    mesh: Mesh | None
    skip: frozenset[str]
    text: str | None = None
    end: float = math.inf
    has_device: bool = False

    @property
    def runs(self) -> bool:
        """Whether programs run, rather than only compile."""
        return self.mesh is None

    @property
    def for_gpus(self) -> bool:
        """Whether programs are for GPUs."""
        return self.mesh is not None or jax.default_backend() == "gpu"

    def say(self, **message) -> None:
        """Write a line to the supervisor."""
        print(json.dumps(message), file=_answers, flush=True)

    def attempt(self, trial: str, measure: Callable[[], dict]) -> None:
        """Run a part of the job. If it fails, the job continues with the next part.

        Args:
          trial: the name of the part.
          measure: a function that returns the figures of the part.
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
        """Wait until no other job uses the device, and reserve it for this trial."""
        if self.has_device or not self.runs:
            return
        self.say(wants_device=True)
        _told.get()
        self.has_device = True

    def target_mesh(self) -> contextlib.AbstractContextManager:
        """Return a context that sets the mesh of the GPU to compile for, if any."""
        return contextlib.nullcontext() if self.runs else jax.set_mesh(self.mesh)

    def compile(self, name: str, fn: Callable, *args, donate=()) -> Callable:
        """Compile a program, and send the supervisor the time of each stage.

        Args:
          name: the name of the program in the record.
          fn: the function to compile.
          *args: its arguments, as trees of arrays or ShapeDtypeStructs.
          donate: the indices of the arguments to donate.
        """
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        found = compile_in_stages(fn, *shapes, mesh=self.mesh, donate=donate)
        memory = found.compiled.memory_analysis()
        self.say(
            program=name,
            seconds=found.wall,
            processor=found.processor,
            temporary=getattr(memory, "temp_size_in_bytes", None),
        )
        return found.compiled


def seconds_of(call: Callable[[int], None], calls: int) -> float:
    """Return seconds per call. ``call(n)`` makes ``n`` calls and waits for the last."""
    start = time.perf_counter()
    call(calls)
    return (time.perf_counter() - start) / calls


def describe(job: Job) -> None:
    """Send a description of the device. This is the first job."""
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
    """Run the job that the supervisor requests."""
    mesh = None
    if request["target"]:
        from tools.gpu_program.targets import TARGETS, gpu_mesh

        mesh = gpu_mesh(target=TARGETS[request["target"]])
    skip, text, end = (request[key] for key in ("skip", "text", "end"))
    job = Job(request["small"], mesh, frozenset(skip), text, end)
    if request["section"] == "describe":
        return describe(job)
    section = importlib.import_module(f"benchmarks.device.{request['section']}")
    section.run(job, request["name"])


def listen() -> None:
    """Queue the lines that the supervisor sends, and exit when it exits."""
    # Python cannot exit while a thread waits for input in a buffered file.
    with open(0, "rb", buffering=0) as lines:
        for line in lines:
            _told.put(line)
    os._exit(1)


_told: queue.SimpleQueue[bytes] = queue.SimpleQueue()

if __name__ == "__main__":
    # Libraries print to standard output too; send their output to standard error.
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=listen, daemon=True).start()
    run_job(json.loads(_told.get()))
else:
    _answers = sys.stdout
