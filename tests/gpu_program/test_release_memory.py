"""Training steps with gradient release, compiled for H200s: memory, collectives.

``python -m benchmarks release_memory`` prints a table of such steps.
"""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import lowbit_optax
from lowbit_optax import release
from tests.helpers.optimizers import weights_only
from tools.gpu_program.release_steps import (
    MIB,
    CompiledStep,
    compile_step,
    in_float16,
    matrices,
    plain,
    plain_scaled,
    transformer,
    usual_mixed_precision,
)
from tools.gpu_program.steps import bytes_of
from tools.gpu_program.targets import compile_for, gpu_mesh
from tools.gpu_program.unrolled import resnet18, tied_transformer, unrolled_matrices

LOWBIT = lowbit_optax.lowbit_adamw(1e-3)
SCALED = lowbit_optax.with_loss_scale(LOWBIT, lowbit_optax.loss_scaling.backoff_scale())
OPTIMIZERS = {
    "optax_adamw": optax.adamw(1e-3),
    "adamw": weights_only(optax.adamw(1e-3), lowbit_optax.nearest()),
    "extra_bits_adamw": lowbit_optax.extra_bits_adamw(1e-3, bits=8),
    "lowbit_adamw": LOWBIT,
    "scaled": SCALED,
    "accumulated": lowbit_optax.accumulate_gradients(LOWBIT, 4),
    "by hand": optax.GradientTransformation(
        lambda params: [LOWBIT.init(w) for w in params["layers"]],
        lambda *_: None,
    ),
}
# Scanned models have a stack of layers, and unrolled models have a list.
MODELS = {
    "scanned": matrices,
    "scanned float16": lambda: in_float16(matrices()),
    "unrolled": unrolled_matrices,
    "unrolled float16": lambda: in_float16(unrolled_matrices()),
    "small": lambda: unrolled_matrices(4, 512, batch=64),
    "scanned transformer": transformer,
    "transformer": tied_transformer,
    "small transformer": lambda: tied_transformer(context=64, words=1024),
    "resnet": resnet18,
}


@functools.cache
def compiled(make_step, model: str, optimizer: str, devices: int = 1) -> CompiledStep:
    return compile_step(make_step, MODELS[model](), OPTIMIZERS[optimizer], devices)


released = functools.partial(compiled, release.value_and_update)
unreleased = functools.partial(compiled, plain)
CLIPPED = functools.partial(release.value_and_update, max_grad_norm=1.0)


def activations(model):
    return model.layers * model.carry


def gradient(model) -> int:
    """Bytes of one layer's gradient."""
    return bytes_of(model.params) // model.layers


def by_hand(*_):
    """A step with matrices whose layers are opened by the loss."""

    def loss_fn(layers, h):
        for layer in layers:
            w, h = release.released(layer, h)
            h = jnp.tanh(h @ w)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    step = release.value_and_update_layers(loss_fn, LOWBIT)

    def train_step(params, states, h):
        loss, layers, states = step(params["layers"], states, h)
        return loss, {"layers": layers}, states

    return train_step


# A layer of a stack is copied out of it for its update, and back. In addition, there
# are the layer's gradients, and some MiB for scalars and for the loop.
IN_LOOP = [
    ("scanned", name, release.value_and_update, 1, 5)
    for name in ("adamw", "extra_bits_adamw", "lowbit_adamw")
]
# A clipped gradient is float32, and as large as two others.
OF_SCALED = [
    (model, "scaled", make_step, gradients, 1 / 8)
    for model in ("scanned float16", "unrolled float16")
    for make_step, gradients in ((release.value_and_update, 2), (CLIPPED, 3.25))
]
ALIVE = [
    *IN_LOOP,
    *OF_SCALED,
    ("unrolled", "lowbit_adamw", release.value_and_update, 2, 1 / 8),
    ("unrolled", "lowbit_adamw", CLIPPED, 2, 1 / 8),
    ("unrolled", "by hand", by_hand, 2, 1 / 8),
    # The gradient of a layer and the arrays of its backward pass: 3.0 gradients.
    ("small", "accumulated", release.value_and_update, 3.1, 0),
]


