"""Training steps with a precision assignment, compiled once per model.

The assignment is part of the state, so that a step can promote tensors, and runs with
other assignments use the same compilation.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks.training.images import training_loop
from benchmarks.training.images.training_loop import crop_and_flip, normalise
from lowbit_optax import precision
from tools.models.classifier import arguments_of, make_loss_fn

INITIAL_SCALE = 2.0**16
THRESHOLD = 0.01  # a tensor with a larger overflow ratio is promoted


class MixedState(training_loop.TrainState):
    """A TrainState with a precision assignment.

    Attributes:
        assignment: the assignment of the next step; None is float32.
        promotes: whether tensors that overflow are promoted, a bool scalar.
        ratio_sum: the sum of the low-precision ratios of all steps, a float32 scalar.
    """

    assignment: Any
    promotes: jax.Array
    ratio_sum: jax.Array


def make_plan(model: nn.Module, batch_size: int) -> precision.PrecisionPlan:
    """Trace the loss, and return its tensors and their groups."""
    arguments = arguments_of(model, batch_size)
    return precision.trace(make_loss_fn(model), *arguments, has_aux=True)


def make_optimizer(
    rate: optax.Schedule, weight_decay: float, period: int | None
) -> optax.GradientTransformation:
    """Return SGD with momentum 0.9 for float32 weights.

    Args:
        rate: the learning rate.
        weight_decay: the weight decay.
        period: the number of steps after which the loss scale rises; None for float32
            training without a loss scale.
    """
    sgd = optax.chain(
        optax.add_decayed_weights(weight_decay), optax.sgd(rate, momentum=0.9)
    )
    if period is None:
        return sgd
    scaling = lowbit_optax.loss_scaling.backoff_scale(INITIAL_SCALE, period=period)
    return lowbit_optax.with_loss_scale(sgd, scaling)


def init_state(
    model: nn.Module, tx: optax.GradientTransformation, seed: int
) -> MixedState:
    """Return a state on the host, without an assignment; see :func:`start`."""
    state = training_loop.init_state(model, tx, lambda params: params, seed)
    mixed = MixedState(
        **vars(state),
        assignment=None,
        promotes=np.bool_(False),
        ratio_sum=np.float32(0),
    )
    return jax.device_get(mixed)


def start(state: MixedState, assignment: Any, promotes: bool) -> MixedState:
    """Return a copy of `state` with an assignment. A step may donate the copy."""
    state = state.replace(assignment=assignment, promotes=np.bool_(promotes))
    return jax.tree.map(lambda x: jnp.array(x, copy=True), state)


def make_train_step(model: nn.Module, flip: bool) -> Callable:
    """Return the jitted `(state, key, images, labels) -> (state, loss)`.

    It is `training_loop.make_train_step`, with the loss and its gradient rounded to
    `state.assignment`. All assignments of one model share a compilation.
    """
    loss_fn = make_loss_fn(model)

    def gradient(state, *batch):
        if state.assignment is None:
            gradient = jax.value_and_grad(loss_fn, has_aux=True)
            value, grads = gradient(state.params, *batch)
            return value, grads, state
        mixed = precision.apply(loss_fn, state.assignment, has_aux=True)
        gradient = lowbit_optax.scaled_value_and_grad(mixed, has_aux=True)
        (loss, (aux, overflow)), grads = gradient(state.params, state.opt_state, *batch)
        promoted = precision.promote(state.assignment, overflow, threshold=THRESHOLD)
        assignment = jax.tree.map(
            lambda new, old: jnp.where(state.promotes, new, old),
            promoted,
            state.assignment,
        )
        ratio_sum = state.ratio_sum + state.assignment.low_ratio
        state = state.replace(assignment=assignment, ratio_sum=ratio_sum)
        return (loss, aux), grads, state

    def train_step(state, key, images, labels):
        images = crop_and_flip(jax.random.fold_in(key, state.step), images, flip)
        inputs = normalise(images, jnp.float32)
        (loss, batch_stats), grads, state = gradient(
            state, state.batch_stats, inputs, labels
        )
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss

    return jax.jit(train_step, donate_argnums=0)
