"""Programs contain code for their target GPU, made with the newest compiler found."""

import pytest

import lowbit_optax
from pallas_kernels import platforms
from tools.gpu_program import targets
from tools.gpu_program.dump import compile_with_dump
from tools.gpu_program.machine_code import (
    compilation,
    instructions_per_parameter,
)
from tools.gpu_program.steps import leaf, lower_lpmm_step, lower_step
from tools.hlo import memory

# Mosaic GPU can only compile for one kind of GPU in a process.
pytestmark = pytest.mark.usefixtures("by_triton", "disassembler")


ARCHITECTURES = {
    "A100": "sm_80",
    "L4": "sm_89",
    "RTX_4090": "sm_89",
    "RTX_PRO_6000": "sm_120",
    "H100": "sm_90a",
    "H200": "sm_90a",
    "B200": "sm_100a",
}
if not platforms.has_mosaic():
    # From JAX 0.11, Pallas compiles for absent GPUs only if it knows their names, and
    # this name is not among them.
    ARCHITECTURES["RTX_5090"] = "sm_120"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_kernels_are_of_the_targets_architecture(name):
    mesh = targets.gpu_mesh(target=getattr(targets, name))
    tx = lowbit_optax.lowbit_adamw(1e-3)
    step = lower_step(tx, leaf(256, 256), mesh=mesh)
    dump = compile_with_dump(step.lowered)
    (kernel,) = (p for p in dump.ptx if "fused_update" in p)
    assert f".target {ARCHITECTURES[name]}\n" in kernel
    assert memory(dump.compiled).alias_size_in_bytes == step.stored
    assert step.fused.spill_stores == step.fused.spill_loads == step.fused.stack == 0


OPTIMIZERS = {
    "extra_bits": (lowbit_optax.extra_bits_adamw, lower_step),
    "kahan": (lowbit_optax.kahan_adamw, lower_step),
    "stochastic rounding": (lowbit_optax.sr_adamw, lower_step),
    "lowbit": (lowbit_optax.lowbit_adamw, lower_step),
    "factored": (lowbit_optax.factored_adamw, lower_step),
    "lpmm": (lowbit_optax.lpmm_adam, lower_lpmm_step),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:lowbit. XLA runs the steps:UserWarning")
def test_a_t4_gets_a_program_without_kernels(name):
    make, lower = OPTIMIZERS[name]
    step = lower(make(1e-3), leaf(256, 256), mesh=targets.gpu_mesh(target=targets.T4))
    assert step.fused_launches == 0
    assert step.in_place


@pytest.mark.parametrize("name", ["extra_bits", "kahan", "lowbit", "lpmm"])
def test_a_b200_gets_a_kernel_as_good_as_an_h200(name):
    make, lower = OPTIMIZERS[name]
    old, new = (
        lower(make(1e-3), leaf(1024, 2048), mesh=targets.gpu_mesh(target=target))
        for target in (targets.H200, targets.B200)
    )
    old_kernel, new_kernel = old.fused, new.fused
    assert new.in_place
    assert new.temporary < 0.01
    assert new.moved == old.moved
    assert new_kernel.spill_stores == new_kernel.spill_loads == 0
    assert new_kernel.registers <= old_kernel.registers + 8
    assert instructions_per_parameter(new_kernel, new.parameters) <= (
        1.05 * instructions_per_parameter(old_kernel, old.parameters)
    )


def test_the_newest_of_several_compilers_is_taken(tmp_path, monkeypatch):
    # The order of the folders' names differs from the order of the releases.
    for folder, release in {"a": "9.9", "b": "13.10", "cuda_nvcc": "13.9"}.items():
        tool = tmp_path / "nvidia" / folder / "bin" / "some_tool"
        tool.parent.mkdir(parents=True)
        tool.write_text(f"#!/bin/sh\necho Cuda, release {release}, V{release}.1\n")
        tool.chmod(0o755)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    found = compilation._find("some_tool")
    assert found is not None
    assert found.parent.parent.name == "b"
