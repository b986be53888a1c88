"""Compiles a program and keeps the texts that XLA writes of it."""

import dataclasses
import pathlib
import tempfile

import jax

from tools.gpu_program.targets import compile_lowered


@dataclasses.dataclass(frozen=True)
class Dump:
    """A compiled program in XLA's own words.

    Args:
      compiled: the program.
      ptx: the sources of its kernels.
      thunks: what it launches and copies, in order, with grids.
      annotations: which instructions these are.
      hlo: the scheduled instructions.
      buffers: the assignment of values to memory.
    """

    compiled: jax.stages.Compiled
    ptx: tuple[str, ...]
    thunks: str
    annotations: str
    hlo: str
    buffers: str


def compile_with_dump(lowered: jax.stages.Lowered) -> Dump:
    """Compile a program for GPUs.

    Args:
      lowered: from ``targets.lower_for``.

    Raises:
      RuntimeError: if XLA wrote no PTX.
    """
    with tempfile.TemporaryDirectory() as folder:
        # JAX 0.12 writes no PTX unless the second option asks for it.
        options: dict[str, str | bool] = {
            "xla_dump_to": folder,
            "xla_dump_emitter_re": "ptx",
        }
        compiled = compile_lowered(lowered, options)
        files = sorted(pathlib.Path(folder).iterdir())

        def texts(ending: str) -> tuple[str, ...]:
            found = (f.read_text() for f in files if f.name.endswith(ending))
            return tuple(filter(None, found))

        dump = Dump(
            compiled,
            texts(".ptx"),
            *(
                "\n".join(texts(ending))
                for ending in (
                    "thunk_sequence.txt",
                    "thunk_metadata.txt",
                    "after_optimizations.txt",
                    "after_optimizations-buffer-assignment.txt",
                )
            ),
        )
    if not dump.ptx:
        raise RuntimeError("XLA wrote no PTX: was the program in a compilation cache?")
    return dump
