"""Orbax checkpoints of a training run: the state, the metrics so far, its settings."""

import pathlib
import textwrap
from typing import Any

import jax
import orbax.checkpoint as ocp


class CheckpointError(Exception):
    """A checkpoint that does not belong to this run or cannot be read."""


class Checkpoints:
    """The checkpoints of one run, in one folder.

    Args:
        folder: made if it is not there.
        settings: everything that decides the run's numbers. They are stored with the
            state, and a run with other settings refuses the checkpoint: Orbax casts
            arrays to the dtypes of its target, so a bfloat16 run would otherwise
            quietly continue a float32 one.
    """

    def __init__(self, folder: str | pathlib.Path, settings: dict[str, Any]):
        self._folder = pathlib.Path(folder).resolve()  # Orbax wants absolute paths
        self._settings = settings
        self._manager = ocp.CheckpointManager(
            self._folder,
            # Synchronous, as the next step donates the very buffers that are saved.
            options=ocp.CheckpointManagerOptions(
                max_to_keep=2, enable_async_checkpointing=False
            ),
        )

    def restore(self, state: Any) -> tuple[Any, dict[str, Any]] | None:
        """The latest state and metrics; None if nothing has been saved.

        Args:
            state: a freshly made state. Structure, shapes, dtypes and shardings of
                the restored one are those of this target.

        Raises:
            CheckpointError: other settings, or a damaged checkpoint. Nothing is
                overwritten.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        try:
            meta = self._manager.restore(
                step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())
            ).meta
            self._check(meta["settings"])
            restored = self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target))
            ).state
        except CheckpointError:
            raise
        except Exception as error:  # each storage layer has errors of its own
            raise CheckpointError(
                f"checkpoint {self._folder / str(step)} cannot be restored "
                f"({type(error).__name__}: {textwrap.shorten(str(error), 300)}); "
                "remove it to go on from the one before"
            ) from error
        return restored, meta["metrics"]

    def _check(self, stored: dict[str, Any]) -> None:
        different = [
            f"{name}: {stored.get(name)!r} there, {value!r} now"
            for name, value in self._settings.items()
            if stored.get(name) != value
        ]
        if different:
            raise CheckpointError(
                f"the checkpoint in {self._folder} is of another run "
                f"({'; '.join(different)}); use another --checkpoint-dir"
            )

    def save(self, step: int, state: Any, metrics: dict[str, Any]) -> None:
        """Saves the state after `step` steps, unless that is there already."""
        if self._manager.latest_step() == step:
            return
        meta = {"settings": self._settings, "metrics": metrics}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)
            ),
        )

    def close(self) -> None:
        """Ends Orbax's threads."""
        self._manager.close()
