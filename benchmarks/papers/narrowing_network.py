"""A network whose layers become narrow, trained under a precision assignment.

Its groups of tensors differ in size by a factor of 100. Each layer has a batch
normalisation, so the loss does not depend on the size of its weights. At a high
learning rate, the weights grow, and so do the inputs of the normalisation, until a
format with few bits overflows.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

import lowbit_optax
from benchmarks.papers import noisy_digits
from lowbit_optax import precision

SIZES = (noisy_digits.PIXELS, 128, 128, 64, 64, 32, 32, noisy_digits.CLASSES)
NOISE = 0.5


class Steps(NamedTuple):
    """The loss, the largest overflow of a tensor and the low ratio of each step."""

    loss: jax.Array
    overflow: jax.Array
    low_ratio: jax.Array


def init(key: jax.Array) -> list[dict]:
    """Return float32 parameters, a dictionary for each layer."""
    keys = jax.random.split(key, len(SIZES))
    return [
        {
            "w": jax.random.normal(each, (a, b)) * (2 / a) ** 0.5,
            "scale": jnp.ones(b),
            "shift": jnp.zeros(b),
        }
        for each, (a, b) in zip(keys, itertools.pairwise(SIZES), strict=False)
    ]


def loss_fn(params: list[dict], images: jax.Array, labels: jax.Array):
    """Return the mean loss in nats, and the accuracy."""
    *inner, last = params
    x = images
    for layer in inner:
        x = jax.nn.relu(_normalised(x @ layer["w"], layer["scale"], layer["shift"]))
    logits = x @ last["w"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    right = (logits.argmax(-1) == labels).mean(dtype=jnp.float32)
    return losses.mean(), right


def _normalised(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """Normalise with the mean and the variance of the batch."""
    mean = x.mean(0)
    variance = jnp.square(x - mean).mean(0)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + shift


def plan_of(batch: int) -> precision.PrecisionPlan:
    """Return the tensors of the loss of ``batch`` images."""
    params = jax.eval_shape(init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((batch, SIZES[0]), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return precision.trace(loss_fn, params, images, labels, has_aux=True)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def train(
    rate: float,
    steps: int,
    batch: int,
    given: noisy_digits.Data,
    seed: jax.Array,
    assignment: Any,
    promotes: jax.Array,
) -> tuple[jax.Array, Steps]:
    """Return the steps, and the accuracy on held-out digits in the training formats.

    Args:
      rate: the initial learning rate, which decays to 0 in a cosine.
      steps: the number of steps.
      batch: the number of images per step.
      given: the digits from ``noisy_digits.data(NOISE)``.
      seed: the seed of the initial parameters, the images and their noise.
      assignment: the formats; None for float32.
      promotes: whether tensors that overflow are promoted.
    """
    tx = optax.sgd(optax.cosine_decay_schedule(rate, steps), 0.9)
    if assignment is not None:
        scaling = lowbit_optax.loss_scaling.backoff_scale(2.0**10, period=100)
        tx = lowbit_optax.with_loss_scale(tx, scaling)
    key = jax.random.key(seed)
    params = init(key)

    def gradients(params, state, assignment, images, labels):
        if assignment is None:
            (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(
                params, images, labels
            )
            return grads, None, Steps(loss, jnp.float32(0), jnp.float32(0))
        rounded = precision.apply(loss_fn, assignment, has_aux=True)
        scaled = lowbit_optax.scaled_value_and_grad(rounded, has_aux=True)
        (loss, (_, overflow)), grads = scaled(params, state, images, labels)
        found = Steps(loss, overflow.max(), assignment.low_ratio)
        promoted = precision.promote(assignment, overflow)
        choose = lambda new, old: jnp.where(promotes, new, old)
        return grads, jax.tree.map(choose, promoted, assignment), found

    def body(carry, i):
        params, state, assignment = carry
        which, noise = jax.random.split(jax.random.fold_in(key, i))
        chosen = jax.random.randint(which, (batch,), 0, len(given.labels))
        images = noisy_digits.with_noise(noise, given.images[chosen], NOISE)
        grads, assignment, found = gradients(
            params, state, assignment, images, given.labels[chosen]
        )
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state, assignment), found

    start = params, tx.init(params), assignment
    (params, _, assignment), found = lax.scan(body, start, jnp.arange(steps))
    held_out = given.held_out_images, given.held_out_labels
    if assignment is None:
        return loss_fn(params, *held_out)[1], found
    rounded = precision.apply(loss_fn, assignment, has_aux=True)
    return rounded(params, *held_out)[1][0], found