@pytest.mark.parametrize(("name", "optimizer", "make_step", "gradients", "more"), ALIVE)
def test_beside_activations_few_gradients_are_alive(
    name, optimizer, make_step, gradients, more
):
    model, step = MODELS[name](), compiled(make_step, name, optimizer)
    most = activations(model) + gradients * gradient(model) + more * MIB
    copied = step.stored / model.layers if name.startswith("scanned") else 0
    assert step.temporary <= most + copied
    assert step.program.memory_analysis().alias_size_in_bytes == step.stored


@pytest.mark.parametrize(
    ("name", "optimizer", "make_step"),
    [
        *(("scanned", name, plain) for _, name, *_ in IN_LOOP),
        ("unrolled", "lowbit_adamw", plain),
        ("small", "accumulated", plain),
        ("scanned float16", "scaled", plain_scaled),
        ("unrolled float16", "scaled", plain_scaled),
    ],
)
def test_without_release_all_gradients_are_alive(name, optimizer, make_step):
    model, step = MODELS[name](), compiled(make_step, name, optimizer)
    assert step.temporary >= activations(model) + (model.layers - 2) * gradient(model)
    if optimizer == "accumulated":  # without float32 sums of the gradients
        most = activations(model) + 2.4 * model.layers * gradient(model)
        assert step.temporary <= most


def test_by_the_scheduler_that_hides_latencies_it_is_the_same():
    # The scheduler ignores memory; a layer's weights are freed before the gradient.
    hiding = {"xla_gpu_enable_latency_hiding_scheduler": True}
    step = compile_step(release.value_and_update, matrices(), LOWBIT, options=hiding)
    other = released("scanned", "lowbit_adamw")
    assert step.temporary <= other.temporary + MIB / 8
    assert step.peak <= 1160 * MIB


def test_beside_carries_of_a_transformer_one_layers_working_set_is_alive():
    model, one = transformer(), transformer(layers=1)
    # The layer's gradients, and all arrays that exist while they are computed.
    program = compile_for(gpu_mesh(), jax.grad(one.loss_fn), one.params, one.batch)
    found = program.memory_analysis()
    working_set = found.temp_size_in_bytes + found.output_size_in_bytes
    # The loop also has the cotangent that it receives and the one that it returns.
    most = activations(model) + working_set + 2 * model.carry + MIB
    assert released("scanned transformer", "adamw").temporary <= most
    others = (model.layers - 1) * model.one_layer
    usual = unreleased("scanned transformer", "adamw")
    assert usual.temporary >= most + 0.9 * others


def test_lowbit_adamw_peaks_at_little_more_than_a_third_of_the_usual_mixed_precision():
    usual = compiled(usual_mixed_precision, "scanned", "optax_adamw")
    step = released("scanned", "lowbit_adamw")
    assert step.temporary <= 170 * MIB < bytes_of(matrices().params) / 2
    assert step.peak <= 1.15 * 1024 * MIB
    # Both include activations and the batch; without them, the ratio is 2.85.
    others = 60 * MIB + matrices().carry
    assert usual.peak - others >= 2.8 * (step.peak - others)
    assert usual.peak >= 2.7 * step.peak


@pytest.mark.parametrize("optimizer", ["adamw", "lowbit_adamw"])
def test_eight_h200s_hold_an_eighth_of_the_layers_and_of_one_layers_gradient(optimizer):
    alone = released("scanned", optimizer)
    step = released("scanned", optimizer, 8)
    other = unreleased("scanned", optimizer, 8)
    # A product over sharded rows is a sum over devices. Each device has its terms and
    # the whole sum, in each direction.
    whole = 4 * matrices().carry
    assert step.temporary <= alone.temporary / 8 + whole
    stack = bytes_of(matrices().params) / 8
    assert other.temporary - step.temporary >= stack - matrices().one_layer / 8
    assert step.collectives <= other.collectives


@pytest.mark.parametrize("name", ["transformer", "resnet"])
def test_all_gradients_but_two_of_unrolled_layers_are_saved(name):
    if name == "resnet":
        pytest.importorskip("flax")
    sizes = [bytes_of(x) for x in jax.tree.leaves(MODELS[name]().params)]
    step, other = released(name, "lowbit_adamw"), unreleased(name, "lowbit_adamw")
    assert step.temporary <= other.temporary - (sum(sizes) - 2 * max(sizes))


def test_barriers_keep_the_order_of_a_transformers_updates():
    # It is 19.8 MiB, and 33.3 MiB without release.
    assert released("small transformer", "lowbit_adamw").temporary <= 20.5 * MIB
