"""The training step and the loop around it, with evaluation.

Everything random in step `t` is a function of the seed and `t` alone: the epoch's order
on the host, crops and flips in the step.
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

FETCH_EVERY = 20  # steps between reads of the metrics: each read waits for the device


class TrainState(training.TrainState):
    """lowbit_optax's TrainState with BatchNorm's running statistics."""

    batch_stats: Any


class Run(NamedTuple):
    """The numbers of one training run.

    Attributes:
        seed: of the initialisation, the order of the images and their augmentation.
        epochs: passes over the training images.
        stop_after: stop after so many steps, if that comes first.
        batch_size: images per step; what is left of an epoch after the last whole
            batch is not used in that epoch.
    """

    seed: int
    epochs: int
    stop_after: int | None
    batch_size: int

    def steps_per_epoch(self, images: int) -> int:
        """Whole batches among so many images."""
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
    """A new state: float32 initialisation, then weights as `store` makes them."""
    variables = _init_model(model, jax.random.key(seed))
    create = functools.partial(TrainState.create, apply_fn=model.apply, tx=tx)
    # Two programs: in one, XLA may leave out the rounding between the initialisation
    # and the optimizer's state.
    params = jax.jit(store)(variables["params"])
    state = jax.jit(create)(params=params, batch_stats=variables["batch_stats"])
    # Strongly typed from the start, as a restored one is: else jit compiles twice.
    return state.replace(step=jnp.zeros((), jnp.int32))


def model_weights(params: Any, dtype: Any) -> Any:
    """What the loss is differentiated by.

    These are the parameters themselves, so that gradients have the parameters' dtype
    and take no more memory; but 8-bit floats are cast to `dtype` first, as
    a gradient in them would keep two or three bits and overflow or vanish.
    QuantizedTensors stay: `lpmm.value_and_grad` dequantises them.
    """
    return jax.tree.map(lambda p: p.astype(dtype) if p.itemsize == 1 else p, params)


def loss_scale(state: TrainState) -> LossScaleState | None:
    """The loss scale's state, which is outermost; None where there is no scale."""
    found = state.opt_state
    return found if isinstance(found, LossScaleState) else None


def make_loss_fn(model: nn.Module) -> Callable:
    """`(params, batch_stats, images, labels) -> (loss, (logits, batch_stats))`."""

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
    """The jitted `(state, key, images, labels) -> (state, (loss, accuracy))`.

    `images` are uint8 and `key` is the run's: the step folds its number into it. The
    state is donated, so the new one is written over the old one's memory.
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
            # Activations may have overflowed too, and running means would keep that.
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
    """The accuracy on `split`, in batches of `batch` images."""
    weights = _dequantized(model_weights(state.params, model.dtype))
    variables = {"params": weights, "batch_stats": state.batch_stats}
    correct = 0
    for start in range(0, len(split.labels), batch):
        images = split.images[start : start + batch]
        labels = split.labels[start : start + batch]
        # One shape, one compilation: the last batch is filled up with images of
        # class -1, which no prediction matches.
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
        model, state: as for :func:`make_train_step` and from :func:`init_state`.
        dataset: what to train and test on.
        run: how long, from which seed.
        description: stands before the progress bar.
        train_step: called like what :func:`make_train_step` makes, which is the
            default; given, it is compiled once for several runs.

    Returns:
        The trained state and the metrics: `loss` and `accuracy` of every step on the
        batch before it, `test` as pairs (step, accuracy), `seconds` of training,
        without evaluation and without the first step, which compiles; and, with a loss
        scale, the last `loss_scale` and the number of `skipped` steps.
    """
    images, labels = dataset.train
    per_epoch = run.steps_per_epoch(len(labels))
    stop = min(run.epochs * per_epoch, run.stop_after or math.inf)
    metrics: dict[str, Any] = {"loss": [], "accuracy": [], "test": [], "seconds": 0.0}
    train_step = train_step or make_train_step(model, dataset.flip)
    key = jax.random.fold_in(jax.random.key(run.seed), 1)  # key itself made the init
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
    """Moves the results of the last steps into `metrics` and the progress bar."""
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
    """Bytes per parameter of the live arrays of parameters and optimizer state.

    Momentum and sums of gradients are in the state. Gradients, activations and
    BatchNorm's running statistics are not in it.
    """
    stored = jax.tree.leaves((state.params, state.opt_state))
    params = jax.tree.leaves(
        state.params, is_leaf=lambda p: isinstance(p, QuantizedTensor)
    )
    # The size of a QuantizedTensor is that of the array it stands for.
    return sum(a.nbytes for a in stored) / sum(p.size for p in params)
