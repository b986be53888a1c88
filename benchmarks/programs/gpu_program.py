"""An optimizer step compiled for an H200 or B200 without a GPU, as a table.

    .venv/bin/python -m benchmarks gpu_program --gpu H200

The step is donated and has bfloat16 gradients. The table lists bytes that its kernels
read and write, temporary memory, machine instructions and registers of the fused kernel
(from XLA's PTX, assembled by ptxas), kernels launched for GPT-2 124M, and seconds to
lower and compile. Nothing is run. Needs the ``gpu-program`` extra.
"""

import argparse
import functools
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax

import lowbit_optax as lo
from benchmarks import records
from pallas_kernels import platforms
from tools.gpu_program.machine_code import instructions_per_parameter
from tools.gpu_program.steps import (
    applied,
    bytes_of,
    fast,
    gpt2,
    lower_lpmm_step,
    lower_step,
    replaced,
    with_master,
)
from tools.gpu_program.targets import TARGETS, gpu_mesh

MINUTES = 6
NEEDS = ("jax_plugins.xla_cuda12",)

LEAF = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)


CASES = {
    "`extra_bits_adamw(bits=16)`": lo.extra_bits_adamw(1e-3),
    "`extra_bits_adamw(bits=8)`": lo.extra_bits_adamw(1e-3, bits=8),
    "`extra_bits_adamw(bits=8)` by XLA": lo.extra_bits_adamw(
        1e-3, bits=8, implementation="xla"
    ),
    "`kahan_adamw`": lo.kahan_adamw(1e-3),
    "`kahan_adamw` by XLA": lo.kahan_adamw(1e-3, implementation="xla"),
    "`sr_adamw`": lo.sr_adamw(1e-3),
    "`lowbit_adamw`": lo.lowbit_adamw(1e-3),
    "`lpmm_adam`, 12 bits": lo.lpmm_adam(1e-3),
}
MORE = {
    "`extra_bits_adamw(bits=5)`": lo.extra_bits_adamw(1e-3, bits=5),
    "`lowbit`, moments of 4 bits": lo.lowbit(
        optax.adamw(1e-3), moments=lo.block_quantized(4)
    ),
    '`sr_adamw(error_feedback="mu")`': lo.sr_adamw(1e-3, error_feedback="mu"),
    "the same, moments of 8 bits": lo.sr_adamw(
        1e-3, error_feedback="mu", moments=lo.block_quantized(8)
    ),
    "`factored_adamw`": lo.factored_adamw(1e-3),
    "`factored_adamw(bits=0)`": lo.factored_adamw(1e-3, bits=0),
    "`lpmm_sgd`, 12 bits": lo.lpmm_sgd(1e-3, momentum=0.9),
}
for _name, _inner in {
    "`adafactor`": optax.adafactor(1e-3),
    "`adafactor`, momentum": optax.adafactor(1e-3, momentum=0.9),
    "`galore`": optax.contrib.galore(1e-3),
}.items():
    # Kernels read updates that XLA computes.
    MORE[f"`lowbit`, {_name}"] = lo.lowbit(_inner)

BASELINE = "optax, float32 master"
QUANTISED = {"`lpmm_adam`, 12 bits", "`lpmm_sgd`, 12 bits"}


def row(name, model, mesh) -> dict[str, str]:
    """Return one line of the table."""
    is_ours = name != BASELINE
    tx = (CASES | MORE)[name] if is_ours else with_master(optax.adamw(1e-3))
    step = fast if is_ours else replaced
    lower = lower_lpmm_step if name in QUANTISED else lower_step
    lower = functools.partial(lower, mesh=mesh)
    start = time.perf_counter()
    one = lower(tx, LEAF, make_step=step)
    one.compiled.memory_analysis()
    seconds = time.perf_counter() - start
    cells = dict.fromkeys(HEADS, "") | {
        "AdamW step": name,
        "params + state, B": f"{one.stored / one.parameters:.2f}",
        "moved by `step`, B": f"{one.moved:.1f}",
        "temporary, B": f"{one.temporary:.1f}",
        "s to compile": f"{seconds:.1f}",
    }
    if is_ours:
        moved = lower(tx, LEAF, make_step=applied).moved
        cells["by `update` + apply, B"] = f"{moved:.1f}"
    fused = [k for n, k in one.machine_code.items() if n.startswith("fused_update")]
    if fused:
        instructions = instructions_per_parameter(fused[0], one.parameters)
        cells["instructions"] = f"{instructions:.1f}"
        cells["registers"] = str(fused[0].registers)
        cells["spills, B"] = str(fused[0].spill_stores + fused[0].spill_loads)
    if model is not None:
        whole = lower(tx, model, make_step=step)
        cells |= {
            "GPT-2: kernels": str(len(whole.launches)),
            "its moved, B": f"{whole.moved:.1f}",
            "its temporary, B": f"{whole.temporary:.1f}",
        }
    return cells


HEADS = (
    *("AdamW step", "params + state, B", "moved by `step`, B"),
    *("by `update` + apply, B", "temporary, B", "instructions", "registers"),
    *("spills, B", "s to compile"),
)


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--no-model", action="store_true", help="more steps, on one leaf only"
    )
    parser.add_argument("--gpu", choices=TARGETS, default="H200")
    parser.add_argument("--launcher", choices=["triton", "mosaic"])
    flags = parser.parse_args(argv)
    platforms.DEFAULT_LAUNCHER = flags.launcher or platforms.DEFAULT_LAUNCHER
    mesh = gpu_mesh(target=TARGETS[flags.gpu])
    model = None if flags.no_model else gpt2()
    if model is not None:
        print(f"GPT-2: {bytes_of(model) // 2:,} parameters")
    names = [BASELINE, *CASES, *(MORE if flags.no_model else ())]
    records.print_rows(row(name, model, mesh) for name in names)
