"""Experimental codes that store both moments in 4 bits, trained on digits.

    .venv/bin/python -m benchmarks four_bit_moments

The network, its initial weights and the batches are the same as in ``low_moments``.
Weights are float32. This module encodes and decodes the moments itself, and none of
these codes is a format of the package. Except in the float32 rows, the ratio of ``mu``
to the root of ``nu`` is rounded to 4 bits.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks import records
from benchmarks.training.low_moments import TRAINING, begin, digits, loss, table
from lowbit_optax._numerics.code_kinds import code_of
from lowbit_optax._numerics.relative import product, quotient
from pallas_kernels.layout import TILE_COLUMNS, TILE_ROWS

MINUTES = 4
NEEDS = ("sklearn",)

B1, B2, EPS = 0.9, 0.999, 1e-8
OF_RANK_ONE = (np.arange(16) / 15) ** 4
RESET = 100
"""The number of steps after which moments are set to zero, in rows with a reset."""


def blocks(x):
    """Return x as blocks of 32 neighbours, whose axes are 1 and 3."""
    return x.reshape(-1, TILE_ROWS, x.shape[1] // TILE_COLUMNS, TILE_COLUMNS)


def largest(x):
    return jnp.max(x, (1, 3), keepdims=True)


def unit(words):
    return (words >> 8).astype(jnp.float32) * 2.0**-24


def coded(name, bits, signed):
    """Return a function that encodes and decodes with a code of the library."""
    code = code_of(name, bits, signed, "bfloat16")

    def trip(x, words):
        keys = [jnp.maximum(largest(key), 0) for key in code.keys(blocks(x))]
        ready = code.prepare(code.scale_of_keys(keys).astype(jnp.float32))
        fields = code.encode_fields(blocks(x), ready, blocks(words))
        return code.decode_fields(fields, ready).reshape(x.shape)

    return trip


def dithered(x, words):
    """Round to 15 equal steps, with dither that decoding subtracts again."""
    scale = largest(jnp.abs(blocks(x)))
    step = jnp.where(scale > 0, scale, 1) / 7
    dither = unit(blocks(words)) - 0.5
    fields = jnp.clip(jnp.round(blocks(x) / step + dither), -7, 7)
    values = jnp.where(blocks(x) == 0, 0, (fields - dither) * step)
    return values.reshape(x.shape)


def octaves(x, words):
    """Round to the maximum of the block times a power of two from 2^0 to 2^-14."""
    scale, positive = largest(blocks(x)), blocks(x) > 0
    share = jnp.where(positive, blocks(x) / jnp.where(scale > 0, scale, 1), 1)
    power = jnp.clip(jnp.floor(jnp.log2(share) + unit(blocks(words))), -14, 0)
    return jnp.where(positive, scale * 2.0**power, 0).reshape(x.shape)


def of_rank_one(x, words):
    """Round to ``(c/15)^4`` times the smaller of the row's and the column's maximum."""
    scale = jnp.minimum(x.max(1, keepdims=True), x.max(0, keepdims=True))
    share, levels = x / jnp.where(scale > 0, scale, 1), jnp.float32(OF_RANK_ONE)
    below = jnp.clip(jnp.searchsorted(levels, share, side="right") - 1, 0, 14)
    low, high = levels[below], levels[below + 1]
    tiny = jnp.finfo(jnp.float32).tiny
    place = jnp.log(jnp.maximum(share, tiny) / jnp.maximum(low, tiny))
    is_above = unit(words) < place / jnp.log(high / jnp.maximum(low, tiny))
    value = jnp.maximum(jnp.where(is_above, high, low), levels[1])
    return jnp.where(x > 0, value * scale, 0)


def of_factors(x, words):
    """Divide x by powers of two per row and column, and use nested codes.

    The product of the powers is close to the estimate of Adafactor, which is
    ``row mean * column mean / mean``.
    """
    power = lambda mean: jnp.round(jnp.log2(jnp.maximum(mean, 1e-37)))
    rows, columns = power(x.mean(1, keepdims=True)), power(x.mean(0, keepdims=True))
    shift = jnp.clip(rows + columns - power(x.mean()), -120, 120)
    return NESTED(x * 2.0**-shift, words) * 2.0**shift


SAME = lambda x, words: x
FOUR, NESTED = coded("companded", 4, True), coded("nested", 4, False)
# The codes of mu and of nu, their bytes per parameter, and whether moments are reset.
IDEAS = {
    "float32": (SAME, SAME, 8, False),
    "6-bit nu: low": (FOUR, coded("nested", 6, False), 1.375, False),
    "root of nu": (FOUR, coded("sqrt", 4, False), 1.125, False),
    "nested nu": (FOUR, NESTED, 1.125, False),
    "dithered mu, nested nu": (dithered, NESTED, 1.125, False),
    "logarithmic nu": (FOUR, octaves, 1.125, False),
    "a scale of nu per row and column": (FOUR, of_rank_one, 1.0625, False),
    "nested nu over powers of two per row and column": (FOUR, of_factors, 1.125, False),
    "nested nu, reset": (FOUR, NESTED, 1.125, True),
    "float32, reset": (SAME, SAME, 8, True),
}


def padded(x):
    """Return x, with columns of zeros up to whole blocks."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % TILE_COLUMNS)))


