"""Divergence in 8 bits: orders of demotion, promotion, and the usual assignments.

    .venv/bin/python -m benchmarks demotion_orders

Lee, Sharma and Aiken, figures 4 to 6: with the same share of low precision, demoting
large groups of tensors first is better than demoting small groups first or in random
order. Uniform and operator-based assignments may diverge because of overflows.
Promoting the tensors that overflow prevents this for little memory. In this benchmark,
a network with batch normalization learns noisy digits at a learning rate of 1, so that
its weights grow until 8 bits overflow. Accuracy is measured in the training formats.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.papers import noisy_digits
from lowbit_optax import precision

SIZES = (noisy_digits.PIXELS, 128, 128, 64, 64, 32, 32, noisy_digits.CLASSES)
NOISE = 0.5


class Steps(NamedTuple):
    """The loss, the overflow ratio of each tensor and the low ratio of each step."""

    loss: jax.Array
    overflow: jax.Array
    low_ratio: jax.Array


def init(key: jax.Array) -> list[dict]:
    """Return float32 parameters, a dictionary for each layer."""
    keys = jax.random.split(key, len(SIZES))
    return [
        {
            "w": jax.random.normal(each, (a, b)) * (2 / a) ** 0.5,
            "scale": jnp.ones(b),
            "shift": jnp.zeros(b),
        }
        for each, (a, b) in zip(keys, itertools.pairwise(SIZES), strict=False)
    ]


def loss_fn(params: list[dict], images: jax.Array, labels: jax.Array):
    """Return the mean loss in nats, and the accuracy."""
    *inner, last = params
    x = images
    for layer in inner:
        x = jax.nn.relu(_normalised(x @ layer["w"], layer["scale"], layer["shift"]))
    logits = x @ last["w"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    right = (logits.argmax(-1) == labels).mean(dtype=jnp.float32)
    return losses.mean(), right


def _normalised(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """Normalize with the mean and the variance of the batch."""
    mean = x.mean(0)
    variance = jnp.square(x - mean).mean(0)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + shift


def plan_of(batch: int) -> precision.PrecisionPlan:
    """Return the tensors of the loss of ``batch`` images."""
    params = jax.eval_shape(init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((batch, SIZES[0]), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return precision.trace(loss_fn, params, images, labels, has_aux=True)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def train(
    rate: float,
    steps: int,
    batch: int,
    given: noisy_digits.Data,
    seed: jax.Array,
    assignment: Any,
    promotes: jax.Array,
) -> tuple[jax.Array, Steps]:
    """Return the steps, and the accuracy on held-out digits in the training formats.

    Args:
      rate: the initial learning rate, which decays to 0 in a cosine.
      steps: the number of steps.
      batch: the number of images per step.
      given: the digits from ``noisy_digits.data(NOISE)``.
      seed: the seed of the initial parameters, the images and their noise.
      assignment: the formats; None for float32.
      promotes: whether tensors that overflow are promoted.
    """
    tx = optax.sgd(optax.cosine_decay_schedule(rate, steps), 0.9)
    if assignment is not None:
        scaling = lowbit_optax.loss_scaling.backoff_scale(2.0**10, period=100)
        tx = lowbit_optax.with_loss_scale(tx, scaling)
    key = jax.random.key(seed)
    params = init(key)

    def gradients(params, state, assignment, images, labels):
        if assignment is None:
            (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(
                params, images, labels
            )
            return grads, None, Steps(loss, jnp.zeros(1), jnp.float32(0))
        rounded = precision.apply(loss_fn, assignment, has_aux=True)
        scaled = lowbit_optax.scaled_value_and_grad(rounded, has_aux=True)
        (loss, (_, overflow)), grads = scaled(params, state, images, labels)
        found = Steps(loss, overflow, assignment.low_ratio)
        promoted = precision.promote(assignment, overflow)
        choose = lambda new, old: jnp.where(promotes, new, old)
        return grads, jax.tree.map(choose, promoted, assignment), found

    def body(carry, i):
        params, state, assignment = carry
        which, noise = jax.random.split(jax.random.fold_in(key, i))
        chosen = jax.random.randint(which, (batch,), 0, len(given.labels))
        images = noisy_digits.with_noise(noise, given.images[chosen], NOISE)
        grads, assignment, found = gradients(
            params, state, assignment, images, given.labels[chosen]
        )
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state, assignment), found

    start = params, tx.init(params), assignment
    (params, _, assignment), found = lax.scan(body, start, jnp.arange(steps))
    held_out = given.held_out_images, given.held_out_labels
    if assignment is None:
        return loss_fn(params, *held_out)[1], found
    rounded = precision.apply(loss_fn, assignment, has_aux=True)
    return rounded(params, *held_out)[1][0], found


ORDERS = {
    "decreasing": "largest groups first",
    "random": "groups in random order",
    "increasing": "smallest groups first",
}
PARTS = ("low_ratio", "accuracy")
RATIOS = (0.15, 0.3, 0.45, 0.6, 1.0)
BASELINES = {
    "uniform": precision.uniform,
    "operator-based": precision.operator_based,
    "operator-based, outputs": lambda plan: precision.operator_based(
        plan, outputs=True
    ),
}
POINTS = 50


def assignments(plan, seed: int) -> dict:
    """Return assignments by name. The random order depends on the seed."""
    found: dict = {"float32": None}
    all_low = precision.uniform(plan)
    found |= {name: choose(plan) for name, choose in BASELINES.items()}
    for order in ORDERS:
        for ratio in RATIOS:
            demoted = precision.demote(plan, ratio, order=order, seed=seed)
            found[f"{order}, {ratio:g}"] = demoted
    for i, group in enumerate(plan.groups):
        alone = np.isin(np.arange(len(plan.tensors)), group)
        low, low_backward = all_low.low & alone, all_low.low_backward & alone
        found[f"only group {i}"] = dataclasses.replace(
            all_low, low=low, low_backward=low_backward
        )
    return found


def summary(runs: list) -> dict:
    """Summarise an assignment, given the accuracy and the steps of each seed."""
    accuracy = [100 * float(right) for right, _ in runs]
    loss = np.stack([steps.loss for _, steps in runs])
    overflow = np.stack([steps.overflow.max(1) for _, steps in runs])
    parts = lambda x: x.reshape(len(runs), POINTS, -1)
    return {
        "accuracy": records.spread(accuracy),
        "low_ratio": records.spread([steps.low_ratio.mean() for _, steps in runs]),
        "low_ratio_first": float(runs[0][1].low_ratio[0]),
        "diverged": int(sum(right < 50 for right in accuracy)),
        "loss": parts(loss).mean(2)[0],
        "overflow": parts(overflow).max(2)[0],
    }


def measure(args) -> dict:
    plan = plan_of(args.batch_size)
    given = noisy_digits.data(NOISE)
    numbers = args.learning_rate, args.steps, args.batch_size, given
    runs: dict[str, list] = {}
    for seed in range(args.seeds):
        same: dict = {}
        for name, assignment in assignments(plan, seed).items():
            for promotes in (False, True) if assignment else (False,):
                # Different ratios may demote the same groups.
                levels = [np.asarray(x) for x in jax.tree.leaves(assignment)]
                key = promotes, *(level.tobytes() for level in levels)
                if key not in same:
                    chosen = jnp.asarray(seed), assignment, jnp.asarray(promotes)
                    trained = train(*numbers, *chosen)
                    same[key] = jax.device_get(trained)
                full = name + (", promotion" if promotes else "")
                runs.setdefault(full, []).append(same[key])
                print(f"seed {seed} {full}: {100 * same[key][0]:.1f} %", flush=True)
    return {"assignments": {name: summary(kept) for name, kept in runs.items()}}


@pictures.panels(4.4, (1, 1), sharey=True)
def draw(record: dict, *both) -> str:
    found = record["assignments"]
    series = {ORDERS[o]: [f"{o}, {ratio:g}" for ratio in RATIOS] for o in ORDERS}
    series |= {name: [name] for name in BASELINES}
    looks = [
        *({"color": c, "marker": m} for c, m in pictures.OTHERS),
        *({"color": "black", "marker": m, "mfc": "none"} for m in "D<>"),
    ]
    for axes, promotion in zip(both, ("", ", promotion"), strict=True):
        for (name, runs), look in zip(series.items(), looks, strict=True):
            each = [found[run + promotion] for run in runs]
            x, y = ([x[part]["values"] for x in each] for part in PARTS)
            axes.plot(np.ravel(x), np.ravel(y), ls="", alpha=0.8, label=name, **look)
        float32 = found["float32"]["accuracy"]["mean"]
        axes.axhline(float32, color="black", lw=1, label="float32")
        axes.set(title="with promotion" if promotion else "without promotion")
        axes.set(xlabel="share of the elements in 8 bits", xlim=(0, 1), ylim=(0, 100))
    both[0].set(ylabel="accuracy of each seed, % (higher is better)")
    trained = [found[f"decreasing, {ratio:g}"] for ratio in RATIOS]
    shares = [x["low_ratio"]["mean"] for x in trained if not x["diverged"]]
    return (
        f"Up to {max(shares, default=0):.0%} of the elements train in 8 bits if the "
        "largest groups are demoted first; with promotion, every order trains"
    )


NUMBERS = {"steps": 800, "batch_size": 64, "learning_rate": 1.0}
main = records.program(__name__, seeds=4, **NUMBERS)
