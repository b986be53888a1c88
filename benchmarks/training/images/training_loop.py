"""The training step, the training loop and the evaluation.

All random numbers of step `t` depend only on the seed and `t`: the order of the images
on the host, and crops and flips in the step.
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

from benchmarks.training.images.cifar_data import Dataset, Split
from lowbit_optax import scaled_value_and_grad, training
from lowbit_optax.loss_scaling import LossScaleState
from tools.models.classifier import make_loss_fn

# Statistics of the channels of CIFAR-10's training images. The digits use them, too,
# because the first BatchNorm corrects the difference.
MEAN = (0.4914, 0.4822, 0.4465)
STANDARD_DEVIATION = (0.2470, 0.2435, 0.2616)
PADDING = 4


def normalise(images: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Scales uint8 [batch, 32, 32, 3] to mean 0 and variance 1 over the dataset."""
    images = images.astype(jnp.float32) / 255
    scaled = (images - jnp.asarray(MEAN)) / jnp.asarray(STANDARD_DEVIATION)
    return scaled.astype(dtype)


def crop_and_flip(key: jax.Array, images: jax.Array, flip: bool = True) -> jax.Array:
    """Moves each image by up to 4 pixels, and mirrors half of the images.

    Args:
        key: the random key; the same key gives the same crops.
        images: [batch, height, width, channels], any dtype.
        flip: whether to mirror images; False if mirroring changes the class.
    """
    crop_key, flip_key = jax.random.split(key)
    batch, *shape = images.shape
    border = (PADDING, PADDING)
    padded = jnp.pad(images, ((0, 0), border, border, (0, 0)))
    corners = jax.random.randint(crop_key, (batch, 2), 0, 2 * PADDING + 1)

    def crop(image, corner):
        return jax.lax.dynamic_slice(image, (corner[0], corner[1], 0), shape)

    cropped = jax.vmap(crop)(padded, corners)
    if not flip:
        return cropped
    mirror = jax.random.bernoulli(flip_key, shape=(batch, 1, 1, 1))
    return jnp.where(mirror, cropped[:, :, ::-1], cropped)


class TrainState(training.TrainState):
    """The TrainState of lowbit_optax, with the running statistics of BatchNorm."""

    batch_stats: Any


@functools.partial(jax.jit, static_argnums=0)
def _init_model(model, key):
    return model.init(key, jnp.zeros((1, 32, 32, 3)), train=False)


def init_state(
    model: nn.Module,
    tx: optax.GradientTransformation,
    store: Callable[[Any], Any],
    seed: int,
) -> TrainState:
    """Initialize float32 weights, convert them with `store`, and return a state."""
    variables = _init_model(model, jax.random.key(seed))
    create = functools.partial(TrainState.create, apply_fn=model.apply, tx=tx)
    # In a single program, XLA could omit the rounding of the weights from which the
    # optimizer state is made.
    params = jax.jit(store)(variables["params"])
    state = jax.jit(create)(params=params, batch_stats=variables["batch_stats"])
    # An integer of Python would be weakly typed, and jit would compile twice.
    return state.replace(step=jnp.zeros((), jnp.int32))


def make_train_step(
    model: nn.Module, flip: bool
) -> Callable[..., tuple[TrainState, jax.Array]]:
    """Return the jitted `(state, key, images, labels) -> (state, loss)`.

    `images` are uint8. `key` is the same for all steps, and each step folds its index
    into the key. The state is donated.
    """
    loss_fn = make_loss_fn(model)

    def train_step(state, key, images, labels):
        images = crop_and_flip(jax.random.fold_in(key, state.step), images, flip)
        batch = state.batch_stats, normalise(images, model.dtype), labels
        scale = state.opt_state
        if not isinstance(scale, LossScaleState):
            differentiate = jax.value_and_grad(loss_fn, has_aux=True)
            (loss, batch_stats), grads = differentiate(state.params, *batch)
            new = state.apply_gradients(grads=grads, batch_stats=batch_stats)
            return new, loss
        differentiate = scaled_value_and_grad(loss_fn, has_aux=True)
        (loss, batch_stats), grads = differentiate(state.params, scale, *batch)
        new = state.apply_gradients(grads=grads, batch_stats=batch_stats)
        # If activations overflowed, the running means must not include them.
        is_skipped = new.opt_state.skipped != scale.skipped
        choose = functools.partial(jnp.where, is_skipped)
        kept = jax.tree.map(choose, state.batch_stats, batch_stats)
        return new.replace(batch_stats=kept), loss

    return jax.jit(train_step, donate_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def _count_correct(model, variables, images, labels):
    logits = model.apply(variables, normalise(images, model.dtype), train=False)
    return (logits.argmax(-1) == labels).sum()


def evaluate(model: nn.Module, state: TrainState, split: Split, batch: int) -> float:
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
    state: TrainState,
    dataset: Dataset,
    args: argparse.Namespace,
    seed: int,
) -> tuple[TrainState, float]:
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


def bytes_per_parameter(state: TrainState) -> float:
    """Return the bytes per parameter of the arrays of parameters and optimizer state.

    The result does not include gradients, activations and the running statistics of
    BatchNorm.
    """
    stored = jax.tree.leaves((state.params, state.opt_state))
    size = sum(x.size for x in jax.tree.leaves(state.params))
    return sum(x.nbytes for x in stored) / size
