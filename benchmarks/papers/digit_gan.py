"""A small DCGAN with weights in bfloat16, with and without 8 extra bits.

    .venv/bin/python -m benchmarks digit_gan

Lewandowski and Kosson 2023, figure 5: a DCGAN trained with Adam in bfloat16 is much
better with 8 extra bits, and close to float32. In this benchmark, it draws digits of
8 x 8 pixels. The Fréchet distance compares the hidden units of a classifier for drawn
and real digits. Convolutions are 2 x 2 without overlap, and activations are float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import lowbit_optax
from benchmarks import pictures, records

LATENT, CHANNELS, BATCH, FEATURES, DRAWN = 16, 16, 64, 32, 4096
RUNS = {
    "float32": None,
    "bfloat16": lowbit_optax.nearest(),
    "bfloat16, +8": lowbit_optax.extra_bits(8, residual_rounding="nearest"),
}
NAMES = {"bfloat16": "bfloat16, nearest", "bfloat16, +8": "bfloat16, 8 extra bits"}


@functools.cache
def digits() -> tuple[jax.Array, jax.Array]:
    """Return scikit-learn's digits, float32 [n, 8, 8, 1] in [-1, 1], and labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = jnp.asarray(images / 8 - 1, jnp.float32).reshape(-1, 8, 8, 1)
    return images, jnp.asarray(labels, jnp.int32)


def init(key) -> tuple[dict, dict]:
    """Return float32 parameters of generator and discriminator."""
    shapes = (
        {
            "in": (LATENT, 2 * 2 * 4 * CHANNELS),
            "up_1": (4 * CHANNELS, 4 * CHANNELS),
            "up_2": (CHANNELS, 4),
        },
        {
            "down_1": (4, CHANNELS),
            "down_2": (4 * CHANNELS, 2 * CHANNELS),
            "out": (2 * 2 * 2 * CHANNELS, 1),
        },
    )
    keys = iter(jax.random.split(key, 6))
    return tuple(
        {
            name: jax.random.normal(next(keys), shape) * shape[0] ** -0.5
            for name, shape in each.items()
        }
        for each in shapes
    )


def generate(params: dict, latent: jax.Array) -> jax.Array:
    """Map latent vectors, float32 [n, LATENT], to images, float32 [n, 8, 8, 1]."""
    x = _normed(latent @ params["in"]).reshape(-1, 2, 2, 4 * CHANNELS)
    x = _normed(to_space(x @ params["up_1"]))
    return jnp.tanh(to_space(x @ params["up_2"]))


def discriminate(params: dict, images: jax.Array) -> jax.Array:
    """Return the logits [n] that images are real."""
    x = jax.nn.leaky_relu(to_depth(images) @ params["down_1"], 0.2)
    x = jax.nn.leaky_relu(to_depth(x) @ params["down_2"], 0.2)
    return (x.reshape(len(x), -1) @ params["out"])[:, 0]


