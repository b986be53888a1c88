"""Training with 8-bit moments and with factored moments, compared with float32.

    .venv/bin/python -m benchmarks digit_moments

A network with two hidden layers learns scikit-learn's digits with AdamW and several
seeds. All rows start from the same weights and use the same batches, and compute with
bfloat16 weights and gradients. The first row has float32 master weights. The other rows
have 8 extra bits, except the last row, which adds rounding errors to the momentum.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import lowbit_optax
from benchmarks import records
from benchmarks.training.format_rows import FEW_BITS, INTO_MU, factored_adamw

SIZES = (64, 256, 256, 10)
TRAINING = 1400
MEANS = 20
"""The number of steps per point of a curve; a point is their mean loss."""

FACTORED = functools.partial(factored_adamw, least=8)
BASE = "float32 master"
ROWS = {
    BASE: (optax.adamw, lowbit_optax.master_copy(), "float32"),
    "8 bits, the default": (optax.adamw, None, None),
    "factored, float32": (FACTORED, None, "float32"),
    "factored, 4-bit mu": (FACTORED, None, FEW_BITS),
    "factored, no extra bits": (FACTORED, INTO_MU, FEW_BITS),
}
"""The optimizer, its weights and its moments, by name."""


def digits() -> tuple[jax.Array, jax.Array]:
    """Return images and labels; the first ``TRAINING`` are for training."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return jnp.asarray(images / 16, jnp.float32), jnp.asarray(labels)


def begin(seed: int, steps: int) -> tuple[list[jax.Array], jax.Array]:
    """Return float32 weights, and the indices of the examples of each step."""
    random = np.random.default_rng(seed)
    master = [
        jnp.asarray(random.standard_normal(shape) * np.sqrt(2 / shape[0]), jnp.float32)
        for shape in itertools.pairwise(SIZES)
    ]
    random = np.random.default_rng(seed)
    return master, jnp.asarray(random.integers(0, TRAINING, (steps, 64)))


def loss(params, images, labels):
    h, params = images, lowbit_optax.lpmm.dequantize(params)
    for w in params[:-1]:
        h = jax.nn.relu(h @ w.astype(jnp.float32))
    logits = h @ params[-1].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@functools.partial(jax.jit, static_argnums=0)
def run(tx, params, state, images, labels, chosen):
    """Return the losses of all steps, and the final training and held-out losses."""

    def step(carry, batch):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, images[batch], labels[batch])
        return lowbit_optax.step(tx, params, state, grads), value

    (params, _), losses = lax.scan(step, (params, state), chosen)
    end = loss(params, images[:TRAINING], labels[:TRAINING])
    return losses, end, loss(params, images[TRAINING:], labels[TRAINING:])


def train(name: str, args) -> dict:
    """Train with several seeds, and return bytes, a curve and the final losses."""
    inner, weights, moments = ROWS[name]
    rate = optax.cosine_decay_schedule(args.learning_rate, args.steps)
    tx = lowbit_optax.lowbit(inner(rate), weights=weights, moments=moments, min_size=0)
    found, given = [], digits()
    for seed in range(args.seeds):
        master, chosen = begin(seed, args.steps)
        begun = lowbit_optax.from_master(tx, master)
        found.append(run(tx, *begun, *given, chosen))
    losses, ends, others = (np.asarray(x) for x in zip(*found, strict=True))
    large = [jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)]
    return {
        "bytes_per_parameter": lowbit_optax.memory_report(tx, large).bytes_per_param,
        "curve": records.means(losses.mean(0), max(1, args.steps // MEANS)),
        "training": records.spread(ends),
        "held_out": records.spread(others),
    }


def measure(args) -> dict:
    return {"runs": {name: train(name, args) for name in ROWS}}


main = records.program(__name__, seeds=8, steps=600, learning_rate=1e-3)
