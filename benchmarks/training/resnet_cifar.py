"""The ResNet of examples/resnet_cifar.py on CIFAR-10, by weight format and extra bits.

    .venv/bin/python -m benchmarks resnet_cifar

Lewandowski and Kosson 2023, table 3: float16 weights with 13, 8 and no extra bits, and
float8 weights with 8, 4 and none. The paper rounds the weights with 13 extra bits
stochastically. Here, all weights are rounded to nearest, and the last extra bit is
rounded stochastically, except with 13 bits, which are exact. The kernels with fewer
than 4096 elements have a float32 master if the format has extra bits. At a width of 8,
they are 13 of 21 kernels, with 8% of the weights.

The float8 format is e5m2. The model, the images and the optimizer are those of the
example, which downloads CIFAR-10 if necessary. It computes in float32, from weights and
with gradients of the given format; gradients of float8 weights are float16.
"""

import argparse
import functools
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks import ROOT, pictures, records

_float8 = jnp.float8_e5m2
_nearest, _bits = lowbit_optax.nearest, lowbit_optax.extra_bits
ROWS = {
    "float32": None,
    "float16, 13 extra bits": (jnp.float16, _bits(13)),
    "float16, 8 extra bits": (jnp.float16, _bits(8, rounding="nearest")),
    "float16": (jnp.float16, _nearest()),
    "float8, 8 extra bits": (_float8, _bits(8, rounding="nearest")),
    "float8, 4 extra bits": (_float8, _bits(4, rounding="nearest")),
    "float8": (_float8, _nearest()),
}
"""The dtype and the format of the weights."""


def measure(args: argparse.Namespace) -> dict:
    sys.path.append(str(ROOT / "examples"))
    example = importlib.import_module("resnet_cifar")
    name, *sets = example.load_images(example.CACHE, args.pixels)
    if name != "CIFAR-10":
        sys.exit("error: this benchmark needs CIFAR-10, not digits")
    of = functools.partial(train, example, args, *sets)
    spreads, gaps = records.compared(records.of_seeds(ROWS, args.seeds, of), "float32")
    return {**spreads, "gaps_to_float32": gaps}


def train(example, args, train_set, test_set, name: str, seed: int) -> dict:
    """Train one row, and return its training loss and its test accuracy in percent."""
    rate = optax.cosine_decay_schedule(args.learning_rate, args.steps)
    tx, dtype = optax.adamw(rate), None
    if ROWS[name]:
        dtype, weights = ROWS[name]
        tx = lowbit_optax.lowbit(tx, weights=weights, moments="float32")
    tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
    model = example.ResNet18(args.width, jnp.float32)
    images, labels = train_set
    variables = model.init(jax.random.key(seed), images[:1], train=False)
    state = example.TrainState.create(
        apply_fn=model.apply, tx=tx, param_dtype=dtype, **variables
    )
    step, losses = make_step(example.loss_fn), []
    rng = np.random.default_rng(seed)
    for _ in range(args.steps):
        rows = rng.integers(len(labels), size=args.batch_size)
        state, loss = step(state, images[rows], labels[rows])
        losses.append(loss)
    state = state.replace(params=wide(state.params))
    _, accuracy = example.evaluate(state, *test_set)
    end = np.mean(losses[-args.steps // 10 :])
    return {"training loss": end, "accuracy, %": 100 * accuracy}


def make_step(loss_fn):
    """Return a jitted step like the example's, for weights of any format."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, images, labels):
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, stats), grads = grad_fn(wide(state.params), state, images, labels)
        return state.apply_gradients(grads=grads, batch_stats=stats), loss

    return step


def wide(params):
    """Return the parameters with float8 ones in float16, which loses nothing."""
    is_float8 = lambda x: x.dtype == _float8
    return jax.tree.map(lambda x: x.astype(jnp.float16) if is_float8(x) else x, params)


@pictures.panels(4)
def draw(record: dict, axes) -> str:
    found = record["accuracy, %"]
    pictures.each_seed(axes, found, "test accuracy, %", digits=1, better="higher")
    shown = lambda name: f"{found[name]['mean']:.1f}%"
    return (
        f"Test accuracy: float32 {shown('float32')}, float16 {shown('float16')}, "
        f"float8 {shown('float8')}, with 8 extra bits {shown('float8, 8 extra bits')}"
    )


SIZES = {"steps": 400, "batch_size": 64, "width": 8, "pixels": 16}
main = records.program(__name__, seeds=3, **SIZES, learning_rate=1e-3)
