"""Scheduled cycles of the TPU kernels, without a TPU.

    .venv/bin/python -m benchmarks tpu_cycles

The program is a step on one leaf of 4096 x 4096. Cycles are bundles of the compiler's
static schedule per 1,024 parameters, including bundles outside of the loop. The table
compares them with the cycles in which memory moves the bytes. Nothing was run on a TPU.
Needs the ``tpu-program`` extra.
"""

import argparse
import pathlib
from unittest import mock

from benchmarks import records
from benchmarks.programs.tpu_program import ALIASES, BASELINE, step_of
from pallas_kernels.bitfields import period
from pallas_kernels.fused_update import Leaf
from pallas_kernels.fused_update.tpu import kernel as tpu
from pallas_kernels.fused_update.tpu.tiling import SUBLANES, Tiling
from tools.gpu_program.steps import leaf
from tools.tpu_program.schedule import loops_of, parts_of, request_schedules
from tools.tpu_program.targets import TARGETS

NEEDS = ("libtpu",)

CLOCKS = {"v5e": 1.5e9, "v6e": 1.75e9}
"""Cycles per second, to convert the memory's bandwidth to bytes per cycle."""
REGISTER = 1024
"""The number of elements of a vector register."""
STEPS = [name for name in ALIASES if name != BASELINE]


def row(name: str, target: str, folder: pathlib.Path) -> dict:
    """Return a kernel's facts per 1,024 parameters."""
    found, tiling_of = [], tpu.tiling_of

    def noted(shard):
        found.append((shard.leaf, tiling_of(shard)))
        return found[-1][1]

    with mock.patch.object(tpu, "tiling_of", noted):
        step = step_of(name, leaf(4096, 4096), target)
    per_register = step.of_memory * REGISTER  # compiles it
    memory = per_register * CLOCKS[target] / TARGETS[target].bandwidth
    of_leaf, tiling = found[-1]
    parts = zip(_turns(of_leaf, tiling), loops_of(folder), strict=True)
    bundles = sum(turns * loop.bundles for turns, loop in parts)
    bundles += parts_of(folder)[1].bundles
    cycles = bundles * REGISTER / (tiling.block_rows * 128)
    facts = {"cycles": cycles, "memory's": memory}
    return {"step": name, "target": target} | {n: round(x, 1) for n, x in facts.items()}


def _turns(leaf: Leaf, tiling: Tiling) -> list[float]:
    """Return how often each loop of a program runs: unpacking, updating, packing."""
    unpacked, packed = (
        [
            tiling.block_rows / (SUBLANES * period(x.bits)[0])
            for x in arrays
            if x.bits is not None and tiling.group % period(x.bits)[0]
        ]
        for arrays in (leaf.operands, leaf.results)
    )
    return [*unpacked, tiling.units / tiling.unroll, *packed]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    flags = parser.parse_args(argv)
    folder = request_schedules()
    records.print_rows(row(x, y, folder) for y in CLOCKS for x in flags.steps)
