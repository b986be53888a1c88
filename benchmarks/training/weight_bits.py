"""Training loss on scikit-learn's digits with weights of 10 to 16 bits.

    python -m benchmarks weight_bits --steps 3000

Weights are stored in bfloat16 and rounded to ``FloatFormat(8, m)``, as in figure 10 of
Zamirai et al. 2020. Momentum and arithmetic are float32. Each row has three seeds.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import lowbit_optax
from benchmarks import records
from lowbit_optax.precision import FloatFormat

MINUTES = 2
NEEDS = ("sklearn",)

LAYERS = ((64, 128), (128, 128), (128, 10))
TRAINED, BATCH, SEEDS = 1400, 64, 3


def formats(bits):
    """Return the weight formats with this number of bits."""
    fmt = FloatFormat(8, bits - 9)
    return {
        "nearest": lowbit_optax.nearest(float_format=fmt),
        "stochastic_rounding": lowbit_optax.stochastic_rounding(float_format=fmt),
        "kahan": lowbit_optax.kahan(float_format=fmt),
        "kahan, compensation to nearest": lowbit_optax.kahan(
            float_format=fmt, residual_rounding="nearest"
        ),
    }


def digits():
    """Return ``(images, labels)`` of the training set and of the test set."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x = jnp.asarray(data.data[order] / 16, jnp.float32)
    y = jnp.asarray(data.target[order])
    return (x[:TRAINED], y[:TRAINED]), (x[TRAINED:], y[TRAINED:])


def loss_and_accuracy(params, x, y):
    """Return the loss and the accuracy of the network, which are scalars."""
    for i in range(len(LAYERS)):
        x = (jax.nn.relu(x) if i else x) @ params[f"w{i}"].astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(x, y)
    return losses.mean(), (x.argmax(-1) == y).mean()


def trained(weights, steps, train, test, key):
    """Return final loss and test accuracy; ``weights`` is None for float32."""
    inner = optax.sgd(optax.cosine_decay_schedule(0.1, steps), momentum=0.9)
    keys = jax.random.split(key, len(LAYERS))
    params = {
        f"w{i}": jax.random.normal(keys[i], shape) * np.sqrt(2 / shape[0])
        for i, shape in enumerate(LAYERS)
    }
    tx, state = inner, inner.init(params)
    if weights is not None:
        tx = lowbit_optax.lowbit(inner, weights=weights, moments="float32", min_size=0)
        params, state = lowbit_optax.from_master(tx, params, jnp.bfloat16, None)
    x, y = train

    def body(carry, key):
        params, state = carry
        chosen = jax.random.randint(key, (BATCH,), 0, TRAINED)
        loss_fn = lambda params: loss_and_accuracy(params, x[chosen], y[chosen])[0]
        grads = jax.grad(loss_fn)(params)
        return lowbit_optax.step(tx, params, state, grads), None

    end, _ = jax.lax.scan(body, (params, state), jax.random.split(key, steps))
    return loss_and_accuracy(end[0], x, y)[0], loss_and_accuracy(end[0], *test)[1]


def row(weights, steps, train, test) -> dict[str, str]:
    keys = jax.random.split(jax.random.key(0), SEEDS)
    run = functools.partial(trained, weights, steps, train, test)
    loss, accuracy = map(np.asarray, jax.jit(jax.vmap(run))(keys))
    return {
        "training loss": f"{loss.mean():.4f}",
        "test accuracy, %": f"{100 * accuracy.mean():.2f}",
    }


def main(argv: list[str] | None = None) -> None:
    """Print a row for each format."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=3000)
    steps = parser.parse_args(argv).steps
    train, test = digits()
    rows = {"float32": None}
    for bits in (16, 14, 12, 10):
        rows |= {f"{bits} bits, {name}": x for name, x in formats(bits).items()}
    records.print_rows(
        {"weights": name, **row(weights, steps, train, test)}
        for name, weights in rows.items()
    )