def updated(idea, mu, nu, grad, age, key):
    """Return the update of one leaf, and its decoded moments."""
    of_mu, of_nu, _, _ = idea
    mu = B1 * mu + (1 - B1) * grad
    nu = B2 * nu + (1 - B2) * grad**2
    update = mu / (1 - B1**age) / (jnp.sqrt(nu / (1 - B2**age)) + EPS)
    exact = padded(nu)
    words = jax.random.bits(key, (2, *exact.shape), jnp.uint32)
    stored = of_nu(exact, words[0])
    r = of_mu(quotient(padded(mu), exact), words[1])
    columns = slice(mu.shape[1])
    return update, product(r, stored)[:, columns], stored[:, columns]


def train(name: str, args) -> dict:
    images, labels = digits()
    idea, rate = IDEAS[name], optax.cosine_decay_schedule(1e-3, args.steps)

    def step(carry, inputs):
        (params, mu, nu), (number, batch) = carry, inputs
        grads = jax.grad(loss)(params, images[batch], labels[batch])
        age = number + 1
        if idea[3]:
            age = number % RESET + 1
            mu, nu = (jax.tree.map(lambda x: x * (age > 1), m) for m in (mu, nu))
        keys = jax.random.split(jax.random.key(number), len(params))
        leaves = [
            updated(idea, *leaf, age.astype(jnp.float32), key)
            for *leaf, key in zip(mu, nu, grads, keys, strict=True)
        ]
        updates, mu, nu = map(list, zip(*leaves, strict=True))
        change = lambda w, u: w - rate(number) * (u + 1e-4 * w)
        return (list(map(change, params, updates)), mu, nu), None

    @jax.jit
    def run(params, chosen):
        start = params, *([jnp.zeros_like(x) for x in params] for _ in range(2))
        numbers = jnp.arange(args.steps)
        (params, _, _), _ = lax.scan(step, start, (numbers, chosen))
        end = loss(params, images[:TRAINING], labels[:TRAINING])
        return end, loss(params, images[TRAINING:], labels[TRAINING:])

    found = [run(*begin(seed, args.steps)) for seed in range(args.seeds)]
    ends, others = (np.asarray(x) for x in zip(*found, strict=True))
    return {
        "bytes_per_parameter": 3 + idea[2],
        "training": records.spread(ends),
        "held_out": records.spread(others),
    }


def measure(args) -> dict:
    return {"runs": {name: train(name, args) for name in IDEAS}}


def main(argv: list[str] | None = None) -> None:
    args = records.Options(__doc__, seeds=4, steps=600).parse_args(argv)
    text = lambda record: table(record["runs"], "4-bit moments")
    records.run(__name__, args, measure, text)
