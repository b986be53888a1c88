"""A small task on real data: the next byte of Python's standard library.

A network with one hidden layer reads embeddings of the previous 16 bytes. It trains in
seconds, and its updates become small as the learning rate decays.
"""

import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import optax

from benchmarks import records
from benchmarks.training.text import stdlib_text

CONTEXT, EMBEDDING, WIDTH, BATCH = 16, 16, 128, 128
NUMBERS = {"steps": 1500, "learning_rate": 0.1}
"""The options of a benchmark that trains this network."""


@functools.cache
def text() -> stdlib_text.Text:
    """Return the bytes to train on, and the held-out bytes."""
    return stdlib_text.load()


def batches(seed: int, steps: int) -> jax.Array:
    """Return windows of text, int32 [steps, BATCH, CONTEXT + 1]."""
    windows = stdlib_text.random_windows(
        text().train, (seed,), (steps, BATCH), CONTEXT + 1
    )
    return jnp.asarray(windows)


def held_out() -> jax.Array:
    """Return held-out windows, int32 [8192, CONTEXT + 1]."""
    return jnp.asarray(stdlib_text.even_windows(text().held_out, 8192, CONTEXT + 1))


def init(seed: int, width: int = WIDTH) -> dict:
    """Return float32 parameters."""
    keys = jax.random.split(jax.random.key(seed), 3)
    inside = CONTEXT * EMBEDDING
    return {
        "embedding": jax.random.normal(keys[0], (256, EMBEDDING)),
        "hidden": jax.random.normal(keys[1], (inside, width)) * inside**-0.5,
        "out": jax.random.normal(keys[2], (width, 256)) * width**-0.5,
    }


def loss_fn(params: dict, windows: jax.Array) -> jax.Array:
    """Return the mean loss in nats per byte."""
    h = params["embedding"][windows[:, :-1]].reshape(len(windows), -1)
    h = jax.nn.relu(h @ params["hidden"])
    logits = (h @ params["out"]).astype(jnp.float32)
    labels = windows[:, -1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def held_out_losses(names: Iterable[str], train: Callable, args) -> dict[str, list]:
    """Train with each name and seed, and return the losses on held-out text.

    Args:
      names: the names of the ways to train.
      train: ``(name, learning_rate, parameters, batches) -> parameters``.
      args: the options ``NUMBERS`` and ``seeds``.
    """
    windows = held_out()

    def of(name: str, seed: int) -> dict:
        given = batches(seed, args.steps)
        params = train(name, args.learning_rate, init(seed), given)
        return {"held-out loss": jax.jit(loss_fn)(params, windows)}

    return records.of_seeds(names, args.seeds, of)["held-out loss"]
