"""Training with a precision assignment: the state, its step, the loop, the accuracy.

The assignment is part of the state, so that a step can promote tensors, and runs with
other assignments use the same compilation. All random numbers of step `t` depend only
on the seed and `t`: the order of the images on the host, and crops and flips in the
step.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import lowbit_optax
from benchmarks.training.images.cifar_data import Dataset, Split
from lowbit_optax import precision, training
from tools.models.classifier import make_loss_fn

# Statistics of the channels of CIFAR-10's training images. The digits use them, too,
# because the first BatchNorm corrects the difference.
MEAN = (0.4914, 0.4822, 0.4465)
STANDARD_DEVIATION = (0.2470, 0.2435, 0.2616)
PADDING = 4
INITIAL_SCALE = 2.0**16
THRESHOLD = 0.01  # a tensor with a larger overflow ratio is promoted


class MixedState(training.TrainState):
    """The TrainState of lowbit_optax, with BatchNorm and a precision assignment.

    Attributes:
        batch_stats: the running statistics of BatchNorm.
        assignment: the assignment of the next step; None is float32.
        promotes: whether tensors that overflow are promoted, a bool scalar.
        ratio_sum: the sum of the low-precision ratios of all steps, a float32 scalar.
    """

    batch_stats: Any
    assignment: Any
    promotes: Any
    ratio_sum: Any


def normalise(images: jax.Array) -> jax.Array:
    """Scales uint8 [batch, 32, 32, 3] to mean 0 and variance 1 over the dataset."""
    images = images.astype(jnp.float32) / 255
    return (images - jnp.asarray(MEAN)) / jnp.asarray(STANDARD_DEVIATION)


def crop_and_flip(key: jax.Array, images: jax.Array, flip: bool = True) -> jax.Array:
    """Moves each image by up to 4 pixels, and mirrors half of the images.

    Args:
        key: the random key; the same key gives the same crops.
        images: [batch, height, width, channels], any dtype.
        flip: whether to mirror images; False if mirroring changes the class.
    """
    crop_key, flip_key = jax.random.split(key)
    batch, *shape = images.shape
    padded = jnp.pad(images, ((0, 0), *[(PADDING, PADDING)] * 2, (0, 0)))
    corners = jax.random.randint(crop_key, (batch, 2), 0, 2 * PADDING + 1)

    def crop(image, corner):
        return jax.lax.dynamic_slice(image, (corner[0], corner[1], 0), shape)

    cropped = jax.vmap(crop)(padded, corners)
    if not flip:
        return cropped
    mirror = jax.random.bernoulli(flip_key, shape=(batch, 1, 1, 1))
    return jnp.where(mirror, cropped[:, :, ::-1], cropped)


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


@functools.partial(jax.jit, static_argnums=0)
def _init_model(model, key):
    return model.init(key, jnp.zeros((1, 32, 32, 3)), train=False)


def init_state(
    model: nn.Module, tx: optax.GradientTransformation, seed: int
) -> MixedState:
    """Return a state on the host, without an assignment; see :func:`start`."""
    state = MixedState.create(
        apply_fn=model.apply,
        tx=tx,
        **_init_model(model, jax.random.key(seed)),
        assignment=None,
        promotes=np.bool_(False),
        ratio_sum=np.float32(0),
    )
    # An integer of Python would be weakly typed, and jit would compile twice.
    return jax.device_get(state.replace(step=np.int32(0)))


def start(state: MixedState, assignment: Any, promotes: bool) -> MixedState:
    """Return a copy of `state` with an assignment. A step may donate the copy."""
    state = state.replace(assignment=assignment, promotes=np.bool_(promotes))
    return jax.tree.map(lambda x: jnp.array(x, copy=True), state)


def make_train_step(model: nn.Module, flip: bool) -> Callable:
    """Return the jitted `(state, key, images, labels) -> (state, loss)`.

    `images` are uint8. `key` is the same for all steps, and each step folds its index
    into the key. The loss and its gradient are rounded to `state.assignment`. All
    assignments of one model share a compilation. The state is donated.
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
        inputs = normalise(images)
        (loss, batch_stats), grads, state = gradient(
            state, state.batch_stats, inputs, labels
        )
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss

    return jax.jit(train_step, donate_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def _count_correct(model, variables, images, labels):
    logits = model.apply(variables, normalise(images), train=False)
    return (logits.argmax(-1) == labels).sum()


def evaluate(model: nn.Module, state: MixedState, split: Split, batch: int) -> float:
    """Return the accuracy on `split`, computed in batches of `batch` images."""
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    correct = 0
    for start in range(0, len(split.labels), batch):
        images = split.images[start : start + batch]
        labels = split.labels[start : start + batch]
        # Equal shapes need one compilation. Fill the last batch with images of class
        # -1, which no prediction matches.
        missing = batch - len(labels)
        images = np.pad(images, ((0, missing), (0, 0), (0, 0), (0, 0)))
        labels = np.pad(labels, (0, missing), constant_values=-1)
        correct += int(_count_correct(model, variables, images, labels))
    return correct / len(split.labels)


def fit(
    step: Callable,
    state: MixedState,
    dataset: Dataset,
    args: argparse.Namespace,
    seed: int,
) -> tuple[MixedState, float]:
    """Train, and return the state and the mean training loss of the last epoch.

    Args:
      step: a result of :func:`make_train_step`, which several runs can share.
      state: the state that :func:`init_state` returned.
      dataset: the images.
      args: the options `epochs` and `batch_size`. An epoch skips images that do not
        fill a batch.
      seed: the seed of the order of the images and of their augmentation.
    """
    images, labels = dataset.train
    steps = dataset.steps_per_epoch(args.batch_size)
    # The key of the seed itself initialized the model.
    key = jax.random.fold_in(jax.random.key(seed), 1)
    loss = np.nan
    for epoch in tqdm(range(args.epochs), unit="epoch", leave=False, disable=None):
        order = np.random.default_rng([seed, epoch]).permutation(len(labels))
        losses = []
        for rows in order[: steps * args.batch_size].reshape(steps, -1):
            state, found = step(state, key, images[rows], labels[rows])
            losses.append(found)
        loss = np.mean(jax.device_get(losses), dtype=np.float64)
    return state, float(loss)
