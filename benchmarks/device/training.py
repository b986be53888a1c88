"""Train a GPT-2 124M, and measure its losses, tokens per second and memory.

The text is the source code of Python's standard library. Its bytes are the tokens, and
the vocabulary has GPT-2's size. Every row of the table computes with bfloat16 weights.
Each row runs in its own process, so its peak memory includes no other row.
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device.job import Job
from benchmarks.device.optimizers import OPTIMIZERS, nbytes
from benchmarks.training.text import stdlib_text
from lowbit_optax import release
from tools.models.gpt import GPT

RATE = 3e-4
ROWS = {
    "lowbit_adamw": ("lowbit_adamw", False),
    "optax, float32 master": ("optax, float32 master", False),
    "lowbit_adamw, released": ("lowbit_adamw", True),
    "kahan_adamw": ("kahan_adamw", False),
    "optax, float32": ("optax, float32", False),
}
"""For each row, the optimizer and whether its step runs inside the backward pass."""


def sizes(small: bool) -> tuple[GPT, int, int]:
    """Return the model, the number of examples in a batch, and the number of steps."""
    if small:
        return GPT(2, 64, 2, 32, "none", jnp.bfloat16), 4, 30
    return GPT(12, 768, 12, 1024, "none", jnp.bfloat16, 50257), 8, 200


def measure(job: Job, optimizer_name: str, released: bool) -> dict:
    """Compile a training step, and train if programs run here.

    Args:
      job: the job, which compiles the programs and waits for the device.
      optimizer_name: a key of ``OPTIMIZERS``.
      released: whether the step runs inside the backward pass.
    """
    model, batch, steps = sizes(job.small)
    optimizer = OPTIMIZERS[optimizer_name](RATE)

    def init(key):
        return optimizer.init(model.init(key, jnp.bfloat16))

    def train_step(params, state, tokens):
        if released:
            return release.value_and_update(model.loss, optimizer.tx)(
                params, state, tokens
            )
        loss, grads = jax.value_and_grad(model.loss)(params, tokens)
        return loss, *optimizer.step(params, state, grads)

    # XLA times matrix products on the device while it compiles.
    job.take_device()
    key = jax.eval_shape(lambda: jax.random.key(0))
    params, state = jax.eval_shape(init, key)
    tokens = jax.ShapeDtypeStruct((batch, model.context + 1), jnp.int32)
    start = job.compile("init", init, key)
    step = job.compile("step", train_step, params, state, tokens, donate=(0, 1))
    figures = {
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "stored_bytes": nbytes((params, state)),
        "tokens_per_step": batch * model.context,
        "steps": steps,
    }
    if not job.runs:
        return figures
    return figures | trained(start, step, batch, model.context, steps)


def trained(start, step, batch: int, context: int, steps: int) -> dict:
    """Train, and return losses, speed and peak memory of the run.

    Args:
      start: compiled function of a random key, which returns parameters and state.
      step: compiled training step.
      batch: the number of examples per step.
      context: the number of bytes per example.
      steps: the number of steps.
    """
    text = stdlib_text.load().train
    windows = [
        jax.device_put(stdlib_text.random_windows(text, (i,), batch, context + 1))
        for i in range(steps)
    ]
    # Arrays that init returns twice may share a buffer, which cannot be donated twice.
    params, state = jax.tree.map(jnp.copy, start(jax.random.key(0)))
    losses, seconds = [], []
    for first in range(0, steps, 10):
        begin = time.perf_counter()
        for tokens in windows[first : first + 10]:
            loss, params, state = step(params, state, tokens)
            losses.append(loss)
        jax.block_until_ready((params, state))
        seconds.append((time.perf_counter() - begin) / 10)
    losses = np.asarray(losses, np.float32)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-10:].mean()),
        "losses": [round(float(x), 4) for x in losses[:: max(1, steps // 20)]],
        "finite": bool(np.isfinite(losses).all()),
        "ms_per_step": 1e3 * statistics.median(seconds[1:]),
        "tokens_per_second": batch * context / statistics.median(seconds[1:]),
        "peak_bytes": stats.get("peak_bytes_in_use"),
    }


def run(job: Job, name: str) -> None:
    """Run one row of the table."""
    job.attempt("GPT-2", functools.partial(measure, job, *ROWS[name]))
