"""The jobs of a run, and the text that tells a process which jobs it runs."""

import json
from collections.abc import Sequence
from typing import NamedTuple


class Job(NamedTuple):
    """A part of a run: it starts from weights or a checkpoint, and ends at a step.

    Attributes:
        name: the folder of its checkpoints.
        format: a key of `FORMATS` of the example.
        stop: the number of steps after which it ends.
        source: the name and the format of the job whose last checkpoint it resumes.
        factor: the factor of the initial weights.
        kill_at: the step after which the last process kills itself.
        same_as: the name of a job that makes the same steps.
    """

    name: str
    format: str
    stop: int
    source: tuple[str, str] | None = None
    factor: float = 1.0
    kill_at: int | None = None
    same_as: str | None = None


class Task(NamedTuple):
    """The work of one of several processes.

    Attributes:
        folder: where everything is stored.
        sizes: the sizes of the model, by name.
        total: the number of steps of the schedule.
        save_every: the number of steps between checkpoints.
        devices: the number of devices of each process.
        jobs: the jobs, which run one after another.
        processes, rank, port: the processes of the group, and this one's rank.
    """

    folder: str
    sizes: dict
    total: int
    save_every: int
    devices: int = 1
    jobs: Sequence[Job] = ()
    processes: int = 1
    rank: int = 0
    port: int = 0

    def dumps(self) -> str:
        """Return the task as text."""
        return json.dumps(self._asdict())

    @classmethod
    def loads(cls, text: str) -> "Task":
        """Return the task of a text."""
        task = cls(**json.loads(text))
        return task._replace(jobs=[Job(*job) for job in task.jobs])
