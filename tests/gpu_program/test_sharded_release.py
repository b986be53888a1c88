"""Released steps on meshes of 8 and 256 H200s: collectives and memory."""

import functools

import jax
import optax
import pytest

from lowbit_optax import release
from tools.gpu_program.release_steps import CompiledStep, plain
from tools.gpu_program.sharded import MESHES, blocks, compile_sharded, mesh_of
from tools.gpu_program.steps import bytes_of
from tools.hlo import exchanged

# The collectives are those of the model; kernels on shards have tests of their own.
ADAMW = optax.adamw(1e-3)


@functools.cache
def model_on(name: str, style: str):
    return blocks(MESHES[name][0], style == "scanned")


@functools.cache
def compiled(make_step, name: str, style: str) -> CompiledStep:
    data, tensor, specs = MESHES[name]
    mesh = mesh_of(data, tensor)
    return compile_sharded(make_step, model_on(name, style), ADAMW, mesh, specs)


released = functools.partial(compiled, release.value_and_update)
CASES = [
    ("fsdp on 8", "unrolled"),
    ("fsdp on 256", "scanned"),
    ("tensor parallel on 8", "unrolled"),
    ("both on 256", "unrolled"),
    ("both on 256", "scanned"),
]
each_case = pytest.mark.parametrize(("name", "style"), CASES)


@each_case
def test_nothing_is_exchanged_that_the_usual_step_does_not(name, style):
    usual = exchanged(compiled(plain, name, style).program)
    found = exchanged(released(name, style).program)
    assert set(found) <= set(usual)
    assert all(found[kind] <= usual[kind] + 1024 for kind in found)


@each_case
def test_a_device_keeps_less_than_in_the_usual_step(name, style):
    assert released(name, style).temporary < compiled(plain, name, style).temporary


@pytest.mark.parametrize(("name", "style"), CASES[:2])
def test_gathered_weights_are_not_kept(name, style):
    # Nor are gradients that are not yet summed over the devices. The working set is
    # less than two of the four layers; in the usual unrolled step on 8 it is 2.6.
    weights = sum(map(bytes_of, jax.tree.leaves(model_on(name, style).params)))
    assert released(name, style).temporary < weights / 2
