"""The training step, the training loop and the evaluation.

All random numbers of step `t` depend only on the seed and `t`: the order of the images
on the host, and crops and flips in the step.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from benchmarks.training.images.augmentation import crop_and_flip, normalise
from benchmarks.training.images.cifar_data import Dataset, Split, epoch_order
from lowbit_optax import lpmm, scaled_value_and_grad, training
from lowbit_optax.loss_scaling import LossScaleState
from lowbit_optax.lpmm import QuantizedTensor, dequantize

FETCH_EVERY = 20  # steps between reads of the metrics, which wait for the device


class TrainState(training.TrainState):
    """The TrainState of lowbit_optax, with the running statistics of BatchNorm."""

    batch_stats: Any


class Run(NamedTuple):
    """The seed and the length of one training run.

    Attributes:
        seed: determines the initial weights, the order of the images and their
            augmentation.
        epochs: the number of passes over the training images.
        stop_after: the maximum number of steps, or None.
        batch_size: images per step. An epoch skips images that do not fill a batch.
    """

    seed: int
    epochs: int
    stop_after: int | None
    batch_size: int

    def steps_per_epoch(self, images: int) -> int:
        """Returns the number of whole batches in `images` images."""
        return images // self.batch_size


@functools.partial(jax.jit, static_argnums=0)
def _init_model(model, key):
    return model.init(key, jnp.zeros((1, 32, 32, 3)), train=False)


def init_state(
    model: nn.Module,
    tx: optax.GradientTransformation,
    store: Callable[[Any], Any],
    seed: int,
) -> TrainState:
    """Initializes float32 weights, converts them with `store`, and returns a state."""
    variables = _init_model(model, jax.random.key(seed))
    create = functools.partial(TrainState.create, apply_fn=model.apply, tx=tx)
    # In a single program, XLA could omit the rounding of the weights from which the
    # optimizer state is made.
    params = jax.jit(store)(variables["params"])
    state = jax.jit(create)(params=params, batch_stats=variables["batch_stats"])
    # An integer of Python would be weakly typed, and jit would compile twice.
    return state.replace(step=jnp.zeros((), jnp.int32))


def model_weights(params: Any, dtype: Any) -> Any:
    """Returns the weights with respect to which the loss is differentiated.

    These are usually the parameters, so that gradients have their dtype and memory.
    8-bit floats are cast to `dtype`, because 8-bit gradients would have only two or
    three bits, and could overflow or vanish. QuantizedTensors are unchanged, because
    `lpmm.value_and_grad` dequantises them.
    """
    return jax.tree.map(lambda p: p.astype(dtype) if p.itemsize == 1 else p, params)


def loss_scale(state: TrainState) -> LossScaleState | None:
    """Returns the state of the loss scale, or None if the optimizer has no scale."""
    found = state.opt_state
    return found if isinstance(found, LossScaleState) else None


def make_loss_fn(model: nn.Module) -> Callable:
    """Returns `(params, batch_stats, images, labels) -> (loss, (logits, stats))`."""

    def loss_fn(params, batch_stats, images, labels):
        logits, updates = model.apply(
            {"params": params, "batch_stats": batch_stats},
            images,
            train=True,
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (logits, updates["batch_stats"])

    return loss_fn


def make_train_step(
    model: nn.Module, flip: bool
) -> Callable[..., tuple[TrainState, tuple[jax.Array, jax.Array]]]:
    """Returns the jitted `(state, key, images, labels) -> (state, (loss, accuracy))`.

    `images` are uint8. `key` is the same for all steps, and each step folds its index
    into the key. The state is donated.
    """
    loss_of = make_loss_fn(model)

    def train_step(state, key, images, labels):
        images = crop_and_flip(jax.random.fold_in(key, state.step), images, flip)
        inputs = normalise(images, model.dtype)

        def loss_fn(weights):
            return loss_of(weights, state.batch_stats, inputs, labels)

        weights = model_weights(state.params, model.dtype)
        scale = loss_scale(state)
        if scale is None:
            differentiate = lpmm.value_and_grad(loss_fn, has_aux=True)
            (loss, (logits, batch_stats)), grads = differentiate(weights)
        else:
            differentiate = scaled_value_and_grad(loss_fn, has_aux=True)
            (loss, (logits, batch_stats)), grads = differentiate(weights, scale)
        accuracy = (logits.argmax(-1) == labels).mean()
        new = state.apply_gradients(grads=grads, batch_stats=batch_stats)
        if scale is not None:
            # If activations overflowed, the running means must not include them.
            is_skipped = loss_scale(new).skipped != scale.skipped
            kept = jax.tree.map(
                functools.partial(jnp.where, is_skipped), state.batch_stats, batch_stats
            )
            new = new.replace(batch_stats=kept)
        return new, (loss, accuracy)

    return jax.jit(train_step, donate_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def _count_correct(model, variables, images, labels):
    logits = model.apply(variables, normalise(images, model.dtype), train=False)
    return (logits.argmax(-1) == labels).sum()


_dequantized = jax.jit(dequantize)


def evaluate(model: nn.Module, state: TrainState, split: Split, batch: int) -> float:
    """Returns the accuracy on `split`, computed in batches of `batch` images."""
    weights = _dequantized(model_weights(state.params, model.dtype))
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
    model: nn.Module,
    state: TrainState,
    dataset: Dataset,
    run: Run,
    description: str,
    train_step: Callable | None = None,
) -> tuple[TrainState, dict[str, Any]]:
    """Trains `state`.

    Args:
        model: the network.
        state: the state that :func:`init_state` returned.
        dataset: the images for training and test.
        run: the seed and the length of the training.
        description: the text in front of the progress bar.
        train_step: a result of :func:`make_train_step`, which several runs can share.

    Returns:
        The trained state and the metrics: the `loss` and `accuracy` of every step on
        its batch, before the update; `test` as pairs (step, accuracy); the `seconds` of
        training, without evaluation and without the first step, which compiles. With a
        loss scale, also the last `loss_scale` and the number of `skipped` steps.
    """
    images, labels = dataset.train
    per_epoch = run.steps_per_epoch(len(labels))
    stop = min(run.epochs * per_epoch, run.stop_after or math.inf)
    metrics: dict[str, Any] = {"loss": [], "accuracy": [], "test": [], "seconds": 0.0}
    train_step = train_step or make_train_step(model, dataset.flip)
    # The key of the seed itself initialized the model.
    key = jax.random.fold_in(jax.random.key(run.seed), 1)
    pending: list[Any] = []
    clock = None

    with tqdm(range(stop), description, unit="step") as progress:
        for step in progress:
            epoch, batch = divmod(step, per_epoch)
            if batch == 0:
                order = epoch_order(len(labels), run.seed, epoch)
            rows = order[batch * run.batch_size : (batch + 1) * run.batch_size]
            state, results = train_step(state, key, images[rows], labels[rows])
            pending.append(results)

            epoch_ends = batch + 1 == per_epoch or step + 1 == stop
            if clock is None or epoch_ends or len(pending) == FETCH_EVERY:
                _fetch(pending, metrics, progress, loss_scale(state))
                now = time.perf_counter()
                metrics["seconds"] += now - (now if clock is None else clock)
                clock = now
            if epoch_ends:
                accuracy = evaluate(model, state, dataset.test, run.batch_size)
                metrics["test"].append([step + 1, accuracy])
                clock = time.perf_counter()
    return state, metrics


def _fetch(
    pending: list[Any],
    metrics: dict[str, Any],
    progress: tqdm,
    scale: LossScaleState | None,
) -> None:
    """Adds the results of the last steps to `metrics` and the progress bar."""
    for loss, accuracy in jax.device_get(pending):
        metrics["loss"].append(float(loss))
        metrics["accuracy"].append(float(accuracy))
    pending.clear()
    recent = slice(-FETCH_EVERY, None)
    shown = {name: np.mean(metrics[name][recent]) for name in ("loss", "accuracy")}
    if metrics["test"]:
        shown["test"] = metrics["test"][-1][1]
    texts = {name: f"{value:.3f}" for name, value in shown.items()}
    if scale is not None:
        metrics["loss_scale"] = float(scale.scale)
        metrics["skipped"] = int(scale.skipped)
        texts["scale"] = f"{metrics['loss_scale']:g}"
        texts["skipped"] = str(metrics["skipped"])
    progress.set_postfix(texts)


def bytes_per_parameter(state: TrainState) -> float:
    """Returns the bytes per parameter of the arrays of parameters and optimizer state.

    The optimizer state includes momentum and accumulated gradients. The result does not
    include gradients, activations and the running statistics of BatchNorm.
    """
    stored = jax.tree.leaves((state.params, state.opt_state))
    params = jax.tree.leaves(
        state.params, is_leaf=lambda p: isinstance(p, QuantizedTensor)
    )
    # A QuantizedTensor has the size of the array that it represents.
    return sum(a.nbytes for a in stored) / sum(p.size for p in params)
