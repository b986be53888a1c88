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

from benchmarks.training.images.augmentation import crop_and_flip, normalise
from benchmarks.training.images.cifar_data import Dataset, Split
from lowbit_optax import lpmm, scaled_value_and_grad, training
from lowbit_optax.loss_scaling import LossScaleState
from lowbit_optax.lpmm import QuantizedTensor, dequantize
from tools.models.classifier import make_loss_fn


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


def loss_scale(state: TrainState) -> LossScaleState | None:
    """Return the state of the loss scale, or None if the optimizer has no scale."""
    found = state.opt_state
    return found if isinstance(found, LossScaleState) else None


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
        scale = loss_scale(state)
        if scale is None:
            differentiate = lpmm.value_and_grad(loss_fn, has_aux=True)
            (loss, batch_stats), grads = differentiate(state.params, *batch)
            new = state.apply_gradients(grads=grads, batch_stats=batch_stats)
            return new, loss
        differentiate = scaled_value_and_grad(loss_fn, has_aux=True)
        (loss, batch_stats), grads = differentiate(state.params, scale, *batch)
        new = state.apply_gradients(grads=grads, batch_stats=batch_stats)
        # If activations overflowed, the running means must not include them.
        is_skipped = loss_scale(new).skipped != scale.skipped
        choose = functools.partial(jnp.where, is_skipped)
        kept = jax.tree.map(choose, state.batch_stats, batch_stats)
        return new.replace(batch_stats=kept), loss

    return jax.jit(train_step, donate_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def _count_correct(model, variables, images, labels):
    logits = model.apply(variables, normalise(images, model.dtype), train=False)
    return (logits.argmax(-1) == labels).sum()


_dequantized = jax.jit(dequantize)


def evaluate(model: nn.Module, state: TrainState, split: Split, batch: int) -> float:
    """Return the accuracy on `split`, computed in batches of `batch` images."""
    weights = _dequantized(state.params)
    variables = {"params": weights, "batch_stats": state.batch_stats}
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

    The optimizer state includes momentum and accumulated gradients. The result does not
    include gradients, activations and the running statistics of BatchNorm.
    """
    stored = jax.tree.leaves((state.params, state.opt_state))
    params = jax.tree.leaves(
        state.params, is_leaf=lambda p: isinstance(p, QuantizedTensor)
    )
    # A QuantizedTensor has the size of the array that it represents.
    return sum(a.nbytes for a in stored) / sum(p.size for p in params)
