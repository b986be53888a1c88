"""Memory of whole training steps compiled for H200s, as tables; no GPU is needed.

    .venv/bin/python -m benchmarks release_memory

*Matrices* has 12 layers tanh(h @ w) of 4096 x 4096 and a batch of 512. *Transformer* is
a GPT with 12 layers of width 2048, 16 heads, context 1024 and a batch of 4; each layer
is recomputed for its gradient. Parameters and state are donated. The "float32 master"
is the usual mixed precision: optax.adamw on float32 parameters, with bfloat16 gradients
of a copy that each step makes. More tables describe a ResNet-18, and transformer blocks
on meshes of 8 and 256 H200s. Nothing is run. Needs the ``gpu-program`` extra.
"""

import argparse
import dataclasses
import functools
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import optax

import lowbit_optax
from benchmarks import records
from lowbit_optax import release
from tools.gpu_program.release_steps import (
    BF16,
    MIB,
    Model,
    compile_step,
    matrices,
    plain,
    transformer,
    usual_mixed_precision,
)
from tools.gpu_program.sharded import MESHES, blocks, compile_sharded, mesh_of
from tools.gpu_program.unrolled import resnet18
from tools.hlo import exchanged

NEEDS = ("jax_plugins.xla_cuda12",)

LOWBIT_ADAMW = lowbit_optax.lowbit_adamw(1e-3)
MODES = {"without": plain, "with": release.value_and_update}


def one_device(name: str, model: Model, *others: str) -> None:
    """Print a model's table for one H200.

    ``others`` are more rows, among ``"master"``, ``"defaults"`` and ``"lpmm"``.
    """
    programs = {}
    if "master" in others:
        programs["float32 master", ""] = compile_step(
            usual_mixed_precision, model, optax.adamw(1e-3)
        )
    for mode, make_step in MODES.items():
        programs["lowbit_adamw", mode] = compile_step(make_step, model, LOWBIT_ADAMW)
    if "defaults" in others:
        of_xla = compile_step(MODES["with"], model, LOWBIT_ADAMW, options={})
        programs["lowbit_adamw", "with, and XLA's scheduler"] = of_xla
    if "lpmm" in others:
        to_12_bits = functools.partial(lowbit_optax.lpmm.quantize_params, bits=12)
        params = jax.eval_shape(to_12_bits, model.params)
        programs["lpmm_adam, 12-bit weights", "with"] = compile_step(
            functools.partial(release.value_and_update, grad_dtype=BF16),
            dataclasses.replace(model, params=params),
            lowbit_optax.lpmm_adam(1e-3),
        )
    records.print_rows(
        {
            f"{name}, MiB": case,
            "release": mode,
            "params + state": f"{step.stored / MIB:,.0f}",
            "temporary": f"{step.temporary / MIB:,.0f}",
            "peak": f"{step.peak / MIB:,.0f}",
        }
        for (case, mode), step in programs.items()
    )


def on_mesh(name: str) -> dict[str, str]:
    """Return the temporary memory of transformer blocks on a mesh, one by one."""
    data, tensor, specs = MESHES[name]
    mesh, model = mesh_of(data, tensor), blocks(data, False)
    steps = {
        mode: compile_sharded(make, model, optax.adamw(1e-3), mesh, specs)
        for mode, make in MODES.items()
    }
    kinds = exchanged(steps["with"].program).items()
    return {
        "blocks on a mesh, MiB": name,
        **{mode: f"{step.temporary / MIB:,.2f}" for mode, step in steps.items()},
        "exchanged by each": ", ".join(f"{k} {x / MIB:,.2f}" for k, x in kinds),
    }


def main(argv: list[str] | None = None) -> None:
    """Print the tables."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(argv)
    one_device("ResNet-18", resnet18())
    records.print_rows(map(on_mesh, MESHES))
    one_device("matrices", matrices(), "master")
    one_device("transformer", transformer(), "master", "defaults", "lpmm")
    one_device("transformer that keeps activations", transformer(remat=False))
