"""A process that runs jobs: it trains, saves checkpoints, and resumes from them.

    python -m benchmarks.training.large_model.worker TASK

TASK is the text of a `plan.Task`.
"""

import json
import os
import pathlib
import signal
import sys

from benchmarks.training.large_model.plan import Job, Task

if __name__ == "__main__":
    TASK = Task.loads(sys.argv[1])
    # Compilation takes most of the time. The last flag wins, and the other flags stay.
    flags = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}"
    devices = f"--xla_force_host_platform_device_count={TASK.devices}"
    os.environ["XLA_FLAGS"] = f"{flags} {devices}"

import functools

import jax
import orbax.checkpoint as ocp

from benchmarks.training.large_model import same_bits
from examples import large_model as train


class Worker:
    """The jobs of a process, and the compiled functions that they share."""

    def __init__(self, task: Task):
        self.task, self.folder = task, pathlib.Path(task.folder)
        self.model = train.Llama(**task.sizes)
        self.mesh = train.mesh_of_all_devices()
        self.training = functools.cache(self._training)
        self.start = functools.cache(self._start)
        self.step = functools.cache(self._step)

    def _training(self, name: str) -> train.Training:
        arguments = self.model, train.FORMATS[name], self.task.total, self.mesh
        return train.training_of(*arguments)

    def _start(self, name: str):
        return train.compiled_start(self.training(name))

    def _step(self, name: str):
        return train.compiled_step(self.training(name))

    def run(self, job: Job) -> None:
        """Run a job, and write a line for every step."""
        first, run = self._resumed(job) if job.source else (0, self._started(job))
        self._write(job, bytes_per_parameter=_bytes_per_parameter(run))
        with self._manager(job.name) as manager:
            for step in range(first + 1, job.stop + 1):
                batch = self.model.batch_of(step, self.mesh)
                loss, run = self.step(job.format)(run, batch)
                self._write(job, step=step, loss=float(loss))
                if step % self.task.save_every == 0:
                    self._keep(job, step, run)
                    train.save(manager, step, run)
                is_last = self.task.rank == self.task.processes - 1
                if step == job.kill_at and is_last:
                    os.kill(os.getpid(), signal.SIGKILL)

    def _started(self, job: Job) -> train.Run:
        create, begin = self.start(job.format)
        weights = create(jax.random.key(0))
        return begin(jax.tree.map(lambda x: x * job.factor, weights))

    def _resumed(self, job: Job) -> tuple[int, train.Run]:
        """Restore the last complete checkpoint on this mesh, and convert it."""
        name, format_ = job.source
        source, training = self.training(format_), self.training(job.format)
        with self._manager(name) as manager:
            step, run = train.restore(manager, source)
        kept = sorted((self.folder / "kept" / name).glob(f"{step}-*"))
        lost = same_bits.differing(run, kept)
        float32 = self.training("float32")
        before = train.convert(run, source, float32)
        run = train.convert(run, source, training)
        after = train.convert(run, training, float32)
        pairs = zip(*map(jax.tree.leaves, (before.params, after.params)), strict=True)
        changed = sum(same_bits.bits(*pair) for pair in pairs)
        state_change = same_bits.largest_change(before.state, after.state)
        self._write(
            job, restored_bits=lost, converted_bits=changed, state_change=state_change
        )
        return step, run

    def _keep(self, job: Job, step: int, run: train.Run) -> None:
        """Write the arrays without Orbax, and compare them with another job's."""
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


def _bytes_per_parameter(run: train.Run) -> float:
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
