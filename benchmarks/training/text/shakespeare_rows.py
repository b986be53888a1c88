"""nanoGPT's two protocols for the characters of Shakespeare, and the rows to train."""

import functools
import pathlib
import sys
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks.training import format_rows
from benchmarks.training.format_rows import FEW_BITS, INTO_MU, Row
from benchmarks.training.text import stdlib_text
from benchmarks.training.text.stdlib_text import Text
from lowbit_optax import lpmm, stochastic_rounding
from tools.models.gpt import GPT

VOCABULARY = 65
POINTS = 100
"""The number of points of a curve. Each is the mean loss of a part of the training."""


class Protocol(NamedTuple):
    """The sizes of a run.

    Attributes:
      model: the model. If it has dropout, training uses it, and validation does not.
      batch: the number of windows of text in a batch.
      steps: the number of steps, a multiple of ``POINTS``.
      evaluations: the number of validation losses, evenly spaced, the last at the end.
    """

    model: GPT
    batch: int
    steps: int
    evaluations: int = 1

    @property
    def part(self) -> int:
        """The number of steps for a point of the curve."""
        return self.steps // POINTS


CPU = Protocol(GPT(4, 128, 4, 64, vocabulary=VOCABULARY), 12, 2000)
GPU = Protocol(
    GPT(6, 384, 6, 256, dtype=jnp.bfloat16, vocabulary=VOCABULARY, dropout=0.2),
    batch=64,
    steps=5000,
    evaluations=20,
)

_B1, _B2, _DECAY, _CLIP = 0.9, 0.99, 0.1, 1.0


def _matrices(params):
    """Return a tree that is True for parameters that decay, and False for norms."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: not format_rows.is_norm(jax.tree_util.keystr(path), x), params
    )


def _clipped(inner):
    return optax.chain(optax.clip_by_global_norm(_CLIP), inner)


def _of(optimizer, **options):
    """Return a function from a schedule to this optimizer with nanoGPT's options."""
    return lambda rate: _clipped(
        optimizer(rate, _B1, _B2, weight_decay=_DECAY, mask=_matrices, **options)
    )


def _lpmm(rate):
    """Return LPMM's Adam, which has no mask: the norms decay too."""
    inner = lowbit_optax.lpmm_adam(rate, _B1, _B2, weight_decay=_DECAY)
    return _clipped(inner)


_row = functools.partial(format_rows.of, _of(optax.adamw))
_bfloat16 = lowbit_optax.cast(jnp.bfloat16)
_factored = _of(format_rows.factored_adamw)

CONTROLS = {
    "float32, Nesterov": format_rows.of_float32(_of(optax.adamw, nesterov=True)),
    "float32, rate times 1.25": format_rows.of_float32(
        lambda rate: _of(optax.adamw)(lambda step: 1.25 * rate(step))
    ),
    "error into mu, float32 moments": _row(INTO_MU, "float32"),
    "error into mu, Nesterov": format_rows.of(
        _of(optax.adamw, nesterov=True), INTO_MU, "float32"
    ),
}
"""Rows that explain the others. They run only if named."""

ROWS = {
    "float32": format_rows.of_float32(_of(optax.adamw)),
    "lowbit": _row(),
    "Kahan": _row(lowbit_optax.kahan(), _bfloat16),
    "stochastic": _row(stochastic_rounding(), _bfloat16),
    "factored": format_rows.of(_factored, moments=FEW_BITS),
    "factored, no extra bits": format_rows.of(_factored, INTO_MU, FEW_BITS),
    "LPMM, 12 bits": Row(_lpmm, None),
    "bfloat16, nearest": _row(lowbit_optax.nearest(), _bfloat16),
    **CONTROLS,
}


def characters(path: pathlib.Path) -> Text:
    """Return the numbers of the characters, and hold out the last tenth."""
    data = np.frombuffer(path.read_bytes(), np.uint8)
    known, numbers = np.unique(data, return_inverse=True)
    if len(known) != VOCABULARY:
        sys.exit(
            f"error: --text must contain {VOCABULARY} different characters, got "
            f"{len(known)} in {path}"
        )
    count = int(0.9 * len(numbers))
    return Text(numbers[:count], numbers[count:])


@functools.cache
def optimizer(name: str, steps: int) -> optax.GradientTransformation:
    """Return the optimizer of a row, for a run with this number of steps."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, steps, 1e-4)
    return ROWS[name].build(rate)


def train(
    name: str, seed: int, text: Text, protocol: Protocol, parts: Iterable[int]
) -> dict:
    """Train one row with one seed, and return its losses.

    Args:
      name: a key of ``ROWS``.
      seed: the seed of the weights, the batches and the dropout.
      text: the text.
      protocol: the sizes.
      parts: the numbers below ``POINTS``, in order. If they end early, so does the run.
    """
    model, tx = protocol.model, optimizer(name, protocol.steps)
    losses, validation = [], []
    carry = ROWS[name].start(tx, model.init(jax.random.key(seed)))
    for part in parts:
        shape = protocol.part, protocol.batch
        batches = stdlib_text.random_windows(
            text.train, (seed, part), shape, model.context + 1
        )
        keys = _keys(protocol, seed, part)
        carry, loss = train_part(tx, model, carry, batches, keys)
        losses.append(float(loss))
        if len(losses) % (POINTS // protocol.evaluations) == 0:
            validation.append(validation_loss(model, carry[0], text.held_out))
    if len(losses) % (POINTS // protocol.evaluations):
        validation.append(validation_loss(model, carry[0], text.held_out))
    found = {"validation": validation[-1], "training": float(np.mean(losses[-10:]))}
    if protocol.evaluations > 1:
        found |= {"best": min(validation), "validations": validation}
    return found | {"curve": losses}


def _keys(protocol: Protocol, seed: int, part: int) -> jax.Array | None:
    """Return a key per step of a part, or None without dropout."""
    if not protocol.model.dropout:
        return None
    # Weights are drawn from the key of the seed itself.
    key = jax.random.fold_in(jax.random.key(-1 - seed), part)
    return jax.random.split(key, protocol.part)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_part(tx, model: GPT, carry, batches, keys):
    """Train with each batch and key, and return the carry and the mean loss."""

    def step(carry, inputs):
        params, state = carry
        loss, grads = lpmm.value_and_grad(model.loss, lazy=True)(params, *inputs)
        return lowbit_optax.step(tx, params, state, grads), loss

    carry, losses = jax.lax.scan(step, carry, (batches, keys))
    return carry, losses.mean()


def validation_loss(model: GPT, params, held_out: np.ndarray) -> float:
    """Return the mean loss over the held-out text, in windows that do not overlap."""
    count = (len(held_out) - 1) // model.context
    starts = model.context * np.arange(count)
    windows = held_out[starts[:, None] + np.arange(model.context + 1)]
    batch = max(size for size in range(1, 65) if count % size == 0)
    batches = windows.astype(np.int32).reshape(-1, batch, model.context + 1)
    return float(jnp.mean(_losses(model, params, batches)))


@functools.partial(jax.jit, static_argnums=0)
def _losses(model, params, windows):
    return jax.lax.map(lambda tokens: model.loss(params, tokens), windows)
