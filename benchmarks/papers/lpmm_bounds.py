"""LPMM's Algorithm 1 on a convex function, and the bounds of its lemma and theorem.

    .venv/bin/python -m benchmarks lpmm_bounds

LPMM, section 4. Stochastic quantizers Q with the errors E |Q(x) - x|^2 <= s^2 round the
parameters (s_p), the momentum (s_m) and the accumulated gradients (s_g). Gradients of
one batch have the variance s^2. N is the number of microbatches, and g_i is the
accumulator after i of them.

Lemma 1: E g_i = i grad f, and

    E |g_i|^2 <= i s_g^2 + i (i + 2) |grad f|^2 + i s^2.

Theorem 1: if f is convex and L-smooth, and a <= (1 - b) / ((N + 2) L), then the mean
theta of the iterates 0 to T - 1 satisfies

    E f(theta) - f* <= (L b / (1 - b) + (1 - b) / (a N)) |theta_0 - theta*|^2 / (2 T)
        + (a s^2 + a s_g^2 + a s_m^2 / (2 N) + (1 + 2 b^2) s_p^2 / (2 a N)) / (1 - b).

The proof needs half of this rate, and bounds the mean of f over the iterates, too. Here
f is a quadratic function with L = 1. The quantizers are linear with a fixed step, so
their s^2 is step^2 d / 4, and no value is clipped.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import pictures, records
from benchmarks.papers.quantized_descent import (
    CURVES,
    DIMENSIONS,
    RANGE,
    STATE_BITS,
    Case,
    accumulated,
    examples,
    train,
    variance,
)

BITS, FACTORS, MOMENTA, DRAWS = (12, 10, 8, 6), (1, 4, 16), (0.0, 0.9), 20_000
SHARES = (1 / 3, 1 / 18, 1 / 72, 1 / 288)
"""Rates divided by 1 - b. Each N uses those that the theorem allows, up to 1 / (N + 2).
"""


def bound(case: Case, t: int) -> float:
    """Return the bound of theorem 1 after ``t`` updates that start from zero."""
    _, n, b, a = case
    p, m, g = (step**2 * DIMENSIONS / 4 for step in case.steps())
    first = (b / (1 - b) + (1 - b) / (a * n)) * np.sum(examples().mean(0) ** 2)
    noise = a * variance() + a * g + a * m / (2 * n) + (1 + 2 * b**2) * p / (2 * a * n)
    return first / (2 * t) + noise / (1 - b)


def cases(n: int) -> list[Case]:
    """Return the cases with ``n`` microbatches whose rates theorem 1 allows."""
    shares = sorted({1 / (n + 2), *SHARES}, reverse=True)
    return [
        Case(bits, n, b, (1 - b) * share)
        for bits, b, share in itertools.product(BITS, MOMENTA, shares)
        if share <= 1 / (n + 2)
    ]


def of_theorem(n: int, rounding: str, args) -> dict:
    """Return the figures of all cases with ``n`` microbatches, by name."""
    each = cases(n)
    column = lambda values: jnp.float32(np.repeat(values, args.seeds)[:, None])
    steps = [column(x) for x in zip(*(case.steps() for case in each), strict=True)]
    momenta, rates = (column([getattr(x, y) for x in each]) for y in Case._fields[2:])
    key = jax.random.key(n)
    *errors, largest = train(n, rounding, args.steps, momenta, rates, steps, key)
    limits = jnp.stack([x[:, 0] * 2 ** (STATE_BITS - 1) for x in steps])
    limits = limits.at[0].set(RANGE)
    assert (largest <= limits).all(), "a value would be clipped"
    of_average, of_iterates = (np.reshape(x, (len(each), -1)) for x in errors)
    return {
        f"{case.bits} bits, N={n}, b={case.momentum:g}, a={case.rate:.4g}": {
            "bound": bound(case, args.steps),
            "of the average": records.spread(of_average[i]),
            "of the iterates": records.spread(of_iterates[i]),
        }
        for i, case in enumerate(each)
    }


@functools.partial(jax.jit, static_argnums=(0, 1))
def of_lemma(n: int, rounding: str, share: float):
    """Draw accumulators at ``share`` times the way from the optimum to zero.

    Returns:
      The norms of the error of the mean and of its standard error, and the mean square
      divided by its bound.
    """
    theta = jnp.tile((1 - share) * examples().mean(0), (DRAWS, 1))
    step = Case(8, n, 0.0, 1.0).steps()[2]
    g = accumulated(theta, step, n, rounding, jax.random.key(n))
    gradient = CURVES * (theta[0] - examples().mean(0))
    error, norm = g.mean(0) - n * gradient, jnp.sum(gradient**2)
    most = n * step**2 * DIMENSIONS / 4 + n * (n + 2) * norm + n * variance()
    standard = jnp.linalg.norm(g.std(0)) / DRAWS**0.5
    return jnp.linalg.norm(error), standard, jnp.mean(jnp.sum(g**2, 1)) / most


def measure(args) -> dict:
    lemma, theorem = {}, {}
    for n, rounding in itertools.product(FACTORS, ("stochastic", "nearest")):
        for place, share in {"start": 1.0, "optimum": 0.0}.items():
            error, standard, square = of_lemma(n, rounding, share)
            lemma[f"{rounding}, N={n}, at the {place}"] = {
                "error of the mean": error,
                "standard error": standard,
                "mean square divided by its bound": square,
            }
        theorem.setdefault(rounding, {}).update(of_theorem(n, rounding, args))
        print(f"{rounding}, N={n}", flush=True)
    return {"lemma": lemma, "theorem": theorem}


@pictures.panels(4)
def draw(record: dict, axes) -> str:
    for rounding, look in pictures.looks(record["theorem"]).items():
        each = record["theorem"][rounding].values()
        x, y = zip(
            *((x["bound"], x["of the iterates"]["mean"]) for x in each), strict=True
        )
        axes.loglog(x, y, label=rounding, alpha=0.6, **look | {"ls": ""})
    ends = np.array(axes.get_xlim())
    axes.plot(ends, ends, "k", lw=1, label="the bound")
    axes.set(
        xlabel="bound of theorem 1 on f - f*", ylabel="mean f - f* of the iterates"
    )
    return (
        "With stochastic quantizers, Algorithm 1 stays below the bound of theorem 1; "
        "with nearest rounding, it can stop above"
    )


main = records.program(__name__, seeds=20, steps=20_000)
