"""Memory of whole training steps compiled for H200s, as tables; no GPU is needed.

    .venv/bin/python -m benchmarks release_memory

Model A has 12 layers tanh(h @ w) of 4096 x 4096 and a batch of 512. Model B is a GPT
with 12 layers of width 2048, 16 heads, context 1024 and a batch of 4; each layer is
recomputed for its gradient. Parameters and state are donated. The "float32 master" is
the usual mixed precision: optax.adamw on float32 parameters, with bfloat16 gradients of
a copy that each step makes. More tables describe models without a scan, and transformer
blocks on meshes of 8 and 256 H200s. Nothing is run. Needs the ``gpu-program`` extra.
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
    CompiledStep,
    Model,
    compile_step,
    matrices,
    plain,
    transformer,
    usual_mixed_precision,
)
from tools.gpu_program.sharded import MESHES, blocks, compile_sharded, mesh_of
from tools.gpu_program.unrolled import resnet18, tied_transformer, unrolled_matrices
from tools.hlo import exchanged

MINUTES = 5
NEEDS = ("jax_plugins.xla_cuda12",)

OPTIMIZERS = {
    "AdamW, float32 moments": lowbit_optax.lowbit(
        optax.adamw(1e-3), weights=lowbit_optax.nearest(), moments="float32"
    ),
    "`extra_bits_adamw(bits=8)`": lowbit_optax.extra_bits_adamw(1e-3, bits=8),
    "`lowbit_adamw`": lowbit_optax.lowbit_adamw(1e-3),
}
MODES = {"without": plain, "with": release.value_and_update}


def mib(size: float) -> str:
    return f"{size / MIB:,.0f}"


def quantized(model: Model) -> CompiledStep:
    """Compile ``lpmm_adam`` on 12-bit weights, with release and a dequantising loss."""
    to_12_bits = functools.partial(lowbit_optax.lpmm.quantize_params, bits=12)
    params = jax.eval_shape(to_12_bits, model.params)
    return compile_step(
        functools.partial(release.value_and_update, grad_dtype=BF16),
        dataclasses.replace(model, params=params),
        lowbit_optax.lpmm_adam(1e-3),
    )


def one_device(model: Model, dequantizes: bool = False) -> None:
    """Print a model's table for one H200.

    Args:
      model: the model to train.
      dequantizes: whether its loss accepts quantised weights.
    """
    master = compile_step(usual_mixed_precision, model, optax.adamw(1e-3))
    programs = {("float32 master", ""): master}
    for name, tx in OPTIMIZERS.items():
        for mode, make_step in MODES.items():
            programs[name, mode] = compile_step(make_step, model, tx)
    if dequantizes:
        programs["`lpmm_adam`, 12-bit weights", "with"] = quantized(model)
    records.print_rows(
        {
            "step": name,
            "release": mode,
            "params + state": mib(step.stored),
            "temporary": mib(step.temporary),
            "peak": mib(step.peak),
            "master's peak / peak": f"{master.peak / step.peak:.2f}",
        }
        for (name, mode), step in programs.items()
    )


def layer_by_layer() -> None:
    """Print the table of models without a scan, with ``lowbit_adamw``."""
    models = {
        "matrices": unrolled_matrices(),
        "ResNet-18": resnet18(),
        "transformer": tied_transformer(),
    }
    tx = OPTIMIZERS["`lowbit_adamw`"]
    records.print_rows(
        {"model": name}
        | {mode: mib(compile_step(x, model, tx).temporary) for mode, x in MODES.items()}
        for name, model in models.items()
    )


def on_meshes() -> None:
    """Print the table of transformer blocks on meshes, with ``optax.adamw``."""

    def row(name: str, is_scanned: bool) -> dict[str, str]:
        data, tensor, specs = MESHES[name]
        mesh, model = mesh_of(data, tensor), blocks(data, is_scanned)
        steps = {
            mode: compile_sharded(make, model, optax.adamw(1e-3), mesh, specs)
            for mode, make in MODES.items()
        }
        kinds = exchanged(steps["with"].program).items()
        return {
            "mesh": name,
            "blocks": "in a scan" if is_scanned else "one by one",
            **{mode: f"{step.temporary / MIB:,.2f}" for mode, step in steps.items()},
            "exchanged by each": ", ".join(f"{k} {x / MIB:,.2f}" for k, x in kinds),
        }

    records.print_rows(row(name, scans) for name in MESHES for scans in (False, True))


def main(argv: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Memory of training steps on H200s.")
    parser.add_argument("--no-transformer", action="store_true", help="skip model B")
    flags = parser.parse_args(argv)
    print("Models without a scan, one H200, temporary MiB\n")
    layer_by_layer()
    print("\nTransformer blocks, temporary MiB of each H200\n")
    on_meshes()
    print("\nModel A, one H200, MiB\n")
    one_device(matrices())
    if flags.no_transformer:
        return
    print("\nModel B, layers recomputed, one H200, MiB\n")
    one_device(transformer(), dequantizes=True)
    print("\nModel B, all activations kept, one H200, MiB\n")
    one_device(transformer(remat=False))
