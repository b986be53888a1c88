"""Experimental codes that store Muon's momentum in 4 bits, on a small GPT.

    .venv/bin/python -m benchmarks four_bit_muon

The model, the text, the initial weights and the batches are the same as in
``muon_momentum``, but weights and the moments of AdamW are float32, so that only the
code of Muon's momentum differs. This module rounds the momentum itself after each step.
Only ``"4 bits"`` is a format of the package.

The row with a grid follows Wu et al. 2026, and ``"MuonQ"`` follows Su et al. 2026. The
singular vectors are exact; both papers approximate them with one step of the power
iteration. The momentum is Nesterov's, and the learning rate is the same in all rows.

References:
  Wu et al. 2026, "Achieving low-bit Muon through subspace preservation and grid
  quantization".
  Su et al. 2026, "MuonQ: Enhancing Low-Bit Muon Quantization via Directional Fidelity
  Optimization".
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import records
from benchmarks.training import format_rows, gpt_formats
from benchmarks.training.text import stdlib_text
from lowbit_optax import block_quantized
from tools.models.gpt import GPT

BETA = 0.95
BLOCK = 32
SCALE_BITS = 16
MU = 255.0


def swapped(x):
    return jnp.swapaxes(x, -1, -2)


def norm(x):
    return jnp.sqrt(jnp.sum(x * x, (-1, -2), keepdims=True)) + jnp.float32(1e-12)


def of_package(bits: int) -> Callable:
    """Return a function that rounds to the default code of ``lowbit_muon``."""
    code = block_quantized(bits).for_field("mu", False, is_orthogonalized=True)
    return lambda x, key: code.decode(code.encode(x, None, 0), x.shape)


def at_bound(x, key):
    """Add the least error of any code with 4 bits per value.

    For independent normal values with variance v, rate-distortion theory bounds the
    mean square error by ``v / 2^8``. Here, v is the mean square of 32 neighbors.
    """
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    error = jnp.float32(2.0**-8)
    deviation = jnp.sqrt(jnp.mean(blocks**2, -1, keepdims=True) * error * (1 - error))
    noise = jax.random.normal(key, blocks.shape)
    return ((1 - error) * blocks + deviation * noise).reshape(x.shape)


def on_grid(x, bits: int):
    """Round to equal steps up to the smaller of the row's and the column's maximum.

    Each block of 32 x 32 values has its own maxima. The levels are odd multiples of
    half a step, so that all ``2^bits`` codes have a level.
    """
    *stack, rows, columns = x.shape
    high, wide = min(BLOCK, rows), min(BLOCK, columns)
    y = x.reshape(*stack, rows // high, high, columns // wide, wide)
    narrow = lambda scale: scale.astype(jnp.bfloat16).astype(jnp.float32)
    of_rows, of_columns = (
        narrow(jnp.max(jnp.abs(y), axis, keepdims=True)) for axis in (-1, -3)
    )
    scale = jnp.minimum(of_rows, of_columns)
    scale = jnp.where(scale > 0, scale, 1)
    half = jnp.float32(2 ** (bits - 1))
    level = jnp.clip(jnp.floor(y / scale * half), -half, half - 1) + 0.5
    return (level * scale / half).reshape(x.shape)


def companded(x, axes):
    """Round to MuonQ's 15 codes: equal steps of ``sign(x) log(1 + 255 |x|)``."""
    y = jnp.sign(x) * jnp.log1p(MU * jnp.minimum(jnp.abs(x), 1)) / math.log1p(MU)
    step = jnp.maximum(jnp.max(jnp.abs(y), axes, keepdims=True) / 7, 1e-8)
    y = jnp.round(y / step) * step
    return jnp.sign(y) * jnp.expm1(jnp.abs(y) * math.log1p(MU)) / MU


def split(x, share: int):
    """Split a matrix into P R^T, its top singular part of rank r, and the rest.

    r is the smaller side divided by ``share``, and the columns of P are orthonormal.
    """
    rank = min(x.shape[-2:]) // share
    _, vectors = jnp.linalg.eigh(x @ swapped(x))
    p = vectors[..., -rank:]
    r = swapped(x) @ p
    return p, r, x - p @ swapped(r)


def grasp(x, key):
    p, r, rest = split(x, 8)
    return on_grid(p, 8) @ swapped(on_grid(r, 8)) + on_grid(rest, 4)


def muonq(x, key):
    p, r, rest = split(x, 16)
    return companded(p, -2) @ swapped(companded(r, -2)) + companded(rest, (-1, -2))


class Row(NamedTuple):
    """A code of the momentum.

    Attributes:
      code: a function that rounds a stack of matrices, given random bits, or None.
      bits: the bits of a value, given rows and columns of its matrix.
      is_normed: whether gradients and momentum are divided by their norms, as in MuonQ.
    """

    code: Callable | None
    bits: Callable[[int, int], float]
    is_normed: bool = False


def _in_blocks(bits: int) -> Callable:
    return lambda rows, columns: bits + SCALE_BITS / BLOCK


