"""Mosaic GPU kernels compared with Triton kernels, compiled for H200s.

Mosaic GPU can only compile for one kind of GPU in a process.
"""

import functools
import warnings

import jax
import jax.export
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lowbit_optax
from pallas_kernels import platforms
from tests.helpers.gpu_steps import STEPS
from tests.helpers.optimizers import assert_same_bits

if not platforms.has_mosaic():
    pytest.skip("Mosaic GPU needs JAX 0.11 or newer", allow_module_level=True)

from tools.gpu_program.machine_code import instructions_per_parameter
from tools.gpu_program.ptx.program import compile_program
from tools.gpu_program.steps import (
    applied,
    fast,
    gpt2,
    leaf,
    lower_lpmm_step,
    lower_step,
)
from tools.gpu_program.targets import gpu_mesh, lower_for
from tools.hlo import collectives, text

needs_tools = pytest.mark.usefixtures("disassembler")

LOWBIT = lowbit_optax.lowbit_adamw(1e-3)


def step_by(launcher, monkeypatch, name, shape, **options):
    monkeypatch.setattr(platforms, "DEFAULT_LAUNCHER", launcher)
    if name.startswith("lpmm"):
        return lower_lpmm_step(STEPS[name], leaf(*shape, dtype=jnp.float32), **options)
    return lower_step(STEPS[name], leaf(*shape), **options)


def instructions(step):
    return instructions_per_parameter(step.fused, step.parameters)


@needs_tools
@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, (4096, 4096)) for name in STEPS]
    + [(name, (4001, 1001)) for name in ("8 bits", "kahan", "lowbit")],
    ids=str,
)
def test_a_step_is_as_good_as_by_triton(name, shape, monkeypatch):
    mosaic, triton = (
        step_by(launcher, monkeypatch, name, shape) for launcher in ("mosaic", "triton")
    )
    assert "mosaic_gpu" in text(mosaic.compiled)
    assert "mosaic_gpu" not in text(triton.compiled)
    assert instructions(mosaic) <= 1.1 * instructions(triton)
    assert mosaic.fused.stack == 0
    assert mosaic.fused.spill_stores == mosaic.fused.spill_loads == 0
    assert mosaic.moved <= triton.moved + 0.001
    assert mosaic.temporary < 0.001
    assert mosaic.in_place
    assert mosaic.fused_launches == triton.fused_launches == 1


@pytest.mark.parametrize(
    ("devices", "shape", "spec"),
    [
        (8, (50304, 768), P("d")),
        (256, (4096, 4096), P("d")),
        (256, (4096, 4096), P(None, "d")),
    ],
    ids=str,
)
def test_shards_exchange_nothing(devices, shape, spec, monkeypatch):
    mesh = gpu_mesh(devices)
    step = step_by("mosaic", monkeypatch, "lowbit", shape, mesh=mesh, spec=spec)
    assert "mosaic_gpu" in text(step.compiled)
    assert not collectives(step.compiled)
    assert step.temporary * devices < 0.02


@needs_tools
def test_a_model_takes_few_launches_and_spills_nothing(monkeypatch):
    monkeypatch.setattr(platforms, "DEFAULT_LAUNCHER", "mosaic")
    step = lower_step(LOWBIT, gpt2())
    assert len(step.launches) <= 22  # at most four large leaves share a kernel
    assert step.temporary < 0.001
    assert step.in_place
    kernels = [k for n, k in step.machine_code.items() if n.startswith("fused_update")]
    assert kernels
    assert all(k.spill_stores == k.spill_loads == k.stack == 0 for k in kernels)


@pytest.mark.parametrize("make_step", [fast, applied], ids=["step", "update"])
@pytest.mark.parametrize("axis", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_mosaic_warns_of_nothing(make_step, axis):
    tx = lowbit_optax.lowbit(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        implementation="mosaic",
    )
    params = {str(i): leaf(64, 64 + 4 * i) for i in range(9)}
    mesh = gpu_mesh(8, axis)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = lower_step(tx, params, make_step, mesh=mesh, spec=P("d"))
        compiled = text(step.compiled)
    assert "mosaic_gpu" in compiled
    assert "__gpu$xla.gpu.triton" not in compiled


def test_an_exported_step_has_the_same_bits():
    def step(implementation):
        inner = optax.sgd(0.25, momentum=0.5)
        tx = lowbit_optax.lowbit(inner, min_size=0, implementation=implementation)
        return tx, jax.jit(functools.partial(lowbit_optax.step, tx))

    reference, want = step("xla")
    numbers = jnp.arange(64 * 72, dtype=jnp.float32).reshape(64, 72) / 64
    params = {"kernel": numbers.astype(jnp.bfloat16)}
    arguments = params, reference.init(params), params
    mesh = gpu_mesh()
    with jax.set_mesh(mesh):
        exported = jax.export.export(step("mosaic")[1], platforms=["cuda"])(*arguments)
    program = compile_program(lower_for(mesh, exported.call, *arguments))
    assert any(name.startswith("fused_update") for name in program.sources)
    assert_same_bits(program.run(*arguments), want(*arguments))
