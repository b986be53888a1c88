"""Optimizer steps compiled for an H200 or B200 without a GPU, as tables.

    .venv/bin/python -m benchmarks gpu_program --gpu H200

The steps are donated and have bfloat16 gradients. The first table lists, for a leaf of
4096 x 4096, the bytes per parameter that the kernels of a step read and write,
temporary memory, and machine instructions and registers of the fused kernel (from XLA's
PTX, assembled by ptxas). The second table describes steps of ``lowbit_adamw`` on single
leaves, on 1, 8 and 256 devices. Nothing is run. Needs the ``gpu-program`` extra.
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import optax
from jax.sharding import PartitionSpec as P

import lowbit_optax as lo
from benchmarks import records
from pallas_kernels import platforms
from tools.gpu_program.machine_code import instructions_per_parameter
from tools.gpu_program.steps import (
    applied,
    fast,
    leaf,
    lower_lpmm_step,
    lower_step,
    replaced,
    with_master,
)
from tools.gpu_program.targets import TARGETS, gpu_mesh
from tools.hlo import COLLECTIVES

NEEDS = ("jax_plugins.xla_cuda12",)

BASELINE, LPMM = "optax, float32 master", "`lpmm_adam`, 12 bits"
CASES = {
    BASELINE: with_master(optax.adamw(1e-3)),
    "`extra_bits_adamw(bits=16)`": lo.extra_bits_adamw(1e-3),
    "`kahan_adamw`": lo.kahan_adamw(1e-3),
    "`sr_adamw`": lo.sr_adamw(1e-3),
    "`lowbit_adamw`": lo.lowbit_adamw(1e-3),
    LPMM: lo.lpmm_adam(1e-3),
    "`factored_adamw`": lo.factored_adamw(1e-3),
    "`factored_adamw(bits=0)`": lo.factored_adamw(1e-3, bits=0),
    "`lowbit`, `adafactor`": lo.lowbit(optax.adafactor(1e-3)),
    "`lowbit`, `adafactor`, momentum": lo.lowbit(optax.adafactor(1e-3, momentum=0.9)),
    "`lowbit`, `galore`": lo.lowbit(optax.contrib.galore(1e-3)),
}
LEAVES = (
    *(((50257, 768), 1, None), ((7, 7, 3, 64), 1, None), ((65536,), 1, None)),
    ((50304, 768), 8, P("d")),
    ((4096, 32, 128), 8, P(None, "d", None)),
    ((4096, 4096), 8, P(None, "d")),
    ((4096, 4096), 256, P("d")),
    ((4096, 4096), 256, P(None, "d")),
)
"""Shapes, numbers of devices and shardings of the leaves of the second table."""


def row(name: str, target) -> dict[str, str]:
    """Return one line of the first table."""
    lower = lower_lpmm_step if name == LPMM else lower_step
    compiled = lambda make_step: lower(
        CASES[name], leaf(4096, 4096), make_step=make_step, mesh=gpu_mesh(target=target)
    )
    one = compiled(replaced if name == BASELINE else fast)
    kernels = [k for n, k in one.machine_code.items() if n.startswith("fused_update")]
    instructions = [instructions_per_parameter(k, one.parameters) for k in kernels]
    moved = "" if name == BASELINE else f"{compiled(applied).moved:.1f}"
    return {
        "AdamW step": name,
        "params + state, B": f"{one.stored / one.parameters:.2f}",
        "moved by `step`, B": f"{one.moved:.1f}",
        "by `update` + apply, B": moved,
        "temporary, B": f"{one.temporary:.1f}",
        "instructions": f"{instructions[0]:.1f}" if kernels else "",
        "registers": str(kernels[0].registers) if kernels else "",
    }


def placed(shape: tuple[int, ...], devices: int, spec: P | None, target) -> dict:
    """Return one line of the second table, per parameter of a device."""
    mesh = gpu_mesh(devices, target=target)
    step = lower_step(CASES["`lowbit_adamw`"], leaf(*shape), mesh=mesh, spec=spec)
    text = step.compiled.as_text()
    return {
        "leaf": str(shape),
        "devices": f"{devices} {spec or ''}".strip(),
        "collectives": ", ".join(x for x in COLLECTIVES if x in text) or "none",
        "kernels": step.fused_launches,
        "moved, B": f"{step.moved * devices:.4g}",
        "temporary, B": f"{step.temporary * devices:.4g}",
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", choices=TARGETS, default="H200")
    parser.add_argument("--launcher", choices=["triton", "mosaic"])
    flags = parser.parse_args(argv)
    platforms.DEFAULT_LAUNCHER = flags.launcher or platforms.DEFAULT_LAUNCHER
    records.print_rows(row(name, TARGETS[flags.gpu]) for name in CASES)
    records.print_rows(placed(*each, TARGETS[flags.gpu]) for each in LEAVES)