def _of_grasp(rows: int, columns: int) -> float:
    rank = min(rows, columns) // 8
    # Every row and every column of a block has a maximum.
    scales = SCALE_BITS * 2 / BLOCK
    of_factors = SCALE_BITS * (1 / BLOCK + 1 / min(BLOCK, rank))
    factors = rank * (rows + columns) * (8 + of_factors)
    return 4 + scales + factors / (rows * columns)


def _of_muonq(rows: int, columns: int) -> float:
    rank = min(rows, columns) // 16
    factors = rank * (4 * (rows + columns) + 2 * SCALE_BITS)
    return 4 + (SCALE_BITS + factors) / (rows * columns)


BASE = "float32"
ROWS = {
    BASE: Row(None, lambda rows, columns: 32),
    "4 bits": Row(of_package(4), _in_blocks(4)),
    "4 bits, least error": Row(at_bound, lambda rows, columns: 4),
    "4 bits on a grid, top singular part with 8 bits": Row(grasp, _of_grasp),
    "float32, normalized": Row(None, lambda rows, columns: 32, True),
    "MuonQ": Row(muonq, _of_muonq, True),
}


def bits_per_value(row: Row, model: GPT) -> float:
    """Return the mean bits of a value of the momentum, over a model's matrices."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))["layers"]
    shapes = [x.shape[1:] for x in jax.tree.leaves(shapes) if x.ndim == 3]
    sizes = [math.prod(shape) for shape in shapes]
    return float(np.average([row.bits(*sorted(s)) for s in shapes], weights=sizes))


def momentum(row: Row) -> optax.GradientTransformationExtraArgs:
    """Return Nesterov's momentum of stacks of matrices; other leaves do not change."""

    def init(params):
        return jax.tree.map(
            lambda x: jnp.zeros_like(x) if x.ndim == 3 else None, params
        )

    def of_leaf(grad, mu, key):
        if mu is None:
            return grad, None
        if row.is_normed:
            grad = grad / norm(grad)
            mu = BETA * mu + grad
            mu = mu / norm(mu)
            found = BETA * mu + grad
        else:
            mu = BETA * mu + (1 - BETA) * grad
            found = BETA * mu + (1 - BETA) * grad
        if row.code is None:
            return found, mu
        is_high = mu.shape[-2] > mu.shape[-1]
        code = row.code(swapped(mu) if is_high else mu, key)
        return found, swapped(code) if is_high else code

    def update(updates, state, params=None, *, key, **_):
        leaves, structure = jax.tree.flatten(updates)
        keys = jax.random.split(key, len(leaves))
        made = list(map(of_leaf, leaves, structure.flatten_up_to(state), keys))
        return tuple(structure.unflatten(each) for each in zip(*made, strict=True))

    return optax.GradientTransformationExtraArgs(init, update)


def train(row: Row, args) -> dict[str, np.ndarray]:
    """Train all seeds in one program, and return the losses of each."""
    model, seeds = GPT(args.layers, args.width, 4, args.context), range(args.seeds)
    rate = optax.cosine_decay_schedule(args.learning_rate, args.steps, 0.1)
    # Muon without momentum of its own orthogonalizes the momentum of this module.
    tx = optax.chain(momentum(row), format_rows.muon(rate, beta=0.0))
    text = stdlib_text.load()
    windows = stdlib_text.even_windows(text.held_out, 1024, args.context + 1)
    shape = args.steps, args.batch_size
    batches = [
        stdlib_text.random_windows(text.train, (seed,), shape, args.context + 1)
        for seed in seeds
    ]

    def step(carry, inputs):
        (params, state), (number, tokens) = carry, inputs
        loss, grads = jax.value_and_grad(model.loss)(params, tokens)
        updates, state = tx.update(grads, state, params, key=jax.random.key(number))
        return (optax.apply_updates(params, updates), state), loss

    @jax.jit
    @jax.vmap
    def run(params, batches):
        inputs = jnp.arange(args.steps), batches
        (params, _), losses = jax.lax.scan(step, (params, tx.init(params)), inputs)
        return losses[args.steps // 2 :].mean(), model.loss(params, windows)

    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    training, held_out = jax.device_get(
        run(jax.vmap(model.init)(keys), np.stack(batches))
    )
    return {"training": training, "held-out loss": held_out}


def measure(args) -> dict:
    """Train all rows. A training loss is the mean of the second half of the steps."""
    found, model = {}, GPT(args.layers, args.width, 4, args.context)
    for name, row in ROWS.items():
        found[name] = train(row, args)
        print(f"{name}: {found[name]}", flush=True)
    return {
        "runs": {
            name: {
                "bits": bits_per_value(ROWS[name], model),
                **{end: records.spread(values) for end, values in each.items()},
                "gaps": {
                    end: records.spread(values - found[BASE][end])
                    for end, values in each.items()
                },
            }
            for name, each in found.items()
        }
    }


main = records.program(__name__, seeds=5, **gpt_formats.NUMBERS)
