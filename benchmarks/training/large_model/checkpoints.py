"""Save a run in the background, and restore it on any mesh."""

from typing import Any

import orbax.checkpoint as ocp

from benchmarks.training.large_model.training import Run, Training, targets


def save(manager: ocp.CheckpointManager, step: int, run: Run) -> None:
    """Save a run after a step. Orbax writes the files while the training continues."""
    manager.save(step, args=ocp.args.StandardSave(run))


def restore(manager: ocp.CheckpointManager, training: Training) -> tuple[int, Run]:
    """Return the number of steps of the last complete checkpoint, and its run."""
    step = manager.latest_step()
    if step is None:
        raise FileNotFoundError(f"{manager.directory} has no complete checkpoint")
    like = ocp.args.StandardRestore(targets(training))
    run: Any = manager.restore(step, args=like)
    return step, run
