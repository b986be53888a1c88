"""What an optimizer step compiles to for an H200 or B200, as a table, without a GPU.

    .venv/bin/python -m benchmarks gpu_program --gpu H200

One donated step with bfloat16 gradients: bytes that its kernels read and write, its
temporary memory, machine instructions and registers of the fused kernel (from XLA's PTX
by ptxas), kernels launched for GPT-2 124M, and seconds to lower and compile. These are
facts of the compiled program; nothing is timed on hardware. Needs the ``gpu-program``
extra.
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

LEAF = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)


CASES = {
    "optax, float32 master": (with_master(optax.adamw(1e-3)), replaced, None),
    "`extra_bits_adamw(bits=16)`": (lo.extra_bits_adamw(1e-3), fast, applied),
    "`extra_bits_adamw(bits=8)`": (lo.extra_bits_adamw(1e-3, bits=8), fast, applied),
    "`extra_bits_adamw(bits=8)` by XLA": (
        lo.extra_bits_adamw(1e-3, bits=8, implementation="xla"),
        fast,
        applied,
    ),
    "`kahan_adamw`": (lo.kahan_adamw(1e-3), fast, applied),
    "`kahan_adamw` by XLA": (
        lo.kahan_adamw(1e-3, implementation="xla"),
        fast,
        applied,
    ),
    "`sr_adamw`": (lo.sr_adamw(1e-3), fast, applied),
    "`lowbit_adamw`": (lo.lowbit_adamw(1e-3), fast, applied),
    "`lpmm_adam`, 12 bits": (lo.lpmm_adam(1e-3), fast, applied),
}
MORE = {
    "`extra_bits_adamw(bits=5)`": (lo.extra_bits_adamw(1e-3, bits=5), fast, applied),
    "`lowbit`, moments of 4 bits": (
        lo.lowbit(optax.adamw(1e-3), moments=lo.block_quantized(4)),
        fast,
        applied,
    ),
    '`lowbit_adamw(moments="low")`': (
        lo.lowbit_adamw(1e-3, moments="low"),
        fast,
        applied,
    ),
    '`sr_adamw(error_into="mu")`': (
        lo.sr_adamw(1e-3, error_into="mu"),
        fast,
        applied,
    ),
    "the same, moments of 8 bits": (
        lo.sr_adamw(1e-3, error_into="mu", moments=lo.block_quantized(8)),
        fast,
        applied,
    ),
    "`lpmm_sgd`, 12 bits": (lo.lpmm_sgd(1e-3, momentum=0.9), fast, applied),
}
NOT_ELEMENTWISE = {
    "`adafactor`": optax.adafactor(1e-3),
    "`muon`": optax.contrib.muon(1e-3),
    "`sm3`": optax.sm3(1e-3),
}
"""Transformations whose kernels read what XLA computes."""

for _name, _inner in NOT_ELEMENTWISE.items():
    MORE[f"optax, {_name}, float32 master"] = (with_master(_inner), replaced, None)
    MORE[f"`lowbit`, {_name}"] = (lo.lowbit(_inner), fast, applied)

QUANTISED = {"`lpmm_adam`, 12 bits", "`lpmm_sgd`, 12 bits"}


def row(name, tx, step, update, model, mesh) -> list[str]:
    """One line of the table."""
    lower = lower_lpmm_step if name in QUANTISED else lower_step
    lower = functools.partial(lower, mesh=mesh)
    start = time.perf_counter()
    one = lower(tx, LEAF, make_step=step)
    one.compiled.memory_analysis()
    seconds = time.perf_counter() - start
    fused = [k for n, k in one.machine_code.items() if n.startswith("fused_update")]
    cells = [f"{one.stored / one.parameters:.2f}", f"{one.moved:.1f}"]
    if update is None:
        cells.append("")
    else:
        cells.append(f"{lower(tx, LEAF, make_step=update).moved:.1f}")
    cells.append(f"{one.temporary:.1f}")
    if fused:
        instructions = instructions_per_parameter(fused[0], one.parameters)
        spills = fused[0].spill_stores + fused[0].spill_loads
        cells += [f"{instructions:.1f}", str(fused[0].registers), str(spills)]
    else:
        cells += ["", "", ""]
    cells.append(f"{seconds:.1f}")
    if model is not None:
        whole = lower(tx, model, make_step=step)
        cells += [
            str(len(whole.launches)),
            f"{whole.moved:.1f}",
            f"{whole.temporary:.1f}",
        ]
    return [name, *cells]


HEADS = [
    "AdamW step",
    "params + state, B",
    "moved by `step`, B",
    "by `update` + apply, B",
    "temporary, B",
    "instructions",
    "registers",
    "spills, B",
    "s to compile",
    "GPT-2: kernels",
    "moved, B",
    "temporary, B",
]


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--no-model", action="store_true", help="one leaf, and more steps"
    )
    parser.add_argument("--gpu", choices=TARGETS, default="H200")
    parser.add_argument("--launcher", choices=["triton", "mosaic"])
    flags = parser.parse_args(argv)
    platforms.DEFAULT_LAUNCHER = flags.launcher or platforms.DEFAULT_LAUNCHER
    mesh = gpu_mesh(target=TARGETS[flags.gpu])
    model = None if flags.no_model else gpt2()
    if model is not None:
        print(f"GPT-2: {bytes_of(model) // 2:,} parameters")
    heads = HEADS[: 9 if flags.no_model else None]
    print("| " + " | ".join(heads) + " |")
    print("|" + "---|" * len(heads))
    cases = CASES | MORE if flags.no_model else CASES
    for name, (tx, step, update) in cases.items():
        cells = row(name, tx, step, update, model, mesh)
        print("| " + " | ".join(cells) + " |", flush=True)
