"""Optimizer steps compiled for TPUs without a TPU, as tables.

    .venv/bin/python -m benchmarks tpu_program

The steps are donated and have bfloat16 gradients. The first table describes steps on
four leaves of 4096 x 4096. It lists the bytes per parameter of operands and results of
all instructions, with the padding of layouts; temporary memory; bytes written by
``copy`` operations; and the number of Pallas kernels. The second table lists the share
of the parameters of whole models whose leaf has a kernel with ``lowbit_adamw`` on a
v6e. Nothing was run on a TPU. Needs the ``tpu-program`` extra.
"""

import argparse
import collections
import math
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import optax

import lowbit_optax as lo
from benchmarks import leaf_sets, records
from tools.gpu_program.steps import fast, leaf, replaced, with_master
from tools.tpu_program.steps import TpuStep, lower_lpmm_step, lower_step
from tools.tpu_program.targets import TARGETS, tpu_mesh

NEEDS = ("libtpu",)

BASELINE, LPMM = "optax, float32 master", "lpmm_adam, 12 bits"
ALIASES = {
    BASELINE: (None, {}),
    "lowbit_adamw": (lo.lowbit_adamw, {}),
    "extra_bits_adamw(8)": (lo.extra_bits_adamw, {"bits": 8}),
    "kahan_adamw": (lo.kahan_adamw, {}),
    "sr_adamw": (lo.sr_adamw, {}),
    "factored_adamw": (lo.factored_adamw, {}),
    LPMM: (lo.lpmm_adam, {}),
}
MODELS = leaf_sets.gpt2(), leaf_sets.resnet50(), leaf_sets.llama_7b()


def step_of(name: str, like, target: str, implementation: str | None = None) -> TpuStep:
    """Lower a step on leaves with the shapes of ``like``."""
    (alias, options), make_step = ALIASES[name], fast
    if alias is None:
        tx, make_step = with_master(optax.adamw(1e-3)), replaced
    else:
        tx = alias(1e-3, implementation=implementation, **options)
    lower = lower_lpmm_step if name == LPMM else lower_step
    mesh = tpu_mesh(TARGETS[target].topology)
    return lower(tx, like, make_step=make_step, mesh=mesh)


def row(name: str, target: str, implementation: str | None) -> dict:
    """Return one line of the first table."""
    step = step_of(name, [leaf(4096, 4096)] * 4, target, implementation)
    return {
        "step": name,
        "target": target,
        "moved": round(step.moved, 2),
        "temporary": round(step.temporary, 3),
        "copied": round(step.copied, 3),
        "by Pallas": step.fused_launches,
        "in place": step.in_place,
    }


def share(model: leaf_sets.LeafSet) -> dict[str, str]:
    """Return one line of the second table."""
    size = sum(
        count * math.prod(shape)
        for shape, count in collections.Counter(model.shapes).items()
        if step_of("lowbit_adamw", leaf(*shape), "v6e").fused_launches
    )
    return {"model": model.name, "by kernels": f"{size / model.parameters:.2%}"}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--implementation", help="of the steps; default: their own")
    flags = parser.parse_args(argv)
    records.print_rows(
        row(x, y, flags.implementation) for y in TARGETS for x in ALIASES
    )
    records.print_rows(map(share, MODELS))
