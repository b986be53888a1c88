"""Scheduled cycles and vector operations of the TPU kernels, without a TPU.

    .venv/bin/python -m benchmarks tpu_cycles

The program is a step on one leaf of 4096 x 4096. Cycles are bundles of the compiler's
static schedule per 1,024 parameters, including bundles outside of the loop. The table
compares them with the cycles in which memory moves the bytes. For a step without
kernels, only the memory's cycles are known. Nothing was run on a TPU. Needs the
``tpu-program`` extra.
"""

import argparse
import pathlib
from unittest import mock

import jax

from benchmarks import records
from benchmarks.programs.tpu_program import MODELS, STEPS
from pallas_kernels.bitfields import period
from pallas_kernels.fused_update import Leaf
from pallas_kernels.fused_update.tpu import kernel as tpu
from pallas_kernels.fused_update.tpu.tiling import SUBLANES, Tiling
from tools.tpu_program.schedule import loops_of, parts_of, request_schedules
from tools.tpu_program.targets import TARGETS, tpu_mesh

MINUTES = 1
NEEDS = ("libtpu",)

CLOCKS = {"v5e": 1.5e9, "v6e": 1.75e9}
"""Cycles per second, to convert the memory's bandwidth to bytes per cycle."""
REGISTER = 1024
"""The number of elements of a vector register."""
COLUMNS = ("step", "target", "cycles", "memory's", "ratio", "of the loop")
COLUMNS += ("vector operations", "loads", "stores")


def row(name: str, target: str, folder: pathlib.Path) -> tuple[dict, dict]:
    """Return a kernel's facts, and its operations by name, per 1,024 parameters."""
    shards, tilings, tiling_of = [], [], tpu.tiling_of

    def noted(shard):
        shards.append(shard)
        tilings.append(tiling_of(shard))
        return tilings[-1]

    mesh = tpu_mesh(TARGETS[target].topology)
    with mock.patch.object(tpu, "tiling_of", noted):
        step = STEPS[name](MODELS["4096"], mesh=mesh)
    per_register = step.of_memory * REGISTER  # compiles it
    memory = per_register * CLOCKS[target] / TARGETS[target].bandwidth
    facts = dict.fromkeys(COLUMNS, "") | {
        "step": name,
        "target": target,
        "memory's": round(memory, 1),
    }
    if not step.fused_launches:
        return facts, {}
    outside, loops, tiling = parts_of(folder)[1], loops_of(folder), tilings[-1]
    block = tiling.block_rows * 128 / REGISTER
    turns = _turns(shards[-1].leaf, tiling)
    parts = [(1.0, outside), *zip(turns, loops, strict=True)]
    per = lambda x: sum(count * part.units[x] for count, part in parts) / block
    cycles = sum(count * part.bundles for count, part in parts) / block
    largest = max(parts[1:], key=lambda part: part[0] * part[1].bundles)
    facts |= {
        "cycles": round(cycles, 1),
        "ratio": round(cycles / memory, 2),
        "of the loop": round(largest[0] * largest[1].bundles / block, 1),
        "vector operations": round(per("VALU"), 1),
        "loads": round(per("VLOAD"), 1),
        "stores": round(per("VSTORE"), 1),
    }
    in_loop = largest[1].operations.most_common()
    return facts, {x: round(largest[0] * n / block, 2) for x, n in in_loop}


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
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--targets", nargs="+", choices=CLOCKS, default=list(CLOCKS))
    parser.add_argument("--operations", action="store_true", help="list operations")
    flags = parser.parse_args(argv)
    folder = request_schedules()
    print("jax", jax.__version__)
    found = [
        row(name, target, folder) for target in flags.targets for name in flags.steps
    ]
    records.print_rows(facts for facts, _ in found)
    if flags.operations:
        for facts, operations in found:
            print(facts["step"], facts["target"], operations)
