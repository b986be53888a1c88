"""Memory of steps compiled for a TPU v5e, with the state of layers in host memory.

    .venv/bin/python -m benchmarks host_memory

The model has 12 layers tanh(h @ w) of 4096 x 4096 in bfloat16 and a batch of 512. Each
layer is recomputed for its gradient. Parameters and state are donated. Nothing is run.
Needs the ``tpu-program`` extra.
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import lowbit_optax
from benchmarks import records
from lowbit_optax import release
from tools.gpu_program.release_steps import MIB, matrices
from tools.tpu_program.release_steps import compile_step, streamed

NEEDS = ("libtpu",)

MODES = {"on the device": release.value_and_update, "in host memory": streamed}


def row(mode: str) -> dict[str, str]:
    """Return the memory of a released step of ``lowbit_adamw``, in MiB."""
    step = compile_step(MODES[mode], matrices(), lowbit_optax.lowbit_adamw(1e-3))
    sizes = {"device": step.arguments + step.temporary, "host": step.host}
    cells = {key: f"{size / MIB:,.0f}" for key, size in sizes.items()}
    return {"state, MiB": mode, **cells}


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(argv)
    records.print_rows(map(row, MODES))
