"""A network trained on a 16-bit unit: losses by rounding of the weights, and by format.

    .venv/bin/python -m benchmarks sixteen_bit_network

Zamirai et al. 2020, table 3: if every operation rounds to bfloat16, networks lose
accuracy, but not with float32 weights. Figure 11: stochastic rounding and Kahan
summation together match float32. Figure 12: without a loss scale, float16 networks lose
accuracy with either method. This benchmark trains a network with two hidden layers on
noisy digits, with SGD or AdamW. With float32 weights, the model reads weights rounded
to 16 bits, and 16-bit updates are added to a float32 copy. Additional float16 runs
multiply the loss by a power of two. SGD divides its learning rate by the same factor.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.papers import noisy_digits
from lowbit_optax import emulation, precision

WIDTH, BATCH, NOISE, COPIES = 64, 16, 0.5, 4
RATES = {"SGD": 0.02, "AdamW": 1e-3}
# Both 16-bit formats represent the decay rates, so all runs use the same values.
MOMENTUM, B1, B2, EPS = 0.875, 0.875, 0.984375, 1e-7
FORMATS = {
    "bfloat16": precision.FloatFormat(8, 7, overflow="infinity"),
    "float16": precision.FloatFormat(5, 10, specials="ieee", overflow="infinity"),
}
ROUNDINGS = {
    "float32 weights": lowbit_optax.master_copy(),
    "nearest": "nearest",
    "stochastic": "stochastic",
    "Kahan": "kahan",
    "stochastic + Kahan": lowbit_optax.kahan(rounding="stochastic", arithmetic="param"),
}


class Run(NamedTuple):
    """A training run.

    Attributes:
      optimizer: a key of ``RATES``.
      dtype: "float32", or a key of ``FORMATS``.
      rounding: a key of ``ROUNDINGS``; None for float32.
      power: the loss is multiplied by 2 to this power. SGD divides its learning rate by
        the same factor; AdamW does not need to, because it normalizes its updates.
    """

    optimizer: str
    dtype: str = "float32"
    rounding: str | None = None
    power: int = 0


def init(key: jax.Array) -> list[dict]:
    """Return float32 parameters of each layer."""
    sizes = noisy_digits.PIXELS, WIDTH, WIDTH, noisy_digits.CLASSES
    normal = lambda i, size: jax.random.normal(jax.random.fold_in(key, i), size)
    return [
        {"w": normal(i, size) * (2 / size[0]) ** 0.5, "b": jnp.zeros(size[1])}
        for i, size in enumerate(itertools.pairwise(sizes))
    ]


def logits_of(params: list[dict], images: jax.Array) -> jax.Array:
    *hidden, out = params
    for layer in hidden:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    return images @ out["w"] + out["b"]


def loss_fn(params: list[dict], scale, images: jax.Array, labels: jax.Array):
    """Return the mean loss in nats, multiplied by ``scale``; labels are one-hot."""
    logs = jax.nn.log_softmax(logits_of(params, images))
    return -jnp.mean(jnp.sum(labels * logs, 1)) * scale


def loss_in(dtype: str, *arguments):
    """Return :func:`loss_fn` in a format, for arguments of these shapes."""
    if dtype == "float32":
        return loss_fn
    formats = precision.Formats(FORMATS[dtype], FORMATS[dtype])
    plan = precision.trace(loss_fn, *arguments)
    rounded = precision.apply(loss_fn, precision.uniform(plan, formats=formats))
    return lambda *arguments: rounded(*arguments)[0]


def optimizer(name: str, dtype: str, rounding: str | None, rate):
    if dtype == "float32":
        adamw = functools.partial(optax.adamw, b1=B1, b2=B2, eps=EPS, weight_decay=0)
        return optax.sgd(rate, MOMENTUM) if name == "SGD" else adamw(rate)
    options = {"rounding": ROUNDINGS[rounding], "dtype": dtype}
    if name == "SGD":
        return emulation.sixteen_bit_sgd(rate, MOMENTUM, **options)
    return emulation.sixteen_bit_adamw(rate, B1, B2, EPS, **options)


def train(run: Run, steps: int, seed: int) -> dict[str, jax.Array]:
    """Return the loss on noisy training digits, and the accuracy on held-out digits."""
    *kind, power = run
    return _train(*kind, steps, jnp.float32(2.0**power), seed, noisy_digits.data(NOISE))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _train(name, dtype, rounding, steps, scale, seed, given):
    wide = lambda params: jax.tree.map(lambda x: x.astype(jnp.float32), params)
    labels = jax.nn.one_hot(given.labels, noisy_digits.CLASSES)
    key = jax.random.key(seed)
    loss = loss_in(dtype, init(key), scale, given.images[:BATCH], labels[:BATCH])
    decay = optax.cosine_decay_schedule(RATES[name], steps)
    rate = lambda count: decay(count) / (scale if name == "SGD" else 1)
    tx = optimizer(name, dtype, rounding, rate)

    def body(carry, i):
        params, state = carry
        which, noise = jax.random.split(jax.random.fold_in(key, i))
        chosen = jax.random.randint(which, (BATCH,), 0, noisy_digits.TRAINING)
        images = noisy_digits.with_noise(noise, given.images[chosen], NOISE)
        grads = jax.grad(loss)(wide(params), scale, images, labels[chosen])
        return lowbit_optax.step(tx, params, state, grads), None

    params = jax.tree.map(lambda x: x.astype(dtype), init(key))
    (params, _), _ = jax.lax.scan(body, (params, tx.init(params)), jnp.arange(steps))
    images = jnp.tile(given.images, (COPIES, 1))
    images = noisy_digits.with_noise(jax.random.key(1), images, NOISE)
    end = loss_fn(wide(params), 1, images, jnp.tile(labels, (COPIES, 1)))
    # A network whose loss is NaN counts as one that guesses.
    end = jnp.where(jnp.isnan(end), np.log(noisy_digits.CLASSES), end)
    answers = logits_of(wide(params), given.held_out_images).argmax(-1)
    return {"loss": end, "accuracy": jnp.mean(answers == given.held_out_labels)}


POWERS = {"SGD": (-8, -12, -16, -20), "AdamW": (3, 6, 9, 12)}
UNITS = {f"{dtype}, {x}": (dtype, x) for dtype in FORMATS for x in ROUNDINGS}


def runs_of(optimizer: str) -> dict[str, Run]:
    """Return the runs of an optimizer by name."""
    runs = {"float32": Run(optimizer)}
    runs |= {name: Run(optimizer, *unit) for name, unit in UNITS.items()}
    scaled = {f"2^{k}": k for k in POWERS[optimizer]}
    name = "float16, Kahan"
    return runs | {f"{name}, {x}": runs[name]._replace(power=scaled[x]) for x in scaled}


def measure(args) -> dict:
    optimizers = {}
    for optimizer in RATES:
        runs = runs_of(optimizer)
        of = lambda name, seed, runs=runs: train(runs[name], args.steps, seed)
        found = records.of_seeds(runs, args.seeds, of)
        spreads, gaps = records.compared(found, "float32")
        optimizers[optimizer] = {**spreads, "gaps_to_float32": gaps}
    return {"optimizers": optimizers}


@pictures.panels(4, (1, 1), sharey=True)
def draw(record: dict, *both) -> str:
    for axes, (name, found) in zip(both, record["optimizers"].items(), strict=True):
        rows = {x: y for x, y in found["loss"].items() if "2^" not in x}
        pictures.each_seed(axes, rows, "training loss, nats")
        axes.set(title=name)
    both[1].set(xscale="log")
    return (
        "With bfloat16, only nearest rounding raises the loss; float16 trains with SGD "
        "and fails with AdamW, whatever the rounding"
    )


main = records.program(__name__, seeds=3, steps=3000)
