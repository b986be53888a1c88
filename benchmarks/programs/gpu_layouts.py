"""Steps of many leaves and shards, compiled for H200s without a GPU.

    .venv/bin/python -m benchmarks gpu_layouts

The first tables describe one donated step of ``lowbit_adamw`` and of
``extra_bits_adamw(bits=8)`` on single leaves with bfloat16 parameters and gradients, on
1, 8 and 256 devices. They list collectives, bytes moved and temporary memory per
parameter, machine instructions, registers, and the share of the moved bytes that are in
accesses of 64 or 128 bits. The share exceeds 100% if threads without an element also
count. The last table lists, for whole models, the share of the parameters in leaves
where at least 95% of the bytes are in such accesses. Nothing is run. The benchmark
takes eight minutes on one core, and needs the ``gpu-program`` extra.
"""

import argparse
import functools
import math
from collections.abc import Sequence

from jax.sharding import PartitionSpec as P

import lowbit_optax
from benchmarks import records
from benchmarks.programs.placed_models import COLUMNS, MODELS, ROWS, Place
from tools.gpu_program.machine_code import instructions_per_parameter
from tools.gpu_program.steps import bytes_of_accesses, leaf, lower_step
from tools.gpu_program.targets import gpu_mesh
from tools.hlo import COLLECTIVES

MINUTES = 8
NEEDS = ("jax_plugins.xla_cuda12",)

OPTIMIZERS = {
    "lowbit_adamw": lowbit_optax.lowbit_adamw(1e-3),
    "extra_bits_adamw(bits=8)": lowbit_optax.extra_bits_adamw(1e-3, bits=8),
}
WIDE = 0.95
"""The share of a wide leaf's bytes that are in accesses of 64 or 128 bits."""
SMALLEST = 4096
"""The minimum number of elements of a packed leaf."""

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


@functools.cache
def measured(name: str, place: Place) -> dict[str, float | str]:
    """Return facts about the compiled step of a leaf, per parameter of a device."""
    mesh = gpu_mesh(place.devices)
    step = lower_step(OPTIMIZERS[name], leaf(*place.shape), mesh=mesh, spec=place.spec)
    own = step.parameters / place.devices
    text = step.compiled.as_text()
    kernel = step.fused
    moved = step.moved * place.devices
    wide = sum(bytes_of_accesses(kernel, bits) for bits in (64, 128)) / own
    return {
        "collectives": ", ".join(x for x in COLLECTIVES if x in text) or "none",
        "moved, B": moved,
        "temporary, B": step.temporary * place.devices,
        "instructions": instructions_per_parameter(kernel, own),
        "registers": kernel.registers,
        "64 and 128 bits": wide / moved,
    }


def wide_share(name: str, shapes: Sequence[tuple[int, ...]], place) -> float:
    """Return the share of packed parameters that are in leaves with wide accesses."""
    large = [shape for shape in shapes if math.prod(shape) >= SMALLEST]
    wide = [s for s in large if measured(name, place(s))["64 and 128 bits"] >= WIDE]
    return sum(map(math.prod, wide)) / sum(map(math.prod, large))


def row(name: str, place: Place) -> dict[str, str]:
    facts = measured(name, place)
    devices = f"{place.devices} {place.spec or ''}".strip()
    cells = {k: x if isinstance(x, str) else f"{x:.4g}" for k, x in facts.items()}
    return {name: str(place.shape), "devices": devices, **cells}


def main(argv: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-models", action="store_true", help="only single leaves")
    flags = parser.parse_args(argv)
    for name in OPTIMIZERS:
        records.print_rows(row(name, place) for place in LEAVES)
        print()
    if flags.no_models:
        return
    records.print_rows(
        {"model": model}
        | {name: f"{wide_share(name, leaves.shapes, place):.1%}" for name in OPTIMIZERS}
        for model, (leaves, place) in MODELS.items()
    )
