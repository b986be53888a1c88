"""Orbax checkpoints of a training run: the state, the metrics so far, its settings."""

import contextlib
import logging
import pathlib
import re
import shutil
import textwrap
import time
from typing import Any

import jax
import orbax.checkpoint as ocp

from lowbit_optax.states.checkpoints import check_storage_formats, storage_formats


class CheckpointError(Exception):
    """A checkpoint that does not belong to this run, or cannot be read or written."""


class Checkpoints:
    """The checkpoints of one run, in one folder.

    Orbax writes each under another name and renames it when it is complete. So what a
    killed process leaves behind is not taken for a checkpoint.

    Args:
        folder: made if it is not there.
        settings: everything that decides the run's numbers. They are stored with the
            state, and so is how its arrays are stored. A run with others refuses the
            checkpoint: Orbax casts arrays to the dtypes of its target, so a bfloat16
            run would otherwise quietly continue a float32 one.

    Raises:
        CheckpointError: the folder cannot be written.
    """

    def __init__(self, folder: str | pathlib.Path, settings: dict[str, Any]):
        self._folder = pathlib.Path(folder).resolve()  # Orbax wants absolute paths
        self._settings = settings
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._manager = self._open()
        except OSError as error:
            raise CheckpointError(f"--checkpoint-dir: {error}") from error

    def restore(self, state: Any) -> tuple[Any, dict[str, Any]] | None:
        """The latest state and metrics that can be read; None if nothing was saved.

        Damaged checkpoints that are later are renamed, so that the run can save its
        own in their place.

        Args:
            state: a freshly made TrainState. Structure, shapes, dtypes and shardings of
                the restored one are those of this target.

        Raises:
            CheckpointError: settings or formats of another run, or no checkpoint can
                be read. Nothing is overwritten.
        """
        damaged: dict[int, Exception] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                with _quiet():
                    restored = self._read(step, state)
            except CheckpointError:
                raise
            except Exception as error:  # each storage layer has errors of its own
                damaged[step] = error
                continue
            self._put_aside(damaged)
            return restored
        if damaged:
            raise CheckpointError(
                f"no checkpoint in {self._folder} can be restored: {_listed(damaged)}"
            ) from next(iter(damaged.values()))
        return None

    def save(self, step: int, state: Any, metrics: dict[str, Any]) -> None:
        """Saves the state after `step` steps, unless that is there already.

        Raises:
            CheckpointError: it cannot be written. Those before it are whole.
        """
        if self._manager.latest_step() == step:
            return
        meta = {
            "settings": self._settings,
            "formats": storage_formats(state.tx, state.params),
            "metrics": metrics,
        }
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)
        )
        try:
            self._check_room(state)
            with _quiet():
                self._manager.save(step, args=args)
        except Exception as error:  # a full disk has several names in Orbax
            self._remove_unfinished(step)
            kept = self._manager.latest_step()
            last = "no checkpoint is" if kept is None else f"that of step {kept} is"
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written ({_named(error)}); "
                f"{last} in {self._folder}"
            ) from error

    def close(self) -> None:
        """Ends Orbax's threads."""
        self._manager.close()

    def _open(self) -> ocp.CheckpointManager:
        return ocp.CheckpointManager(
            self._folder,
            # Synchronous, as the next step donates the very buffers that are saved.
            options=ocp.CheckpointManagerOptions(
                max_to_keep=2,
                enable_async_checkpointing=False,
                cleanup_tmp_directories=True,
            ),
        )

    def _check_room(self, state: Any) -> None:
        # Orbax finds out as well, but not without a half-written checkpoint.
        needed = sum(x.nbytes for x in jax.tree.leaves(state) if hasattr(x, "nbytes"))
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise OSError(f"No space left on device: {needed:,} bytes, {free:,} free")

    def _remove_unfinished(self, step: int) -> None:
        for _ in range(20):
            unfinished = list(self._folder.glob(f"{step}.*tmp*"))
            if not unfinished:
                return
            for folder in unfinished:
                shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.1)  # Orbax's other threads may still be writing

    def _read(self, step: int, state: Any) -> tuple[Any, dict[str, Any]]:
        meta = self._manager.restore(
            step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())
        ).meta
        self._check(meta, state)
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        restored = self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target))
        ).state
        return restored, meta["metrics"]

    def _check(self, meta: dict[str, Any], state: Any) -> None:
        stored = meta["settings"]
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
        try:
            check_storage_formats(meta.get("formats", {}), state.tx, state.params)
        except ValueError as error:
            raise CheckpointError(f"{self._folder}: {error}") from error

    def _put_aside(self, damaged: dict[int, Exception]) -> None:
        for step in damaged:
            folder = self._folder / str(step)
            folder.rename(self._folder / f"damaged-{step}")
        if damaged:
            print(f"damaged checkpoints are put aside: {_listed(damaged)}")
            self._manager.close()
            self._manager = self._open()


def _listed(damaged: dict[int, Exception]) -> str:
    return "; ".join(f"step {step} ({_named(e)})" for step, e in damaged.items())


def _named(error: Exception) -> str:
    """The system's own words, where they are in what the storage layer says."""
    known = re.search("(No space left on device|File too large)[^[]*", str(error))
    if known:
        return known.group().strip()
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 200)}"


@contextlib.contextmanager
def _quiet():
    """Without the tracebacks that Orbax's threads log, whose error is raised too."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
