"""A rehearsal of a large run: sharded, killed, and resumed in other formats.

    .venv/bin/python -m benchmarks rehearsal

A Llama-like model trains on virtual devices of the CPU. Two processes start it. One of
them is killed while both save a checkpoint. Later processes resume the run with other
numbers of devices and in other formats. The table compares the losses with those of an
uninterrupted float32 run, and counts the bits that differ where all must be equal.
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

from benchmarks import ROOT
from benchmarks.training.large_model.plan import Job, Task

MINUTES = 3
NEEDS = ("orbax.checkpoint",)

SECONDS = 1200  # the longest time for a group of processes
WORKER = "benchmarks.training.large_model.worker"
RELEASED = "lowbit_adamw_released"
HALF = "float16_master_copy"


class Group(NamedTuple):
    """Processes that run the same jobs together."""

    processes: int
    devices: int
    jobs: list[Job]


class Phase(NamedTuple):
    """A row of the table.

    Attributes:
        gap: the largest difference to the float32 losses of the same steps.
        bits: the number of bits that differ where none may, or None if this job has
            nothing to compare.
    """

    name: str
    group: Group
    format: str
    first: int
    last: int
    loss: float
    gap: float
    bits: int | None
    bytes_per_parameter: float


def plan(steps: int) -> list[Group]:
    """Return the groups of a run with four phases, each of this many steps."""
    total, killed = 4 * steps, steps + steps // 2
    lowbit = "lowbit_adamw"
    return [
        Group(
            2,
            4,
            [
                Job("float32", "float32", total),
                Job("float32 again", "float32", total, factor=1 + 2**-9),
                Job("uninterrupted", lowbit, total),
                Job(
                    "killed",
                    lowbit,
                    total,
                    is_saved=True,
                    kill_at=killed,
                    same_as="uninterrupted",
                ),
            ],
        ),
        Group(
            1,
            4,
            [
                Job(
                    "resumed",
                    "kahan_adamw",
                    2 * steps,
                    source=("killed", lowbit),
                    is_saved=True,
                )
            ],
        ),
        Group(
            1,
            16,
            [
                Job(
                    "released",
                    RELEASED,
                    3 * steps,
                    source=("resumed", "kahan_adamw"),
                    is_saved=True,
                ),
                Job("float16", HALF, total, source=("released", RELEASED)),
            ],
        ),
    ]


def run_group(group: Group, task: Task) -> None:
    """Run the processes of a group until all have ended, or one is killed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    task = task._replace(
        devices=group.devices, jobs=group.jobs, processes=group.processes, port=port
    )
    workers = [_started(task._replace(rank=rank)) for rank in range(group.processes)]
    is_killed = any(job.kill_at for job in group.jobs)
    wanted = -signal.SIGKILL if is_killed else 0
    deadline = time.monotonic() + SECONDS
    try:
        waiting = workers[-1:] if is_killed else workers
        for worker in waiting:
            status = worker.wait(deadline - time.monotonic())
            if status != wanted:
                printed = "".join(log.read_text() for log in _logs(task))
                raise RuntimeError(f"a process ended with {status}:\n{printed}")
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _logs(task: Task) -> list[pathlib.Path]:
    """Return the files with what each process prints."""
    name = task.jobs[-1].name
    return [pathlib.Path(task.folder, f"{name}-{i}.log") for i in range(task.processes)]


def _started(task: Task) -> subprocess.Popen:
    command = [sys.executable, "-m", WORKER, task.dumps()]
    with open(_logs(task)[task.rank], "w") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def phase_of(job: Job, group: Group, folder: pathlib.Path) -> tuple[dict, Phase]:
    """Return the losses of a job by step, and its row without a difference."""
    paths = [folder / f"{job.name}-{rank}.jsonl" for rank in range(group.processes)]
    lines = [[json.loads(x) for x in path.read_text().splitlines()] for path in paths]
    losses = {x["step"]: x["loss"] for x in lines[0] if "step" in x}
    counted = [
        number
        for of_process in lines
        for line in of_process
        for name, number in line.items()
        if name.endswith("_bits")
    ]
    bits = sum(counted) if counted else None
    (size,) = (x["bytes_per_parameter"] for x in lines[0] if "bytes_per_parameter" in x)
    first, last = min(losses), max(losses)
    row = job.name, group, job.format, first, last, losses[last], 0.0, bits, size
    return losses, Phase(*row)


def table(phases: list[Phase]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| phase | processes | devices | format | steps | loss at the end "
        "| largest difference to float32 | bits that differ | bytes per parameter |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for x in phases:
        devices = x.group.processes * x.group.devices
        bits = "" if x.bits is None else x.bits
        lines.append(
            f"| {x.name} | {x.group.processes} | {devices} | {x.format} "
            f"| {x.first} to {x.last} | {x.loss:.4f} | {x.gap:.4f} | {bits} "
            f"| {x.bytes_per_parameter:.2f} |"
        )
    return "\n".join(lines)


def measure(folder: pathlib.Path, steps: int, sizes: dict) -> list[Phase]:
    """Run all groups, and return the rows of the table."""
    task = Task(str(folder), sizes, 4 * steps, steps // 2, 0, [])
    phases, reference = [], {}
    for group in plan(steps):
        started = time.monotonic()
        run_group(group, task)
        for job in group.jobs:
            losses, phase = phase_of(job, group, folder)
            reference = reference or losses
            gap = max(abs(loss - reference[step]) for step, loss in losses.items())
            phases.append(phase._replace(gap=gap))
        print(f"{group.jobs[-1].name}: {time.monotonic() - started:.0f} s", flush=True)
    return phases


def is_faithful(phases: list[Phase]) -> bool:
    """Whether no bit differs, and all losses are within the noise of float32."""
    noise = phases[1].gap
    return all(not phase.bits and phase.gap <= noise for phase in phases)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=8, help="steps of each of the four phases")
    add("--layers", type=int, default=2)
    add("--width", type=int, default=64, help="a multiple of 64")
    add("--length", type=int, default=32, help="bytes of a sequence")
    args = parser.parse_args(argv)
    sizes = {"layers": args.layers, "width": args.width, "length": args.length}
    with tempfile.TemporaryDirectory() as folder:
        phases = measure(pathlib.Path(folder), args.steps, sizes)
    print(table(phases))
    return int(not is_faithful(phases))
