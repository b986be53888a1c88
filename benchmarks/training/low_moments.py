"""Training by moments of 8, 6 and 4 bits, beside float32.

    .venv/bin/python -m benchmarks low_moments

A network of two hidden layers learns scikit-learn's digits by AdamW: the same starts
and batches for all rows, over several seeds. Weights of all rows but the first are
bfloat16 with 8 extra bits, so that the rows differ in their moments alone.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from sklearn.datasets import load_digits

import lowbit_optax
from benchmarks import records
from lowbit_optax import block_quantized

SIZES = (64, 256, 256, 10)
TRAINING = 1400
MEANS = 20
"""Of how many steps a point of the curves is the mean loss."""

FOUR = block_quantized(4)
MOMENTS = {
    "float32": "float32",
    "8 bits, the default": None,
    "low: 4-bit mu, 6-bit nu": "low",
    "4 bits for both": {"mu": FOUR, "nu": FOUR},
}


def start(tx, seed: int, dtype=jnp.bfloat16):
    random = np.random.default_rng(seed)
    master = [
        jnp.asarray(random.standard_normal(shape) * np.sqrt(2 / shape[0]), jnp.float32)
        for shape in itertools.pairwise(SIZES)
    ]
    return lowbit_optax.from_master(tx, master, stored_in(dtype, master))


def stored_in(dtype, master):
    """What ``from_master`` takes for weights of a dtype, or of "mxfp8"."""
    scale = functools.partial(lowbit_optax.block_scale, min_size=0)
    return jax.eval_shape(scale, master) if dtype == "mxfp8" else dtype


def loss(params, images, labels):
    h, params = images, lowbit_optax.dequantize(params)
    for w in params[:-1]:
        h = jax.nn.relu(h @ w.astype(jnp.float32))
    logits = h @ params[-1].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@functools.partial(jax.jit, static_argnums=0)
def run(tx, params, state, images, labels, chosen):
    """Losses of all steps, the last of all training images, and that of the others."""

    def step(carry, batch):
        params, state = carry
        # Gradients of float8 arrays would be float8.
        wide = [w.astype(jnp.bfloat16) for w in lowbit_optax.dequantize(params)]
        value, grads = jax.value_and_grad(loss)(wide, images[batch], labels[batch])
        return lowbit_optax.step(tx, params, state, grads), value

    (params, _), losses = lax.scan(step, (params, state), chosen)
    end = loss(params, images[:TRAINING], labels[:TRAINING])
    return losses, end, loss(params, images[TRAINING:], labels[TRAINING:])


def train(name: str, args) -> dict:
    rate = optax.cosine_decay_schedule(args.learning_rate, args.steps)
    tx = lowbit_optax.lowbit(
        optax.adamw(rate),
        weights=lowbit_optax.master_copy() if name == "float32" else None,
        moments=MOMENTS[name],
    )
    return figures(tx, args)


def figures(tx, args, dtype=jnp.bfloat16) -> dict:
    """What several seeds of training give.

    Args:
      tx: the optimizer.
      args: options; ``seeds`` and ``steps`` are read.
      dtype: of the weights, or "mxfp8".
    """
    images, labels = load_digits(return_X_y=True)
    images, labels = jnp.asarray(images / 16, jnp.float32), jnp.asarray(labels)
    found = []
    for seed in range(args.seeds):
        random = np.random.default_rng(seed)
        chosen = random.integers(0, TRAINING, (args.steps, 64))
        begun = start(tx, seed, dtype)
        found.append(run(tx, *begun, images, labels, jnp.asarray(chosen)))
    losses, ends, others = (np.asarray(x) for x in zip(*found, strict=True))
    large = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    params, _ = jax.eval_shape(
        lambda x: lowbit_optax.from_master(tx, x, stored_in(dtype, x)), [large]
    )
    return {
        "bytes_per_parameter": lowbit_optax.memory_report(tx, params).bytes_per_param,
        "curve": losses.mean(0).reshape(-1, MEANS).mean(1),
        "training": records.spread(ends),
        "held_out": records.spread(others),
    }


def main(argv: list[str] | None = None) -> None:
    parser = records.parser(__doc__, seeds=8, has_full=False)
    parser.add_argument("--steps", type=int, default=600, help="a multiple of 20")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="the first")
    args = parser.parse_args(argv)
    path = records.path_of(__name__, args.is_apart)
    if not args.draw:
        runs = {name: train(name, args) for name in MOMENTS}
        records.save(path, args, records.ran_here(), runs=runs)
    print(table(records.load(path)["runs"], "moments"))


def table(found: dict, what: str) -> str:
    """The figures of several runs, those of the first column's head ``what``."""
    ends = {name: each["training"]["values"] for name, each in found.items()}
    gaps = records.gaps(ends, "float32")
    heads = (what, "bytes", "training loss", "minus float32's", "held-out loss")
    rows = []
    for name, each in found.items():
        gap = records.shown(gaps[name], 5) if name in gaps else ""
        size = f"{each['bytes_per_parameter']:.2f}"
        losses = (records.shown(each[part], 5) for part in ("training", "held_out"))
        end, other = losses
        rows.append((name, size, end, gap, other))
    return records.table(heads, rows)
