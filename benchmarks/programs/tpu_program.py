"""An optimizer step compiled for TPUs without a TPU, as a table.

    .venv/bin/python -m benchmarks tpu_program --model gpt2

The step is donated and has bfloat16 gradients. The table lists the bytes of operands
and results of all its instructions as laid out, without the padding of layouts, and in
the device's memory (not on the chip); temporary and peak memory; bytes written by
``copy`` operations; kernels; and seconds to lower and compile. Nothing was run on a
TPU. Needs the ``tpu-program`` extra.
"""

import argparse
import os
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax

import lowbit_optax as lo
from benchmarks import records
from tools.gpu_program.steps import gpt2, replaced, with_master
from tools.tpu_program.steps import TpuStep, lower_lpmm_step, lower_step
from tools.tpu_program.targets import TARGETS, tpu_mesh

MINUTES = 5
NEEDS = ("libtpu",)


def _step_of(alias: Callable, lower: Callable = lower_step, **arguments) -> Callable:
    def lowered(like, implementation: str | None = None, **options) -> TpuStep:
        tx = alias(1e-3, implementation=implementation, **arguments)
        return lower(tx, like, **options)

    return lowered


def _of_optax(like, implementation: str | None = None, **options) -> TpuStep:
    del implementation
    return lower_step(with_master(optax.adamw(1e-3)), like, replaced, **options)


STEPS = {
    "optax, float32 master": _of_optax,
    "lowbit_adamw": _step_of(lo.lowbit_adamw),
    "extra_bits_adamw(8)": _step_of(lo.extra_bits_adamw, bits=8),
    "extra_bits_adamw(5)": _step_of(lo.extra_bits_adamw, bits=5),
    "kahan_adamw": _step_of(lo.kahan_adamw),
    "sr_adamw": _step_of(lo.sr_adamw),
    "factored_adamw": _step_of(lo.factored_adamw),
    "factored_adamw(bits=0)": _step_of(lo.factored_adamw, bits=0),
    "lpmm_adam, 12 bits": _step_of(lo.lpmm_adam, lower_lpmm_step),
}
"""Functions by name that lower a step on leaves; see :func:`.steps.lower_step`."""
QUANTISED = {"lpmm_adam, 12 bits"}
MODELS = {
    "4x4096": [jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)] * 4,
    "4096": jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16),
    "gpt2": gpt2(),
}


def row(name: str, target: str, model: str, implementation: str | None) -> dict:
    """Return the facts of one step."""
    mesh = tpu_mesh(TARGETS[target].topology)
    step = STEPS[name](MODELS[model], implementation, mesh=mesh)
    # The step needs at least the time to read and write everything once.
    gradients = 2 * step.parameters
    least = (2 * step.stored + gradients) / TARGETS[target].bandwidth
    return {
        "step": name,
        "target": target,
        "model": model,
        "moved": round(step.moved, 2),
        "without padding": round(step.without_padding, 2),
        "of memory": round(step.of_memory, 2),
        "temporary": round(step.temporary, 3),
        "peak": round(step.peak, 2),
        "copied": round(step.copied, 3),
        "kernels": len(step.kernels),
        "large": len(step.large),
        "by Pallas": step.fused_launches,
        "in place": step.in_place,
        "s to lower": round(step.seconds_to_lower, 1),
        "s to compile": round(step.seconds_to_compile, 1),
        "memory's ms": round(1e3 * least, 3),
    }


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--model", choices=MODELS, default="4x4096")
    parser.add_argument("--implementation", help="of the steps; default: their own")
    flags = parser.parse_args(argv)
    print("jax", jax.__version__)
    records.print_rows(
        row(name, target, flags.model, flags.implementation)
        for target in flags.targets
        for name in flags.steps
    )
