"""Distances at which SGD with nearest rounding stops, and the bounds of two theorems.

    .venv/bin/python -m benchmarks halted_descent

Zamirai et al. 2020, theorems 1 and 2. Weights w* fit all examples, and the gradient of
each example is L-Lipschitz; here L = 1. ``eps`` is the machine epsilon: neighboring
numbers u and v have eps |u| <= |u - v| <= 2 eps |u|.

Theorem 1: if weights are rounded to nearest, a step of SGD with the rate a changes
nothing within the radius R = eps / (a L + eps) min |w*_j| of w*. If a <= 1 / L, then

    |w_t - w*| >= min((1 - a L) R, |w_0 - w*|)    for all t.

The proof assumes that an update of at most eps |w_j| is canceled, and does not round
the step that enters the ball. But nearest rounding cancels only updates of at most half
a spacing, which can be eps |w_j| / 2, and it can double the other updates. So this
benchmark also checks a corrected bound, with eps / 2 instead of eps, and 1 - 2 a L
instead of 1 - a L. Theorem 2 is in ``rounded_passes``.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import optax

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.papers.rounded_passes import (
    EXAMPLES,
    epsilon,
    of_passes,
    problem,
    steps_of,
)
from lowbit_optax.precision import FloatFormat

BITS, RATES, DIMENSIONS = (16, 14, 12, 10), (0.25, 0.1, 0.02), (1, 10)
DRAWS = 1000


def radius(eps: float, rate: float, optimum):
    """Return the radius of theorem 1 around an optimum, with L = 1."""
    return eps / (rate + eps) * jnp.abs(optimum).min(-1)


def optimizer(bits: int, rate: float):
    weights = lowbit_optax.nearest(float_format=FloatFormat(8, bits - 9))
    return lowbit_optax.lowbit(optax.sgd(rate), weights=weights, min_size=0)


def stepped(tx, w, state, x, optimum):
    """Take a step on half the squared error of an example, with bfloat16 weights."""
    gradient = x @ (w.astype(jnp.float32) - optimum) * x
    return lowbit_optax.step(tx, w, state, gradient)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def nearest_weights(bits: int, rate: float, dimensions: int, seed):
    """Train from zero with rounded weights.

    Returns:
      The optimum, and its distances from the start, the nearest, and the last weights.
    """
    key, order = jax.random.split(jax.random.key(seed))
    x, optimum = problem(key, dimensions)
    tx, start = optimizer(bits, rate), jnp.zeros(dimensions, jnp.bfloat16)
    distance = lambda w: jnp.linalg.norm(w.astype(jnp.float32) - optimum)

    def body(carry, index):
        w, state, smallest = carry
        w, state = stepped(tx, w, state, x[index], optimum)
        return (w, state, jnp.minimum(smallest, distance(w))), None

    shape = (steps_of(rate, dimensions),)
    indices = jax.random.randint(order, shape, 0, EXAMPLES)
    carry = start, tx.init(start), distance(start)
    (w, _, smallest), _ = jax.lax.scan(body, carry, indices)
    return optimum, distance(start), smallest, distance(w)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def near_optimum(bits: int, rate: float, dimensions: int, seed):
    """Take one step from each of DRAWS random weights near the optimum.

    Returns:
      The optimum, the distance of each start from it, and whether its step changed it.
    """
    of_problem, length, direction, which = jax.random.split(jax.random.key(seed), 4)
    x, optimum = problem(of_problem, dimensions)
    tx, limit = optimizer(bits, rate), radius(epsilon(bits), rate, optimum)
    toward = jax.random.normal(direction, (DRAWS, dimensions))
    toward /= jnp.linalg.norm(toward, axis=1, keepdims=True)
    start = optimum + limit * jax.random.uniform(length, (DRAWS, 1)) * toward
    start = FloatFormat(8, bits - 9).round(start).astype(jnp.bfloat16)
    chosen = x[jax.random.randint(which, (DRAWS,), 0, EXAMPLES)]
    one = lambda w, x: stepped(tx, w, tx.init(w), x, optimum)[0]
    end = jax.vmap(one)(start, chosen)
    away = jnp.linalg.norm(start.astype(jnp.float32) - optimum, axis=1)
    return optimum, away, jnp.any(start != end, 1)


def of_weights(bits: int, rate: float, dimensions: int, seeds) -> dict:
    """Return the figures of theorem 1, as stated and corrected."""
    given, eps = (bits, rate, dimensions), epsilon(bits)
    run = functools.partial(nearest_weights, *given)
    optimum, start, smallest, last = jax.vmap(run)(seeds)
    bound = lambda eps, factor: factor * radius(eps, rate, optimum)
    ratio = lambda bound: smallest / jnp.minimum(bound, start)
    near = jax.vmap(functools.partial(near_optimum, *given))
    of_starts, away, changed = near(seeds)
    found = {
        "distance": records.spread(last / start),
        "distance to bound": records.spread(ratio(bound(eps, 1 - rate))),
        "distance to corrected bound": jnp.min(ratio(bound(eps / 2, 1 - 2 * rate))),
    }
    for name, each in {"starts": eps, "starts, corrected": eps / 2}.items():
        inside = away <= radius(each, rate, of_starts)[:, None]
        found[name] = {"all": inside.sum(), "changed": (inside & changed).sum()}
    return found


def measure(args) -> dict:
    figures = {"weights": {}, "passes": {}}
    for part, of, formats in (
        ("weights", of_weights, BITS),
        ("passes", of_passes, (32, *BITS)),
    ):
        for given in itertools.product(DIMENSIONS, formats, RATES):
            dimensions, bits, rate = given
            row = f"{dimensions}, {bits} bits, {rate}"
            figures[part][row] = of(bits, rate, dimensions, jnp.arange(args.seeds))
            print(part, row, flush=True)
    return figures


@pictures.panels(4.2, (1, 1))
def draw(record: dict, bounds, ends) -> str:
    weights, passes = record["weights"], record["passes"]
    shades = {1: "#d55e00", 10: "#332288"}
    for d, color in shades.items():
        for i, rate in enumerate(RATES):
            values = weights[f"{d}, 16 bits, {rate}"]["distance to bound"]["values"]
            label = f"{d} weight{'s' * (d > 1)}, bfloat16" if not i else None
            x = [i + (0.1 if d > 1 else -0.1)] * len(values)
            bounds.semilogy(x, values, "o", color=color, alpha=0.4, mew=0, label=label)
    bounds.axhline(1, color="black", lw=1, label="bound of theorem 1")
    bounds.set_xticks(range(len(RATES)), list(map(str, RATES)))
    bounds.set(xlabel="learning rate", ylabel="smallest distance divided by the bound")
    rows = {f"nearest weights, {bits} bits": (weights, bits) for bits in BITS}
    rows |= {"rounded passes, 10 bits": (passes, 10), "float32": (passes, 32)}
    for name, look in pictures.looks(rows).items():
        found, bits = rows[name]
        means = [found[f"10, {bits} bits, {x}"]["distance"]["mean"] for x in RATES]
        ends.semilogy(range(len(RATES)), means, label=name, **look)
    ends.set_xticks(range(len(RATES)), list(map(str, RATES)))
    ends.set(xlabel="learning rate", ylabel="last distance divided by the first one")
    return (
        "SGD with nearest weights stops far from the optimum, but one weight stops "
        "closer than the bound of theorem 1"
    )


main = records.program(__name__, seeds=50)
