"""A click log from a random model, and a small DLRM that learns it.

Each example has a few categorical features, whose values follow Zipf's law, and a few
dense features. The probability of a click comes from a fixed random factorization
machine. The model is a small DLRM: an embedding for each category, a network for the
dense features, their inner products, and a network on top.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks import records

TABLES, ROWS, WIDTH, DENSE = 6, 500, 16, 8
BATCH = 128


class Log(NamedTuple):
    """Categories int32 [n, TABLES], dense float32 [n, DENSE], clicks float32 [n]."""

    categories: np.ndarray
    dense: np.ndarray
    clicks: np.ndarray


def both() -> tuple[Log, Log]:
    """Return the log to train on, and the held-out log."""
    return generate(1, 100_000), generate(2, 50_000)


def order_of(seed: int, steps: int, log: Log) -> np.ndarray:
    """Return the indices of random examples for each step."""
    random = np.random.default_rng(seed)
    return random.integers(len(log.clicks), size=(steps, BATCH))


def generate(seed: int, count: int) -> Log:
    """Return a log of ``count`` examples; all seeds share one teacher."""
    teacher = np.random.default_rng(7)
    factors = teacher.standard_normal((TABLES, ROWS, 4)) * 0.5
    biases = teacher.standard_normal((TABLES, ROWS)) * 0.8
    from_dense = teacher.standard_normal((DENSE, 4)) * 0.3
    random = np.random.default_rng(seed)
    chances = 1 / np.arange(3, ROWS + 3)
    chances /= chances.sum()
    categories = random.choice(ROWS, (count, TABLES), p=chances)
    dense = random.standard_normal((count, DENSE))
    tables = np.arange(TABLES)
    vectors = np.concatenate(
        [factors[tables, categories], (dense @ from_dense)[:, None]], 1
    )
    pairs = (vectors.sum(1) ** 2 - (vectors**2).sum(1)).sum(1) / 2
    logits = 0.5 * pairs + biases[tables, categories].sum(1) - 1
    clicks = random.random(count) < 1 / (1 + np.exp(-logits))
    return Log(
        categories.astype(np.int32), dense.astype(np.float32), clicks.astype(np.float32)
    )


def init(key) -> dict:
    """Return float32 parameters: ``embeddings`` and ``linear`` layers."""
    pairs = (TABLES + 1) * TABLES // 2 + WIDTH
    sizes = {
        "bottom": (DENSE, 64),
        "out": (64, WIDTH),
        "top": (pairs, 64),
        "last": (64, 1),
    }
    keys = jax.random.split(key, len(sizes) + 1)
    linear = {
        name: {
            "w": jax.random.normal(k, size) * size[0] ** -0.5,
            "b": jnp.zeros(size[1]),
        }
        for k, (name, size) in zip(keys[1:], sizes.items(), strict=True)
    }
    tables = jax.random.uniform(keys[0], (TABLES, ROWS, WIDTH), minval=-1.0)
    return {"embeddings": tables * WIDTH**-0.5, "linear": linear}


def logits_of(params: dict, categories, dense):
    """Return the logits; activations have the dtype of the parameters."""
    tables, layers = params["embeddings"], params["linear"]
    layer = lambda name, h: h @ layers[name]["w"] + layers[name]["b"]
    looked_up = tables[jnp.arange(TABLES), categories]
    h = jax.nn.relu(layer("bottom", dense.astype(tables.dtype)))
    h = layer("out", h)
    vectors = jnp.concatenate([looked_up, h[:, None]], 1)
    products = jnp.einsum("bij,bkj->bik", vectors, vectors)
    upper = np.triu_indices(TABLES + 1, 1)
    h = jnp.concatenate([products[:, upper[0], upper[1]], h], 1)
    return layer("last", jax.nn.relu(layer("top", h)))[:, 0].astype(jnp.float32)


def loss_fn(params: dict, categories, dense, clicks):
    logits = logits_of(params, categories, dense)
    return optax.sigmoid_binary_cross_entropy(logits, clicks).mean()


@functools.partial(jax.jit, static_argnums=(0, 1, 5))
def train(tx, dtype, params, log: Log, order, counts: int = 1):
    """Train once on batches of ``log``.

    Args:
      tx: an optimizer of parameters in ``dtype``.
      dtype: the dtype of the parameters and activations.
      params: float32 parameters from :func:`init`.
      log: the examples.
      order: int32 [steps, BATCH], the indices of the examples.
      counts: the number of equally spaced steps at which canceled updates are counted.

    Returns:
      The parameters and, for each count, the share of canceled updates per leaf, or
      None in float32.
    """
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    gradients = lambda params, index: jax.grad(loss_fn)(
        params, *(part[index] for part in log)
    )

    def step(carry, index):
        grads = gradients(carry[0], index)
        return lowbit_optax.step(tx, *carry, grads), None

    def part(carry, indices):
        share = None
        if dtype != jnp.float32:
            grads = gradients(carry[0], indices[0])
            share = lowbit_optax.step_report(tx, *carry, grads).lost
        return jax.lax.scan(step, carry, indices)[0], share

    order = order.reshape(counts, -1, BATCH)
    carry, shares = jax.lax.scan(part, (params, tx.init(params)), order)
    return carry[0], shares


def trainer(runs: dict, dtype, args):
    """Return a function that trains one row with one seed, and the held-out log.

    Args:
      runs: weight formats by the name of the row; None for SGD in float32.
      dtype: the dtype of the parameters and activations of all other rows.
      args: the learning rate and the number of steps.

    Returns:
      A function of the name of a row and a seed, which returns parameters; the log.
    """
    log, held_out = both()
    sgd = optax.sgd(args.learning_rate)
    optimizers = {
        name: lowbit_optax.lowbit(sgd, weights=weights, min_size=0) if weights else sgd
        for name, weights in runs.items()
    }

    def trained(name: str, seed: int) -> dict:
        start, order = init(jax.random.key(seed)), order_of(seed, args.steps, log)
        kind = jnp.dtype(dtype if runs[name] else "float32")
        return train(optimizers[name], kind, start, log, order)[0]

    return trained, held_out


def areas(runs: dict, args) -> dict:
    """Train all rows in bfloat16, and return their areas under the curve.

    Args:
      runs: weight formats by the name of the row; None for the row ``float32``.
      args: the learning rate, the number of steps, and the number of seeds.

    Returns:
      The figures of each row, and their differences from ``float32``.
    """
    trained, held_out = trainer(runs, "bfloat16", args)

    def of(name: str, seed: int) -> dict:
        return {"auc": area_under_curve(trained(name, seed), held_out)}

    found = records.of_seeds(runs, args.seeds, of)
    spreads, gaps = records.compared(found, "float32")
    return {**spreads, "gaps_to_float32": gaps}


def area_under_curve(params: dict, log: Log) -> float:
    """Compute the area under the receiver operating characteristic from ranks."""
    scores = np.asarray(jax.jit(logits_of)(params, log.categories, log.dense))
    # Equal scores, which are common in 16-bit models, share their ranks.
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positive = log.clicks > 0
    n = positive.sum()
    area = ranks[positive].sum() - n * (n + 1) / 2
    return float(area / (n * (len(scores) - n)))
