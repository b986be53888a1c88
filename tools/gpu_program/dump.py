"""Compile a program, and collect the texts that XLA and Mosaic dump."""

import dataclasses
import pathlib
import tempfile

import jax

from tools.gpu_program.mosaic import MosaicKernel, kernels_of
from tools.gpu_program.targets import compile_lowered


@dataclasses.dataclass(frozen=True)
class Dump:
    """A compiled program, and XLA's descriptions of it.

    Args:
      compiled: the program.
      ptx: the PTX of its kernels, except for Mosaic's.
      mosaic: Mosaic's kernels, keyed by the name of the instruction that launches them.
      thunks: the launches and copies of the program in order, with their grids.
      annotations: the instructions to which the thunks belong.
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
      lowered: the program, from ``targets.lower_for``.

    Raises:
      RuntimeError: if XLA wrote no PTX.
    """
    with tempfile.TemporaryDirectory() as folder:
        # JAX 0.12 only writes PTX with the second option.
        options: dict[str, str | bool] = {
            "xla_dump_to": folder,
            "xla_dump_emitter_re": "ptx",
            # Without this option, XLA omits constants of more than ten elements.
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
