"""Training steps with gradient release, compiled for H200s: memory, collectives.

Numbers are MiB per device. ``python -m benchmarks release_memory`` prints the table.
"""

import functools

import jax
import optax
import pytest
from optimizers import weights_only

import lowbit_optax
from lowbit_optax import release
from tools.gpu_program.release_steps import (
    MIB,
    CompiledStep,
    compile_step,
    matrices,
    plain,
    transformer,
    usual_mixed_precision,
)
from tools.gpu_program.steps import bytes_of
from tools.gpu_program.targets import compile_for, gpu_mesh

MODELS = {"matrices": matrices, "transformer": transformer}
OPTIMIZERS = {
    "optax_adamw": optax.adamw(1e-3),
    "adamw": weights_only(optax.adamw(1e-3), lowbit_optax.nearest()),
    "extra_bits_adamw": lowbit_optax.extra_bits_adamw(1e-3, bits=8),
    "lowbit_adamw": lowbit_optax.lowbit_adamw(1e-3),
}


@functools.cache
def compiled(make_step, model: str, optimizer: str, devices: int = 1) -> CompiledStep:
    return compile_step(make_step, MODELS[model](), OPTIMIZERS[optimizer], devices)


released = functools.partial(compiled, release.value_and_update)
unreleased = functools.partial(compiled, plain)


def working_set(model: str) -> int:
    """Bytes of one layer's gradients and of all that lives while they are computed."""
    one = MODELS[model](layers=1)
    program = compile_for(gpu_mesh(), jax.grad(one.loss_fn), one.params, one.batch)
    found = program.memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes


@pytest.mark.parametrize("optimizer", ["adamw", "extra_bits_adamw", "lowbit_adamw"])
def test_temporary_memory_holds_one_layer_and_its_gradient(optimizer):
    model, stack = matrices(), bytes_of(matrices().params)
    assert unreleased("matrices", optimizer).temporary > stack
    step = released("matrices", optimizer)
    # The layer's parameters and state are copied out of their stacks, and back.
    layer = step.stored / model.layers + model.one_layer
    most = model.layers * model.carry + layer + 5 * MIB
    assert step.temporary <= most < unreleased("matrices", optimizer).temporary


def test_temporary_memory_of_lowbit_adamw_is_below_half_a_stack():
    stack = bytes_of(matrices().params)
    assert released("matrices", "lowbit_adamw").temporary <= 170 * MIB < stack / 2


def test_by_the_scheduler_that_hides_latencies_it_is_the_same():
    # It ignores memory; a layer's weights are gone before their gradient is there.
    hiding = {"xla_gpu_enable_latency_hiding_scheduler": True}
    tx = OPTIMIZERS["lowbit_adamw"]
    step = compile_step(release.value_and_update, matrices(), tx, options=hiding)
    other = released("matrices", "lowbit_adamw")
    assert step.temporary <= other.temporary + MIB / 8
    assert step.peak <= 1160 * MIB


@pytest.mark.parametrize("model", MODELS)
def test_temporary_memory_is_the_carries_and_one_layers_working_set(model):
    sizes = MODELS[model]()
    carries = sizes.layers * sizes.carry
    # The loop also has the cotangent that it is given and the one it passes on.
    scalars = MIB
    most = carries + working_set(model) + 2 * sizes.carry + scalars
    step = released(model, "adamw")
    # A layer of the matrices is all working set, and none of it is free for the state.
    copied = step.stored / sizes.layers if model == "matrices" else 0
    assert step.temporary <= most + copied
    others = (sizes.layers - 1) * sizes.one_layer
    assert unreleased(model, "adamw").temporary >= most + 0.9 * others


@pytest.mark.parametrize("optimizer", ["adamw", "extra_bits_adamw", "lowbit_adamw"])
def test_parameters_and_state_are_written_in_place(optimizer):
    step = released("matrices", optimizer)
    assert step.program.memory_analysis().alias_size_in_bytes == step.stored


def test_lowbit_adamw_peaks_at_little_more_than_a_third_of_the_usual_mixed_precision():
    usual = compiled(usual_mixed_precision, "matrices", "optax_adamw")
    step = released("matrices", "lowbit_adamw")
    assert step.peak <= 1.15 * 1024 * MIB
    # Activations are in both: without them, and the batch, it is 2.85 times.
    activations = 60 * MIB + matrices().carry
    assert usual.peak - activations >= 2.8 * (step.peak - activations)
    assert usual.peak >= 2.7 * step.peak


@pytest.mark.parametrize("optimizer", ["adamw", "lowbit_adamw"])
def test_eight_h200s_hold_an_eighth_of_the_layers_and_of_one_layers_gradient(optimizer):
    alone = released("matrices", optimizer)
    step = released("matrices", optimizer, 8)
    other = unreleased("matrices", optimizer, 8)
    # A product of sharded rows is a sum over devices, and so whole on each of them: its
    # terms and its sum, in each direction.
    whole = 4 * matrices().carry
    assert step.temporary <= alone.temporary / 8 + whole
    stack = bytes_of(matrices().params) / 8
    assert other.temporary - step.temporary >= stack - matrices().one_layer / 8
    assert step.collectives <= other.collectives
