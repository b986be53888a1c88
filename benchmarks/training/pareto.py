"""Bits per parameter and final loss of formats, and the best formats for their bits.

    .venv/bin/python -m benchmarks pareto

Adam trains two small models with each pair of a weight format and a moment format. The
models are a network with two hidden layers on scikit-learn's digits, and a linear
function of 64 inputs with noisy targets, whose loss shows only the noise of the
weights. The learning rate decays to a thousandth in a cosine, because formats with few
bits fall behind at small learning rates. All runs of a seed start from the same weights
and use the same batches, and each is compared with the float32 run of its seed.

Bits count weights, residuals and moments: ``memory_report`` of 4096 x 4096 parameters.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.training import digit_moments
from lowbit_optax import extra_bits, lpmm

SIZES = (64, 64, 64, 10)
TRAINING, BATCH = 1400, 64
WEIGHTS = {
    "nearest": lowbit_optax.nearest(),
    "stochastic": lowbit_optax.stochastic_rounding(),
    "error into mu": lowbit_optax.stochastic_rounding(error_feedback="mu"),
    **{f"+{bits}": extra_bits(bits) for bits in (2, 4, 8, 16)},
    "Kahan": lowbit_optax.kahan(),
    **{f"LPMM {bits}": None for bits in (12, 10, 8)},
}
MOMENTS = {"32": "float32", "8": None}
LABELS = {"32": "moments in float32", "8": "moments in 8 bits"}
FLOAT32 = "float32"


def names() -> list[str]:
    """Return the names of the runs: ``float32``, then "weights, moments"."""
    return [FLOAT32, *(f"{w}, {m}" for w in WEIGHTS for m in moments_of(w))]


def moments_of(weights: str) -> tuple[str, ...]:
    """Return the moment formats to combine with these weights."""
    has_few_bits = weights in ("+2", "+4") or weights.startswith("LPMM")
    return ("8",) if has_few_bits else tuple(MOMENTS)


def optimizer(name: str, rate) -> optax.GradientTransformation:
    if name == FLOAT32:
        return optax.adam(rate)
    weights, moments = name.split(", ")
    format_ = WEIGHTS[weights] or lowbit_optax.formats.quantized_weights()
    chosen = MOMENTS[moments]
    return lowbit_optax.lowbit(
        optax.adam(rate), weights=format_, moments=chosen, min_size=0
    )


def start(name: str, tx, master):
    """Return parameters and state, given float32 weights."""
    if name.startswith("LPMM"):
        bits = int(name.split(", ")[0].split()[1])
        params = lowbit_optax.lpmm.quantize_params(master, bits=bits, min_size=0)
        return params, tx.init(params)
    if name == FLOAT32:
        return master, tx.init(master)
    return lowbit_optax.from_master(tx, master, jnp.bfloat16, None)


def bits_of(name: str) -> float:
    """Return the stored bits per parameter."""
    tx = optimizer(name, 1e-3)
    master = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)]
    params, _ = jax.eval_shape(functools.partial(start, name, tx), master)
    return 8 * lowbit_optax.memory_report(tx, params).bytes_per_param


def _linear_loss(params, x, y):
    (w,) = lowbit_optax.lpmm.dequantize(params)
    return jnp.mean((x @ w.astype(jnp.float32) - y) ** 2) / 2


LOSSES = {"digits": digit_moments.loss, "linear": _linear_loss}
RATES = {"digits": 2e-3, "linear": 1e-2}
TITLES = {"digits": "network on digits", "linear": "linear function, noisy targets"}


def given(task: str, seed: int) -> tuple[list, jax.Array, jax.Array, float]:
    """Return initial weights, inputs, targets and the minimum of the loss."""
    random = np.random.default_rng(seed)
    normal = lambda *shape: random.standard_normal(shape).astype(np.float32)
    if task == "digits":
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        images = jnp.asarray(images[:TRAINING] / 16, jnp.float32)
        shapes = itertools.pairwise(SIZES)
        master = [normal(*shape) * np.sqrt(2 / shape[0]) for shape in shapes]
        labels = jnp.asarray(labels[:TRAINING], jnp.int32)
        return [jnp.asarray(w, jnp.float32) for w in master], images, labels, 0.0
    x, w = normal(TRAINING, 64), normal(64, 64)
    y = x @ w + normal(TRAINING, 64)
    best = np.linalg.lstsq(x, y, rcond=None)[0]
    least = float(np.mean((x @ best - y) ** 2) / 2)
    return (
        [jnp.asarray(w + 0.1 * normal(64, 64))],
        jnp.asarray(x),
        jnp.asarray(y),
        least,
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def train(task: str, name: str, steps: int, master, inputs, targets, chosen):
    """Return the loss on all examples, as a mean over the last 1% of the steps."""
    rate = optax.cosine_decay_schedule(RATES[task], steps, 1e-3)
    tx, loss_fn = optimizer(name, rate), LOSSES[task]
    differentiate = lpmm.value_and_grad(loss_fn)

    def body(carry, rows):
        params, state = carry
        _, grads = differentiate(params, inputs[rows], targets[rows])
        return lowbit_optax.step(tx, params, state, grads), None

    def part(carry, rows):
        carry, _ = jax.lax.scan(body, carry, rows)
        return carry, loss_fn(carry[0], inputs, targets)

    last = max(10, steps // 100 // 10 * 10)
    carry = start(name, tx, master)
    carry, _ = jax.lax.scan(body, carry, chosen[:-last])
    parts = chosen[-last:].reshape(10, -1, chosen.shape[1])
    return jax.lax.scan(part, carry, parts)[1].mean()


def loss(task: str, name: str, steps: int, seed: int) -> float:
    """Return the final loss minus the minimum."""
    master, inputs, targets, least = given(task, seed)
    random = np.random.default_rng((seed, 1))
    chosen = jnp.asarray(random.integers(0, TRAINING, (steps, BATCH)))
    return float(train(task, name, steps, master, inputs, targets, chosen)) - least


def front(bits: dict[str, float], loss: dict[str, float]) -> list[str]:
    """Return, in order, the runs with a lower loss than all runs with fewer bits."""
    found: list[str] = []
    for name in sorted(bits, key=lambda name: (bits[name], loss[name])):
        if not found or loss[name] < loss[found[-1]]:
            found.append(name)
    return found


def excess(runs: dict, task: str) -> dict[str, dict]:
    """Return losses minus the float32 loss, in percent of the mean float32 loss."""
    values = {name: each[task]["values"] for name, each in runs.items()}
    mean = np.mean(values[FLOAT32])
    gaps = {name: (100 * np.array(v) / mean) for name, v in values.items()}
    return {FLOAT32: records.spread(0 * gaps[FLOAT32])} | records.gaps(gaps, FLOAT32)


def _format(name: str) -> str:
    """Return the format of a run's weights, named as in other pictures."""
    return re.sub(r"\+\d+", "extra bits", re.sub(r"( \d+)?, .*", "", name))


