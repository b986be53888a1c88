"""Compiles a program and keeps the texts that XLA writes of it."""

import dataclasses
import pathlib
import tempfile

import jax

from tools.gpu_program.mosaic import MosaicKernel, kernels_of
from tools.gpu_program.targets import compile_lowered


@dataclasses.dataclass(frozen=True)
class Dump:
    """A compiled program in XLA's own words.

    Args:
      compiled: the program.
      ptx: the sources of its kernels, but for Mosaic's.
      mosaic: Mosaic's kernels, by the names of the instructions that launch them.
      thunks: what it launches and copies, in order, with grids.
      annotations: which instructions these are.
      hlo: the scheduled instructions.
      buffers: the assignment of values to memory.
    """

    compiled: jax.stages.Compiled
    ptx: tuple[str, ...]
    mosaic: dict[str, MosaicKernel]
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
            # Else the text of a constant of more than ten elements is left out.
            "xla_dump_large_constants": True,
        }
        compiled = compile_lowered(lowered, options)
        mosaic = kernels_of(compiled.as_text() or "")
        files = sorted(pathlib.Path(folder).iterdir())

        def texts(ending: str) -> tuple[str, ...]:
            found = (f.read_text() for f in files if f.name.endswith(ending))
            return tuple(filter(None, found))

        def text(ending: str) -> str:
            return "\n".join(texts(ending + ".txt"))

        dump = Dump(
            compiled=compiled,
            ptx=texts(".ptx"),
            mosaic=mosaic,
            thunks=text("thunk_sequence"),
            annotations=text("thunk_metadata"),
            hlo=text("after_optimizations"),
            buffers=text("after_optimizations-buffer-assignment"),
        )
    if not dump.ptx and not dump.mosaic:
        raise RuntimeError("XLA wrote no PTX: was the program in a compilation cache?")
    return dump
