"""What wrappers do around a step costs what it costs inside, compiled for H200s."""

import re

import optax
import pytest

import lowbit_optax
from tools.gpu_program.steps import leaf, lower_step

pytestmark = pytest.mark.usefixtures("by_triton")

PARAMS = {"a": leaf(2048, 1024), "b": leaf(1024, 1024), "c": leaf(4096)}
CLIP = optax.clip_by_global_norm(1.0)
ADAMW = lowbit_optax.lowbit_adamw(1e-3)


def loss_scaled(tx):
    return lowbit_optax.with_loss_scale(tx, lowbit_optax.backoff_scale())


# A step alone moves 12.25 bytes per parameter; here gradients are read once more.
WRAPPED = {
    "clip": optax.chain(CLIP, ADAMW),
    "clip by value and scale": optax.chain(optax.clip(1.0), optax.scale(0.5), ADAMW),
    "clip and partition": optax.chain(
        CLIP, optax.partition({"x": ADAMW}, {"a": "x", "b": "x", "c": "x"})
    ),
    "clip and inject": optax.chain(
        CLIP,
        optax.inject_hyperparams(lowbit_optax.lowbit_adamw, hyperparam_dtype="float32")(
            1e-3
        ),
    ),
    "apply_if_finite": optax.apply_if_finite(ADAMW, 5),
    "apply_if_finite and clip": optax.apply_if_finite(optax.chain(CLIP, ADAMW), 5),
    "loss scale": loss_scaled(ADAMW),
    "loss scale and clip": loss_scaled(optax.chain(CLIP, ADAMW)),
}
READ_TWICE_MORE = {"apply_if_finite and clip", "loss scale and clip"}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_step_makes_no_new_gradients_and_copies_nothing(name):
    step = lower_step(WRAPPED[name], PARAMS)
    assert step.in_place
    assert step.temporary < 0.01
    assert step.moved < (16.26 if name in READ_TWICE_MORE else 14.26)
    assert not re.search(r" (conditional|while)\(", step.compiled.as_text())


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
    # Weights, residual and moments take 5.13 bytes and the accumulator one. To add
    # moves 4, to update the other 14.25: both kernels are counted.
    assert step.stored / step.parameters < 6.14
    assert step.moved < moved
    assert step.fused_launches == 2 * lower_step(ADAMW, PARAMS).fused_launches
    assert not re.search(r" (conditional|while)\(", step.compiled.as_text())
