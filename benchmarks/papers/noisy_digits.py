"""A small task whose gradients stay noisy: digits under noise, one image per step.

A network with one hidden layer learns scikit-learn's digits with fresh noise on every
pixel. The loss does not fall to zero, so gradients stay large and weights keep moving,
as in a network that cannot memorise its data. All seeds train at once.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from lowbit_optax import lpmm

PIXELS, CLASSES, WIDTH, COLUMNS = 64, 10, 64, 32
TRAINING, NOISE, COPIES = 1400, 1.0, 8


class Data(NamedTuple):
    """Training digits without noise, and held-out digits with noise."""

    images: jax.Array
    labels: jax.Array
    held_out_images: jax.Array
    held_out_labels: jax.Array


class Trained(NamedTuple):
    """The results of each seed.

    Attributes:
      loss, accuracy: final loss and accuracy on held-out digits.
      halfway: parameters and state after half of the steps.
    """

    loss: jax.Array
    accuracy: jax.Array
    halfway: tuple


@functools.cache
def data(noise: float = NOISE) -> Data:
    """Return scikit-learn's digits, with ``COPIES`` of each held-out digit."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = jnp.asarray((images[order] / 16 - 0.3) * 2, jnp.float32)
    labels = jnp.asarray(labels[order], jnp.int32)
    held_out = jnp.tile(images[TRAINING:], (COPIES, 1))
    held_out = with_noise(jax.random.key(0), held_out, noise)
    out_labels = jnp.tile(labels[TRAINING:], COPIES)
    return Data(images[:TRAINING], labels[:TRAINING], held_out, out_labels)


def with_noise(key: jax.Array, images: jax.Array, noise: float = NOISE) -> jax.Array:
    """Add normal noise with standard deviation ``noise`` to each pixel."""
    return images + noise * jax.random.normal(key, images.shape)


def init(key: jax.Array, width: int = WIDTH) -> dict:
    """Return float32 parameters; only ``CLASSES`` columns of ``out`` are used."""
    hidden, out = jax.random.split(key)
    return {
        "hidden": jax.random.normal(hidden, (PIXELS, width)) * PIXELS**-0.5,
        "out": jax.random.normal(out, (width, COLUMNS)) * width**-0.5,
    }


def logits_of(params: dict, images: jax.Array) -> jax.Array:
    return (jax.nn.relu(images @ params["hidden"]) @ params["out"])[:, :CLASSES]


def loss_fn(params: dict, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean loss in nats."""
    logits = logits_of(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def train(
    tx: optax.GradientTransformation,
    bits: int | None,
    steps: int,
    width: int,
    seeds: jax.Array,
    given: Data,
) -> Trained:
    """Train a network for each seed, on one image per step.

    Args:
      tx: the optimizer; its updates may be zero while it accumulates gradients.
      bits: the number of bits of quantized weights; None for float32.
      steps: the number of images.
      width: the width of the hidden layer.
      seeds: seeds of the initial parameters, the images, their noise and the rounding.
      given: the digits from :func:`data`.
    """
    differentiate = lpmm.value_and_grad(loss_fn)

    def body(key, carry, i):
        params, state = carry
        which, noise = jax.random.split(jax.random.fold_in(key, i))
        chosen = jax.random.randint(which, (1,), 0, TRAINING)
        images = with_noise(noise, given.images[chosen])
        _, grads = differentiate(params, images, given.labels[chosen])
        return lowbit_optax.step(tx, params, state, grads), None

    def run(seed):
        key = jax.random.key(seed)
        params = init(key, width)
        if bits is not None:
            params = lowbit_optax.lpmm.quantize_params(params, bits=bits, min_size=0)
        carry = params, _with_seed(tx.init(params), seed)
        half, of_key = steps // 2, functools.partial(body, key)
        halfway, _ = jax.lax.scan(of_key, carry, jnp.arange(half))
        end, _ = jax.lax.scan(of_key, halfway, jnp.arange(half, steps))
        params = lowbit_optax.lpmm.dequantize(end[0])
        held_out = given.held_out_images, given.held_out_labels
        right = logits_of(params, held_out[0]).argmax(-1) == held_out[1]
        return Trained(loss_fn(params, *held_out), right.mean(), halfway)

    return jax.vmap(run)(seeds)


def _with_seed(state, seed: jax.Array):
    """Put the seed into the state of stochastic rounding, if there is one."""
    is_seed = lambda path, _: path[-1:] == (jax.tree_util.GetAttrKey("seed"),)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: seed.astype(x.dtype) if is_seed(path, x) else x, state
    )


def rate_of(first: float, every: int, steps: int) -> Callable:
    """Return a schedule that decays to 0 from N times the rate for one image."""
    return optax.cosine_decay_schedule(first * every, steps // every)


def numbers(steps: int) -> dict:
    """Return the options of a benchmark that trains this network."""
    return {"seeds": 5, "steps": steps, "width": WIDTH}
