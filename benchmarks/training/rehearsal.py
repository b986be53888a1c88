"""A rehearsal of a large run: sharded, killed, and resumed in other formats.

    .venv/bin/python -m benchmarks rehearsal

A Llama-like model trains on virtual devices of the CPU. Two processes start it. One of
them is killed while both save a checkpoint. Later processes resume the run with other
numbers of devices and in other formats. The table shows the differences to an
uninterrupted float32 run, the number of bits that differ where all must be equal, and
how much `convert` changed the moments.
"""

import argparse
import json
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from benchmarks import ROOT, records
from benchmarks.training.large_model.plan import Job, Task

SECONDS = 1200  # the longest time for a group of processes
# The limit for changes of the state. Moments that become 8-bit codes change by 0.03.
MOST_CHANGE = 0.05
WORKER = "benchmarks.training.large_model.worker"
COLUMNS = (
    "phase",
    "processes",
    "devices",
    "format",
    "steps",
    "loss at the end",
    "largest difference to float32",
    "bits that differ",
    "change of the state",
    "bytes per parameter",
)


class Group(NamedTuple):
    """Processes that run the same jobs together."""

    processes: int
    devices: int
    jobs: list[Job]


class Phase(NamedTuple):
    """The results of a job: a row of the table.

    Attributes:
        losses: the losses by step.
        bits: the number of bits that differ where none may, or None if this job has
            nothing to compare.
        state_change: the largest change of a moment or count in ``convert``, relative
            to its root mean square, or None if this job does not convert.
    """

    job: Job
    group: Group
    losses: dict[int, float]
    bits: int | None
    state_change: float | None
    bytes_per_parameter: float

    def gap(self, reference: "Phase") -> float:
        """Return the largest difference to the losses of the same steps."""
        pairs = [(x, reference.losses[step]) for step, x in self.losses.items()]
        return max(abs(x - y) for x, y in pairs)


def plan(steps: int) -> list[Group]:
    """Return the groups of a run with four phases, each of this many steps."""
    total, killed_at = 4 * steps, steps + steps // 2
    float32 = Job("float32", "float32", total)
    again = Job("float32 again", "float32", total, factor=1 + 2**-9)
    whole = Job("uninterrupted", "lowbit_adamw", total)
    killed = Job("killed", whole.format, total, kill_at=killed_at, same_as=whole.name)
    resumed = Job("resumed", "kahan_adamw", 2 * steps, source=killed[:2])
    released = Job("released", "lowbit_adamw_released", 3 * steps, source=resumed[:2])
    half = Job("float16", "float16_master_copy", total, source=released[:2])
    return [
        Group(2, 4, [float32, again, whole, killed]),
        Group(1, 4, [resumed]),
        Group(1, 16, [released, half]),
    ]


def measure(folder: pathlib.Path, steps: int, sizes: dict) -> list[Phase]:
    """Run all groups, and return the rows of the table."""
    task = Task(str(folder), sizes, total=4 * steps, save_every=steps // 2)
    phases = []
    for group in plan(steps):
        started = time.monotonic()
        run_group(group, task)
        phases += [phase_of(job, group, folder) for job in group.jobs]
        print(f"{group.jobs[-1].name}: {time.monotonic() - started:.0f} s", flush=True)
    return phases


def run_group(group: Group, task: Task) -> None:
    """Run the processes of a group until all have ended, or the last one is killed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    task = task._replace(
        devices=group.devices, jobs=group.jobs, processes=group.processes, port=port
    )
    logs = [pathlib.Path(task.folder, f"{rank}.log") for rank in range(task.processes)]
    workers = [_started(task._replace(rank=rank), log) for rank, log in enumerate(logs)]
    is_killed = any(job.kill_at for job in group.jobs)
    deadline = time.monotonic() + SECONDS
    try:
        for worker in workers[-1:] if is_killed else workers:
            status = worker.wait(deadline - time.monotonic())
            if status != (-signal.SIGKILL if is_killed else 0):
                printed = "\n".join(log.read_text() for log in logs)
                raise RuntimeError(f"a process ended with {status}:\n{printed}")
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _started(task: Task, log: pathlib.Path) -> subprocess.Popen:
    command = [sys.executable, "-m", WORKER, task.dumps()]
    with open(log, "w") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)


def phase_of(job: Job, group: Group, folder: pathlib.Path) -> Phase:
    """Return the results that the processes of a group wrote for a job."""
    files = [folder / f"{job.name}-{rank}.jsonl" for rank in range(group.processes)]
    lines = [json.loads(x) for file in files for x in file.read_text().splitlines()]
    losses = {x["step"]: x["loss"] for x in lines if "step" in x}
    counted = [x[name] for x in lines for name in x if name.endswith("_bits")]
    bits = sum(counted) if counted else None
    found = {name: value for x in lines for name, value in x.items()}
    change, size = found.get("state_change"), found["bytes_per_parameter"]
    return Phase(job, group, losses, bits, change, size)


def table(phases: list[Phase]) -> str:
    """Return the results as a Markdown table."""
    rows = []
    for phase in phases:
        job, group = phase.job, phase.group
        first, last = min(phase.losses), max(phase.losses)
        rows.append(
            [
                job.name,
                group.processes,
                group.processes * group.devices,
                f"`{job.format}`",
                f"{first} to {last}",
                f"{phase.losses[last]:.4f}",
                f"{phase.gap(phases[0]):.4f}",
                "" if phase.bits is None else phase.bits,
                "" if phase.state_change is None else f"{phase.state_change:.4f}",
                f"{phase.bytes_per_parameter:.2f}",
            ]
        )
    return records.table(COLUMNS, rows)


def is_faithful(phases: list[Phase]) -> bool:
    """Whether no bit differs, no state is lost, and losses are within the noise."""
    float32, again = phases[:2]
    noise = again.gap(float32)
    return all(
        not phase.bits
        and (phase.state_change or 0) <= MOST_CHANGE
        and phase.gap(float32) <= noise
        for phase in phases
    )


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=8, help="an even number, for each of four phases")
    add("--layers", type=int, default=2)
    add("--width", type=int, default=64, help="a multiple of 64")
    add("--length", type=int, default=32, help="the number of bytes of a sequence")
    args = parser.parse_args(argv)
    sizes = {"layers": args.layers, "width": args.width, "length": args.length}
    with tempfile.TemporaryDirectory() as folder:
        phases = measure(pathlib.Path(folder), args.steps, sizes)
    print(table(phases))
    return int(not is_faithful(phases))
