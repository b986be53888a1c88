"""Leaves of whole models that have kernels on TPUs; no TPU is needed.

    .venv/bin/python -m benchmarks tpu_layouts

For each shape of a model's leaves, one donated step with bfloat16 parameters and
gradients is compiled for a v6e, or for 8 or 256 of them on an explicit axis. The table
lists the share of the parameters whose leaf has a kernel. It also lists bytes moved,
bytes written by ``copy`` operations, and temporary memory, per parameter of the whole
model, as means over the steps of the leaves. The last column is the shape that moves
most bytes per parameter, among shapes with at least 1% of the parameters. Nothing was
run on a TPU. Needs the ``tpu-program`` extra.
"""

import argparse
import collections
import functools
import math
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jax.sharding import AxisType

from benchmarks import records
from benchmarks.programs.placed_models import MODELS, Place
from benchmarks.programs.tpu_program import QUANTISED, STEPS
from tools.gpu_program.steps import leaf
from tools.tpu_program.steps import TpuStep
from tools.tpu_program.targets import tpu_mesh

MINUTES = 3
NEEDS = ("libtpu",)

TOPOLOGIES = {1: "v6e:2x2", 8: "v6e:2x4", 256: "v6e:16x16"}
LARGE = 0.01
"""The minimum share of the parameters that have a large shape."""


@functools.cache
def compiled(name: str, place: Place) -> TpuStep:
    """Compile a leaf's step on its devices."""
    axis = AxisType.Auto if place.devices == 1 else AxisType.Explicit
    mesh = tpu_mesh(TOPOLOGIES[place.devices], (place.devices,), axis=axis)
    spec = None if place.spec is None else lambda _: place.spec
    return STEPS[name](leaf(*place.shape), mesh=mesh, spec=spec)


def row(name: str, model: str) -> dict:
    """Return the facts of a model's step."""
    leaves, place = MODELS[model]
    counts = collections.Counter(leaves.shapes)
    shares = {
        shape: count * math.prod(shape) / leaves.parameters
        for shape, count in counts.items()
    }
    steps = {shape: compiled(name, place(shape)) for shape in counts}
    mean = lambda facts: sum(shares[shape] * facts(steps[shape]) for shape in counts)
    large = [shape for shape in counts if shares[shape] >= LARGE]
    worst = max(large, key=lambda shape: steps[shape].moved)
    return {
        "step": name,
        "model": model,
        "by kernels": f"{mean(lambda step: step.fused_launches > 0):.2%}",
        "moved": round(mean(lambda step: step.moved), 2),
        "copied": round(mean(lambda step: step.copied), 3),
        "temporary": round(mean(lambda step: step.temporary), 3),
        "most moved": f"{steps[worst].moved:.2f} of {worst}",
    }


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    names = [name for name in STEPS if name not in QUANTISED]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", nargs="+", choices=names, default=names)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    flags = parser.parse_args(argv)
    records.print_rows(row(name, x) for name in flags.steps for x in flags.models)
