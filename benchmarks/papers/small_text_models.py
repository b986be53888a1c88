"""Two small models of text: an encoder that classifies, and a recurrent network.

The encoder reads 16 bytes and predicts which of four modules of Python's standard
library contains them. The recurrent network is a GRU that predicts each next byte.
"""

import functools
import pathlib
import sysconfig
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks import records
from benchmarks.papers import next_byte
from benchmarks.training.text import stdlib_text

WIDTH, HEADS, LENGTH, BATCH, HELD_OUT = 32, 4, 16, 32, 4096
MODULES = ("_pydecimal.py", "argparse.py", "ast.py", "tarfile.py")


class Rows(NamedTuple):
    """Bytes int32 [..., LENGTH], with labels int32 [...] or the next bytes."""

    inputs: jax.Array
    labels: jax.Array


class Task(NamedTuple):
    """A model and its data.

    Attributes:
      init: ``(seed, width) -> parameters`` in float32.
      logits: ``(parameters, inputs) -> logits``.
      rows: ``(seed, steps) -> Rows`` with BATCH examples for each step.
      held_out: ``() -> Rows``.
    """

    init: Callable
    logits: Callable
    rows: Callable
    held_out: Callable

    def loss(self, params, rows: Rows) -> jax.Array:
        """Return the mean loss in nats."""
        logits = self.logits(params, rows.inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows.labels)
        return losses.mean()

    def accuracy(self, params, rows: Rows) -> jax.Array:
        """Return the share of examples whose label has the largest logit."""
        return (self.logits(params, rows.inputs).argmax(-1) == rows.labels).mean()

    def ends(self, train: Callable, runs: Iterable[str], args) -> dict[str, dict]:
        """Return the held-out loss and accuracy of each run and seed.

        Args:
          train: ``(run, parameters, rows) -> parameters``.
          runs: the names of the runs.
          args: options with ``seeds``, ``steps`` and ``width``.
        """
        held_out = self.held_out()

        def of(run: str, seed: int) -> dict:
            start = self.init(seed, args.width)
            params = train(run, start, self.rows(seed, args.steps))
            parts = {"loss": self.loss, "accuracy": self.accuracy}
            return {part: jax.jit(f)(params, held_out) for part, f in parts.items()}

        return records.of_seeds(runs, args.seeds, of)


@functools.cache
def _modules() -> list[np.ndarray]:
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    files = [(folder / name).read_bytes() for name in MODULES]
    return [np.frombuffer(each, np.uint8) for each in files]


def _classified(seed: tuple, count: int, is_held_out: bool) -> Rows:
    """Return windows of the first nine tenths of each module, or of its last tenth."""
    random = np.random.default_rng(seed)
    labels = random.integers(len(MODULES), size=count)
    windows = np.empty((count, LENGTH), np.int32)
    for label, text in enumerate(_modules()):
        cut = len(text) * 9 // 10
        part = text[cut:] if is_held_out else text[:cut]
        mine = labels == label
        windows[mine] = stdlib_text.random_windows(
            part, (*seed, label), int(mine.sum()), LENGTH
        )
    return Rows(jnp.asarray(windows), jnp.asarray(labels, jnp.int32))


def _in_steps(rows: Rows, steps: int) -> Rows:
    return Rows(*(x.reshape(steps, BATCH, *x.shape[1:]) for x in rows))


def _encoder_init(seed: int, width: int) -> dict:
    keys = iter(jax.random.split(jax.random.key(seed), 7))
    normal = lambda *shape: jax.random.normal(next(keys), shape) * shape[0] ** -0.5
    return {
        "embedding": jax.random.normal(next(keys), (256, width)),
        "positions": jax.random.normal(next(keys), (LENGTH, width)),
        "qkv": normal(width, 3 * width),
        "out": normal(width, width),
        "up": normal(width, 4 * width),
        "down": normal(4 * width, width),
        "head": normal(width, len(MODULES)),
    }


def _norm(x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, epsilon=1e-5)


def _encoder_logits(params: dict, inputs: jax.Array) -> jax.Array:
    x = params["embedding"][inputs] + params["positions"]
    heads = (_norm(x) @ params["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1)
    q, k, v = (heads[:, :, i] for i in range(3))
    mixed = jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
    x = x + mixed @ params["out"]
    x = x + jax.nn.relu(_norm(x) @ params["up"]) @ params["down"]
    return _norm(x).mean(1) @ params["head"]


def _gru_init(seed: int, width: int) -> dict:
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    normal = lambda *shape: jax.random.normal(next(keys), shape) * shape[0] ** -0.5
    return {
        "embedding": jax.random.normal(next(keys), (256, width)),
        "inputs": normal(width, 6 * width),
        "hidden": normal(2 * width, 6 * width),
        "out": normal(2 * width, 256),
    }


def _gru_logits(params: dict, inputs: jax.Array) -> jax.Array:
    """Compute a GRU (Cho et al. 2014) with the reset gate after the product."""
    gates = params["embedding"][inputs] @ params["inputs"]

    def body(hidden, of_input):
        r, z, n = jnp.split(of_input, 3, -1)
        of_r, of_z, of_n = jnp.split(hidden @ params["hidden"], 3, -1)
        update = jax.nn.sigmoid(z + of_z)
        new = jnp.tanh(n + jax.nn.sigmoid(r + of_r) * of_n)
        hidden = update * hidden + (1 - update) * new
        return hidden, hidden

    first = jnp.zeros((len(inputs), params["hidden"].shape[0]))
    _, hidden = lax.scan(body, first, gates.swapaxes(0, 1))
    return hidden.swapaxes(0, 1) @ params["out"]


def _next_bytes(windows) -> Rows:
    return Rows(jnp.asarray(windows[..., :-1]), jnp.asarray(windows[..., 1:]))


def _gru_rows(seed: int, steps: int) -> Rows:
    text = next_byte.text().train
    shape = steps, BATCH
    return _next_bytes(stdlib_text.random_windows(text, (seed,), shape, LENGTH + 1))


def _gru_held_out() -> Rows:
    text = next_byte.text().held_out
    return _next_bytes(stdlib_text.even_windows(text, HELD_OUT // 4, LENGTH + 1))


ENCODER = Task(
    _encoder_init,
    _encoder_logits,
    lambda seed, steps: _in_steps(_classified((seed,), steps * BATCH, False), steps),
    lambda: _classified((0, 0), HELD_OUT, True),
)
GRU = Task(_gru_init, _gru_logits, _gru_rows, _gru_held_out)
NUMBERS = {"seeds": 4, "steps": 1000, "width": WIDTH}
"""The options of a benchmark that trains these models."""
