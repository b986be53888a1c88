"""Memory of steps compiled for a TPU v5e, with the state of layers in host memory.

    .venv/bin/python -m benchmarks host_memory

The model has 12 layers tanh(h @ w) of 4096 x 4096 in bfloat16 and a batch of 512. Each
layer is recomputed for its gradient. Parameters and state are donated. *Moved whole*
means that the step without release copies the whole state to the device and back.
Nothing is run. Needs the ``tpu-program`` extra.
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")


import lowbit_optax
from benchmarks import records
from benchmarks.programs import release_memory
from lowbit_optax import release
from tools.gpu_program.release_steps import MIB, matrices, plain
from tools.tpu_program.release_steps import compile_step, moved_whole, streamed

MINUTES = 6
NEEDS = ("libtpu",)

OPTIMIZERS = release_memory.OPTIMIZERS | {
    "`lowbit_adamw`, kernels": lowbit_optax.lowbit_adamw(1e-3, implementation="pallas")
}
MODES = {
    "without release": plain,
    "without, moved whole": moved_whole,
    "release": release.value_and_update,
    "release, in host memory": streamed,
}


def row(name: str, mode: str) -> dict[str, str]:
    """Return the memory of a step, in MiB."""
    step = compile_step(MODES[mode], matrices(), OPTIMIZERS[name])
    sizes = {"arguments": step.arguments, "temporary": step.temporary}
    sizes |= {"device": step.arguments + step.temporary, "host": step.host}
    cells = {key: f"{size / MIB:,.0f}" for key, size in sizes.items()}
    return {"AdamW step, MiB": name, "": mode, **cells}


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--steps", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS)
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    flags = parser.parse_args(argv)
    records.print_rows(row(x, mode) for x in flags.steps for mode in flags.modes)
