"""A process that runs jobs: it trains, saves checkpoints, and resumes from them.

    python -m benchmarks.training.large_model.worker TASK

TASK is the text of a `plan.Task`.
"""

import json
import os
import pathlib
import signal
import sys

from benchmarks.training.large_model.plan import TENSOR, Job, Task

if __name__ == "__main__":
    TASK = Task.loads(sys.argv[1])
    # The last flag wins, and the other flags stay.
    devices = f"--xla_force_host_platform_device_count={TASK.devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}"

import jax
import orbax.checkpoint as ocp

from benchmarks.training.large_model import same_bits
from benchmarks.training.large_model.formats import FORMATS
from benchmarks.training.large_model.model import Llama
from benchmarks.training.large_model.training import Run, Training


class Worker:
    """The jobs of a process, and what they share."""

    def __init__(self, task: Task):
        self.task, self.folder = task, pathlib.Path(task.folder)
        self.model = Llama(**task.sizes)
        auto = (jax.sharding.AxisType.Auto,) * 2
        shape = len(jax.devices()) // TENSOR, TENSOR
        self.mesh = jax.make_mesh(shape, ("fsdp", "tensor"), axis_types=auto)
        self.trainings: dict[str, Training] = {}

    def training(self, name: str) -> Training:
        """Return the functions for a format, which are compiled once."""
        if name not in self.trainings:
            arguments = self.model, FORMATS[name], self.task.total, self.mesh
            self.trainings[name] = Training(*arguments)
        return self.trainings[name]

    def run(self, job: Job) -> None:
        """Run a job, and write a line for every step."""
        training = self.training(job.format)
        first, run = self._resumed(job) if job.source else (0, self._started(job))
        self._write(job, bytes_per_parameter=_bytes_per_parameter(run))
        with self._manager(job.name) as manager:
            for step in range(first, job.stop):
                batch = self.model.batch_of(step, self.mesh)
                loss, run = training.train_step(run, batch)
                self._write(job, step=step + 1, loss=float(loss))
                if (step + 1) % self.task.save_every == 0:
                    self._check(job, step + 1, run)
                    if job.is_saved:  # in the background
                        manager.save(step + 1, args=ocp.args.StandardSave(run))
                is_last = self.task.rank == self.task.processes - 1
                if step + 1 == job.kill_at and is_last:
                    os.kill(os.getpid(), signal.SIGKILL)

    def _started(self, job: Job) -> Run:
        return self.training(job.format).start(job.factor)

    def _resumed(self, job: Job) -> tuple[int, Run]:
        """Restore the last complete checkpoint on this mesh, and convert it."""
        name, format_ = job.source
        source, training = self.training(format_), self.training(job.format)
        with self._manager(name) as manager:
            step = manager.latest_step()
            arguments = ocp.args.StandardRestore(source.targets())
            run = manager.restore(step, args=arguments)
        kept = sorted((self.folder / "kept" / name).glob(f"{step}-*"))
        lost = same_bits.differing(run, kept)
        before = jax.jit(source.masters)(run)
        run = training.convert(run, source)
        after = jax.jit(training.masters)(run)
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        changed = sum(same_bits.bits(*pair) for pair in pairs)
        self._write(job, resumed_at=step, restored_bits=lost, converted_bits=changed)
        return step, run

    def _check(self, job: Job, step: int, run: Run) -> None:
        """Keep the arrays apart from Orbax, or compare them with another job's."""
        file = f"{step}-{self.task.rank}"
        same_bits.keep(run, self.folder / "kept" / job.name / file)
        if job.same_as:
            other = self.folder / "kept" / job.same_as / file
            self._write(job, repeated_bits=same_bits.differing(run, [other]))

    def _manager(self, name: str) -> ocp.CheckpointManager:
        return ocp.CheckpointManager(self.folder / "checkpoints" / name)

    def _write(self, job: Job, **figures) -> None:
        with open(self.folder / f"{job.name}-{self.task.rank}.jsonl", "a") as file:
            file.write(json.dumps(figures) + "\n")


def _bytes_per_parameter(run: Run) -> float:
    stored = sum(x.nbytes for x in jax.tree.leaves((run.params, run.state)))
    return stored / sum(x.size for x in jax.tree.leaves(run.params))


if __name__ == "__main__":
    if TASK.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"localhost:{TASK.port}"
        jax.distributed.initialize(address, TASK.processes, TASK.rank)
    worker = Worker(TASK)
    with jax.set_mesh(worker.mesh):
        for job in TASK.jobs:
            worker.run(job)
