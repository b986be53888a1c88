"""Steps of many leaves and shards, compiled for H200s without a GPU.

    .venv/bin/python -m benchmarks gpu_layouts

The table describes a donated step of ``lowbit_adamw`` on single leaves with bfloat16
parameters and gradients, on 1, 8 and 256 devices. It lists collectives, bytes moved and
temporary memory per parameter, machine instructions, and registers. Nothing is run. The
benchmark needs the ``gpu-program`` extra.
"""

import argparse

from jax.sharding import PartitionSpec as P

import lowbit_optax
from benchmarks import records
from benchmarks.programs.placed_models import COLUMNS, ROWS, Place
from tools.gpu_program.machine_code import instructions_per_parameter
from tools.gpu_program.steps import leaf, lower_step
from tools.gpu_program.targets import gpu_mesh
from tools.hlo import COLLECTIVES

MINUTES = 3
NEEDS = ("jax_plugins.xla_cuda12",)

LOWBIT_ADAMW = lowbit_optax.lowbit_adamw(1e-3)
MIDDLE = P(None, "d", None)

LEAVES = (
    Place((4096, 4096)),
    Place((50257, 768)),
    Place((768, 768)),
    Place((2048, 1000)),
    Place((768, 12, 64)),
    Place((7, 7, 3, 64)),
    Place((3, 3, 512, 512)),
    Place((65536,)),
    Place((4001, 1001)),
    Place((50304, 768), 8, ROWS),
    Place((151936, 896), 8, ROWS),
    Place((4096, 32, 128), 8, MIDDLE),
    Place((4096, 4096), 8, COLUMNS),
    Place((4096, 4096), 256, ROWS),
    Place((4096, 4096), 256, COLUMNS),
)


def row(place: Place) -> dict[str, str]:
    """Return facts about the compiled step of a leaf, per parameter of a device."""
    mesh = gpu_mesh(place.devices)
    step = lower_step(LOWBIT_ADAMW, leaf(*place.shape), mesh=mesh, spec=place.spec)
    text, kernel = step.compiled.as_text(), step.fused
    instructions = instructions_per_parameter(kernel, step.parameters / place.devices)
    return {
        "leaf": str(place.shape),
        "devices": f"{place.devices} {place.spec or ''}".strip(),
        "collectives": ", ".join(x for x in COLLECTIVES if x in text) or "none",
        "moved, B": f"{step.moved * place.devices:.4g}",
        "temporary, B": f"{step.temporary * place.devices:.4g}",
        "instructions": f"{instructions:.4g}",
        "registers": str(kernel.registers),
    }


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(argv)
    records.print_rows(map(row, LEAVES))