@pictures.panels(5.2, (1, 1))
def draw(record: dict, *both) -> str:
    bits = {name: each["bits"] for name, each in record["runs"].items()}
    looks = pictures.looks(map(_format, bits))
    fills = dict(zip(LABELS, pictures.FILLS, strict=False))
    for axes, task in zip(both, LOSSES, strict=True):
        found = excess(record["runs"], task)
        for name, each in found.items():
            fill = fills.get(name.split(", ")[-1], "full")
            look = looks[_format(name)] | {"ls": "", "fillstyle": fill}
            axes.errorbar(bits[name], each["mean"], each["std"], **look, elinewidth=0.8)
        axes.set_yscale("symlog", linthresh=10)
        axes.set_xscale("log")
        axes.set_xticks([20, 32, 48, 64, 96], ["20", "32", "48", "64", "96"])
        axes.set_yticks([-10, 0, 10, 100, 1000], ["-10", "0", "10", "100", "1000"])
        axes.minorticks_off()
        axes.set(xlabel="bits per parameter", title=TITLES[task])
    digits, linear = both
    digits.set(ylabel="final loss, % above float32's (lower is better)")
    # On digits, the runs differ by less than their seeds, so no front is drawn.
    means = {name: each["mean"] for name, each in found.items()}
    best = [(bits[name], means[name]) for name in front(bits, means)]
    look = {"color": "gray", "lw": 1, "zorder": 0, "label": "best for its bits"}
    linear.plot(*zip(*best, strict=True), **look)
    for name, look in looks.items():
        linear.plot([], [], **look | {"ls": "", "fillstyle": "full"}, label=name)
    for moments, fill in fills.items():
        look = {"color": "gray", "fillstyle": fill, "markerfacecoloralt": "white"}
        linear.plot([], [], "s", **look, label=LABELS[moments])
    return (
        "On digits, only nearest rounding raises the loss; with noisy targets, 8 extra "
        f"bits and 8-bit moments end {means['+8, 8']:.0f}% above float32"
    )


def measure(args) -> dict:
    of = lambda name, seed: {t: loss(t, name, args.steps, seed) for t in LOSSES}
    found = records.of_seeds(names(), args.seeds, of)
    spread = lambda name: {task: records.spread(found[task][name]) for task in LOSSES}
    return {"runs": {name: {"bits": bits_of(name), **spread(name)} for name in names()}}


main = records.program(__name__, seeds=3, steps=1000)
