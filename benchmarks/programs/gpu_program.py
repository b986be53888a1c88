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
import time

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
)
from tools.gpu_program.targets import TARGETS, gpu_mesh

LEAF = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)


def master_weights(learning_rate: float) -> optax.GradientTransformation:
    """The usual mixed precision: float32 master and AdamW, and a bfloat16 copy."""
    inner = optax.adamw(learning_rate)

    def init(params):
        master = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        return master, inner.init(master)

    return optax.GradientTransformation(init, functools.partial(_update, inner))


def _update(inner, grads, state, params):
    master, inner_state = state
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    updates, inner_state = inner.update(grads, inner_state, master)
    master = optax.apply_updates(master, updates)
    copies = jax.tree.map(lambda m, p: m.astype(p.dtype), master, params)
    return copies, (master, inner_state)


def replaced(tx):
    """A step whose update is the new parameters."""

    def step(params, state, grads):
        return tx.update(grads, state, params)

    return step


CASES = {
    "optax, float32 master": (master_weights(1e-3), replaced, None),
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
