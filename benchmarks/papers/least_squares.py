"""Least squares with SGD and bfloat16 weights: the final loss of each rounding.

    .venv/bin/python -m benchmarks least_squares

Zamirai et al. 2020, figure 2: if weights are rounded to nearest, the loss saturates
orders of magnitude above the float32 loss. If only activations and gradients are
rounded, it ends close to the float32 loss. The problem is the same as in the paper: 10
dimensions, inputs with unit variance, weights from [0, 100), labels with noise of
standard deviation 0.5, learning rate 0.01, and one example per step. Two more runs use
stochastic rounding and Kahan summation.

Figure 5: the more weights use Kahan summation instead of stochastic rounding, the
better. ``shares`` has the loss by the number of coordinates that use it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks import pictures, records

DIMENSIONS, EXAMPLES, NOISE, RATE = 10, 1000, 0.5, 0.01
POINTS = 100

SHARES = (0, 2, 5, 8, 10)
"""The numbers of coordinates that use Kahan summation; all others round randomly."""

# The weights, and whether activations and gradients are rounded too.
RUNS = {
    "float32": (None, False),
    "nearest: all but weights": (None, True),
    "nearest: only weights": (lowbit_optax.nearest(), False),
    "nearest: all": (lowbit_optax.nearest(), True),
    "weights stochastic": (lowbit_optax.stochastic_rounding(), True),
    "weights by Kahan": (lowbit_optax.kahan(), True),
}
LABELS = {
    "float32": "float32",
    "nearest: all but weights": "float32 weights only",
    "nearest: only weights": "nearest weights only",
    "nearest: all": "nearest",
    "weights stochastic": "stochastic",
    "weights by Kahan": "Kahan",
}


def problem(key):
    """Return inputs and labels."""
    inputs, weights, noise = jax.random.split(key, 3)
    x = jax.random.normal(inputs, (EXAMPLES, DIMENSIONS))
    w = jax.random.uniform(weights, (DIMENSIONS,), maxval=100.0)
    return x, x @ w + NOISE * jax.random.normal(noise, (EXAMPLES,))


def gradient(w, x, y, rounded: bool):
    """Differentiate half the squared error. If ``rounded``, round each result."""
    q = lambda a: a.astype(jnp.bfloat16).astype(jnp.float32) if rounded else a
    return q(q(x @ w - y) * x)


@functools.partial(jax.jit, static_argnums=(0, 1))
def train(name: str, steps: int, seed):
    """Return the losses of a run; see :func:`losses`."""
    weights, rounded = RUNS[name]
    tx = optax.sgd(RATE)
    params = jnp.zeros(DIMENSIONS)
    if weights is not None:
        tx = lowbit_optax.lowbit(tx, weights=weights)
        params = params.astype(jnp.bfloat16)
    return losses(tx, params, rounded, steps, seed)


@functools.partial(jax.jit, static_argnums=(0, 1))
def train_share(count: int, steps: int, seed):
    """Return the losses of a run in which ``count`` weights use Kahan summation."""
    formats = {
        "Kahan": lowbit_optax.kahan(),
        "stochastic": lowbit_optax.stochastic_rounding(),
    }
    sizes = {"Kahan": count, "stochastic": DIMENSIONS - count}
    params = {k: jnp.zeros(n, jnp.bfloat16) for k, n in sizes.items() if n}
    each = {k: lowbit_optax.lowbit(optax.sgd(RATE), weights=formats[k]) for k in params}
    tx = optax.partition(each, {k: k for k in params})
    return losses(tx, params, True, steps, seed)


def losses(tx, params, rounded: bool, steps: int, seed):
    """Return the mean loss over the data at ``POINTS`` equally spaced steps.

    The weights are the leaves of ``params``, one after the other.
    """
    key, order = jax.random.split(jax.random.key(seed))
    x, y = problem(key)
    leaves, structure = jax.tree.flatten(params)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]

    def weights(params):
        return jnp.concatenate(
            [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(params)]
        )

    def body(carry, index):
        params, state = carry
        grads = gradient(weights(params), x[index], y[index], rounded)
        grads = structure.unflatten(jnp.split(grads, ends))
        return lowbit_optax.step(tx, params, state, grads), None

    def part(carry, indices):
        carry, _ = jax.lax.scan(body, carry, indices)
        error = x @ weights(carry[0]) - y
        return carry, jnp.mean(error**2) / 2

    indices = jax.random.randint(order, (POINTS, steps // POINTS), 0, EXAMPLES)
    return jax.lax.scan(part, (params, tx.init(params)), indices)[1]


def measure(args) -> dict:
    seeds = jnp.arange(args.seeds)
    curves = {
        name: jax.vmap(functools.partial(train, name, args.steps))(seeds)
        for name in RUNS
    }
    # Average the last fifth, because one example per step leaves noise.
    end = lambda runs: runs[:, -POINTS // 5 :].mean(1)
    ends = {name: end(runs) for name, runs in curves.items()}
    by_share = {
        str(count): end(
            jax.vmap(functools.partial(train_share, count, args.steps))(seeds)
        )
        for count in SHARES
    }
    return {
        "final": records.spreads(ends),
        "shares": records.spreads(by_share),
        "curves": curves,
    }


@pictures.panels(4.2, (1, 1))
def draw(record: dict, curves, ends) -> str:
    steps, final = record["options"]["steps"], record["final"]
    x = np.arange(1, POINTS + 1) * steps // POINTS
    looks = pictures.looks(LABELS.values())
    for name, label in LABELS.items():
        look = looks[label] | {"marker": "", "label": label}
        curves.semilogy(x, np.median(record["curves"][name], 0), **look)
    curves.set(xlabel="step", ylabel="loss, median of the seeds (lower is better)")
    curves.set_xticks(np.linspace(0, steps, 3))
    found = {label: final[name] for name, label in LABELS.items()}
    pictures.each_seed(ends, found, "loss at the end", digits=2)
    ends.set(xscale="log", xlim=(0.08, 8))
    ends.set_xticks([0.1, 1], ["0.1", "1"])
    times = lambda label: found[label]["mean"] / found["float32"]["mean"]
    return (
        f"With bfloat16 weights, nearest rounding stops at {times('nearest'):.0f} "
        f"times float32's loss, and Kahan summation at {times('Kahan'):.1f} times"
    )


main = records.program(__name__, seeds=10, steps=20_000)
