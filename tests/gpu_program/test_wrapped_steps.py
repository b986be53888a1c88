"""Wrappers cost the same around a step as inside it, compiled for H200s."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import lowbit_optax
from tests.helpers.optimizers import weights_only
from tools.gpu_program.release_steps import BF16, MIB, Model, compile_step, plain
from tools.gpu_program.steps import gpt2, leaf, lower_step
from tools.models.gpt import GPT, to_bfloat16

pytestmark = pytest.mark.usefixtures("by_triton")

PARAMS = {"a": leaf(2048, 1024), "b": leaf(1024, 1024), "c": leaf(4096)}
CLIP = optax.clip_by_global_norm(1.0)
ADAMW = lowbit_optax.lowbit_adamw(1e-3)
SCALED = {
    "optax": optax.adamw(1e-3),
    "kahan": lowbit_optax.kahan_adamw(1e-3),
    "kahan by XLA": lowbit_optax.kahan_adamw(1e-3, implementation="xla"),
    "lowbit": ADAMW,
    "master copy": weights_only(optax.adamw(1e-3), lowbit_optax.master_copy()),
}


def loss_scaled(tx):
    return lowbit_optax.with_loss_scale(tx, lowbit_optax.loss_scaling.backoff_scale())


def clipped(tx):
    return optax.chain(CLIP, tx)


OF_ADAMW = {
    "clip": clipped(ADAMW),
    "clip by value and scale": optax.chain(optax.clip(1.0), optax.scale(0.5), ADAMW),
    "clip and partition": clipped(
        optax.partition({"x": ADAMW}, {"a": "x", "b": "x", "c": "x"})
    ),
    "clip and inject": clipped(
        optax.inject_hyperparams(lowbit_optax.lowbit_adamw, hyperparam_dtype="float32")(
            1e-3
        )
    ),
    "apply_if_finite": optax.apply_if_finite(ADAMW, 5),
    "apply_if_finite and clip": optax.apply_if_finite(clipped(ADAMW), 5),
    "loss scale and clip": loss_scaled(clipped(ADAMW)),
}
# These read gradients twice more, and XLA writes partial maxima of scaled gradients.
MORE = {"apply_if_finite and clip": 4.01, "loss scale and clip": 4.011}
WRAPPED = {name: (tx, ADAMW) for name, tx in OF_ADAMW.items()}
WRAPPED |= {f"loss scale, {name}": (loss_scaled(tx), tx) for name, tx in SCALED.items()}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_step_makes_no_new_gradients_and_copies_nothing(name):
    step, plain = (lower_step(tx, PARAMS) for tx in WRAPPED[name])
    assert step.in_place
    assert step.temporary < 0.01
    assert step.moved < plain.moved + MORE.get(name, 2.01)
    assert step.fused_launches == plain.fused_launches
    # For these operations, XLA:GPU waits for a value from the device.
    assert not re.search(r" (conditional|while)\(", step.compiled.as_text())


@pytest.mark.usefixtures("disassembler")
@pytest.mark.parametrize("name", ["kahan", "lowbit"])
def test_a_scaled_kernel_spills_no_registers_and_is_hardly_longer(name):
    def fused(tx):
        kernels = lower_step(tx, PARAMS).machine_code.values()
        return {k.name: k for k in kernels if k.name.startswith("fused_update")}

    plain, scaled = fused(SCALED[name]), fused(loss_scaled(SCALED[name]))
    assert plain.keys() == scaled.keys()
    for kernel, k in scaled.items():
        assert k.registers <= plain[kernel].registers + 8
        assert k.stack == k.spill_stores == k.spill_loads == 0
        # The kernel also reads the factor, and a flag that skips the step.
        assert k.instructions < 1.05 * plain[kernel].instructions


def are_finite(grads):
    return jnp.all(jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(grads)]))


def masked(tx):
    tx = optax.conditionally_mask(
        tx, lambda count, *, proceed, **_: proceed, forward_extra_args=True
    )

    def step(params, state, grads):
        proceed = are_finite(grads)
        return lowbit_optax.step(tx, params, state, grads, proceed=proceed)

    return tx, step


def conditional(tx):
    def step(params, state, grads):
        return jax.lax.cond(
            are_finite(grads),
            lambda: lowbit_optax.step(tx, params, state, grads),
            lambda: (params, state),
        )

    return tx, step


CLIPPING = {
    "inside": lowbit_optax.lowbit(clipped(optax.adamw(1e-3))),
    "before": clipped(ADAMW),
}


@pytest.mark.parametrize("where", CLIPPING)
def test_what_clipping_costs_is_what_the_recipe_says(where):
    # The figures of docs/recipes/training_step.md: moved and temporary bytes.
    model = gpt2()
    step = lower_step(CLIPPING[where], model | {"blocks": model["blocks"][:2]})
    assert len(step.launches) == pytest.approx(46, abs=4.6)
    assert step.moved == pytest.approx(14.3, abs=0.06)
    assert step.temporary == pytest.approx(0, abs=0.06)


# The figures of docs/recipes/training_step.md.
@pytest.mark.parametrize(
    ("skipping", "moved", "temporary"),
    [(masked, 14.3, 0.0), (conditional, 12.3, 5.1)],
)
def test_a_condition_of_the_users_is_a_switch_and_not_a_branch(
    skipping, moved, temporary
):
    tx, step = skipping(ADAMW)
    lowered = lower_step(tx, PARAMS, make_step=lambda _: step)
    assert lowered.moved == pytest.approx(moved, abs=0.06)
    assert lowered.temporary == pytest.approx(temporary, abs=0.1)


ACCUMULATED = lowbit_optax.accumulate_gradients(ADAMW, 4)
ACCUMULATIONS = {
    "step": (ACCUMULATED, 18.26),
    "loss scale": (loss_scaled(ACCUMULATED), 20.27),
}


@pytest.mark.parametrize("name", ACCUMULATIONS)
def test_accumulation_is_two_kernels_in_place_of_which_one_runs(name):
    tx, moved = ACCUMULATIONS[name]
    step = lower_step(tx, PARAMS)
    assert step.in_place
    assert step.temporary < 0.01
    # Weights, residual and moments need 5.13 bytes, and the accumulator needs one.
    # Adding moves 4 bytes and the update moves 14.25 bytes; both kernels are counted.
    assert step.stored / step.parameters < 6.14
    assert step.moved < moved
    assert step.fused_launches <= 2 * len(PARAMS)
    assert not re.search(r" (conditional|while)\(", step.compiled.as_text())


def test_a_training_step_that_accumulates_peaks_below_multi_steps():
    # The figures of docs/recipes/training_step.md.
    gpt = GPT(12, 1024, 16, 1024, "full", BF16, 16384)
    params = jax.eval_shape(lambda: to_bfloat16(gpt.init(jax.random.key(0))))
    tokens = jax.ShapeDtypeStruct((4, 1025), jnp.int32)
    model = Model(gpt.loss, params, tokens, carry=0, layers=12)

    def peak(tx):
        memory = compile_step(plain, model, tx).program.memory_analysis()
        new = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return (memory.argument_size_in_bytes + memory.temp_size_in_bytes + new) / MIB

    assert peak(ACCUMULATED) == pytest.approx(2121, abs=20)
    multi_steps = optax.MultiSteps(ADAMW, 4).gradient_transformation()
    assert peak(multi_steps) == pytest.approx(2788, abs=20)