def to_depth(x: jax.Array) -> jax.Array:
    """Move squares of 2 x 2 to channels, so that a matrix is a strided convolution."""
    n, height, width, channels = x.shape
    x = x.reshape(n, height // 2, 2, width // 2, 2, channels)
    return x.swapaxes(2, 3).reshape(n, height // 2, width // 2, 4 * channels)


def to_space(x: jax.Array) -> jax.Array:
    """Invert :func:`to_depth`. After a matrix, this is a transposed convolution."""
    n, height, width, channels = x.shape
    x = x.reshape(n, height, width, 2, 2, channels // 4)
    return x.swapaxes(2, 3).reshape(n, 2 * height, 2 * width, channels // 4)


def _normed(x: jax.Array) -> jax.Array:
    """Standardise over all axes except the channels, and rectify."""
    axes = tuple(range(x.ndim - 1))
    return jax.nn.relu(jax.nn.standardize(x, axis=axes, epsilon=1e-5))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def train(name: str, steps: int, rate: float, seed, images):
    """Return digits that the trained generator draws, and the losses of all steps."""
    tx = optax.adam(rate, b1=0.5)
    masters = init(jax.random.key(seed))
    if RUNS[name] is None:
        begun = [(params, tx.init(params)) for params in masters]
    else:
        tx = lowbit_optax.lowbit(tx, weights=RUNS[name], moments="float32", min_size=0)
        begun = [lowbit_optax.from_master(tx, p, jnp.bfloat16, None) for p in masters]
    wide = lambda params: jax.tree.map(lambda x: x.astype(jnp.float32), params)
    fooled = lambda logits, real: optax.sigmoid_binary_cross_entropy(
        logits, jnp.full(logits.shape, real)
    ).mean()
    key = jax.random.key(seed + 1000)

    def body(carry, i):
        (maker, maker_state), (judge, judge_state) = carry
        which, *keys = jax.random.split(jax.random.fold_in(key, i), 3)
        real = images[jax.random.randint(which, (BATCH,), 0, len(images))]
        first, second = (jax.random.normal(k, (BATCH, LATENT)) for k in keys)
        false = generate(wide(maker), first)

        def judge_loss(params):
            right = fooled(discriminate(params, real), 1.0)
            return right + fooled(discriminate(params, false), 0.0)

        def maker_loss(params):
            return fooled(discriminate(wide(judge), generate(params, second)), 1.0)

        judged, grads = jax.value_and_grad(judge_loss)(wide(judge))
        judge, judge_state = lowbit_optax.step(tx, judge, judge_state, grads)
        made, grads = jax.value_and_grad(maker_loss)(wide(maker))
        maker, maker_state = lowbit_optax.step(tx, maker, maker_state, grads)
        return ((maker, maker_state), (judge, judge_state)), (made, judged)

    ((maker, _), _), losses = lax.scan(body, tuple(begun), jnp.arange(steps))
    latent = jax.random.normal(jax.random.fold_in(key, steps), (DRAWN, LATENT))
    return generate(wide(maker), latent), losses


@functools.cache
def features():
    """Return a function that computes hidden units of a classifier of digits."""
    images, labels = digits()
    keys = jax.random.split(jax.random.key(0))
    params = [
        jax.random.normal(keys[0], (64, FEATURES)) / 8,
        jax.random.normal(keys[1], (FEATURES, 10)) * FEATURES**-0.5,
    ]
    hidden = lambda w, x: jax.nn.relu(x.reshape(len(x), -1) @ w)

    def loss_fn(params):
        logits = hidden(params[0], images) @ params[1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    tx = optax.adam(1e-2)

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(loss_fn)(params), state)
        return (optax.apply_updates(params, updates), state), None

    trained = lambda: lax.scan(body, (params, tx.init(params)), length=300)[0][0]
    return functools.partial(hidden, jax.jit(trained)()[0])


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Compute the distance of two normal distributions from samples in rows.

    |m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a^1/2 C_b C_a^1/2)^1/2)
    """
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    first, second = (np.cov(x, rowvar=False) for x in (a, b))
    values, vectors = np.linalg.eigh(first)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    shared = np.sqrt(np.linalg.eigvalsh(root @ second @ root).clip(0)).sum()
    apart = ((a.mean(0) - b.mean(0)) ** 2).sum()
    return float(apart + np.trace(first) + np.trace(second) - 2 * shared)


def measure(args) -> dict:
    images, _ = digits()
    real = features()(images)

    def of(name: str, seed: int) -> dict:
        made, (loss, _) = train(name, args.steps, args.learning_rate, seed, images)
        distance = frechet_distance(real, features()(made))
        return {"distance": distance, "loss": loss[-args.steps // 10 :].mean()}

    found, half = records.of_seeds(RUNS, args.seeds, of), len(images) // 2
    return {
        "distance": records.spreads(found["distance"]),
        "gaps_to_float32": records.gaps(found["distance"], "float32"),
        "generator_loss": records.spreads(found["loss"]),
        "distance_of_halves": frechet_distance(real[:half], real[half:]),
    }


@pictures.panels(2.8)
def draw(record: dict, axes) -> str:
    found = {NAMES.get(name, name): x for name, x in record["distance"].items()}
    pictures.each_seed(axes, found, "Fréchet distance to real digits", digits=1)
    axes.set(xlim=(0, None))
    return (
        "A GAN with bfloat16 weights and 8 extra bits draws digits as well as one with "
        "float32 weights"
    )


main = records.program(__name__, seeds=5, steps=2000, learning_rate=1e-3)
