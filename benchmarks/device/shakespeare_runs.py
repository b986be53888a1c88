"""Train a GPT on the characters of Shakespeare in several formats, while time is left.

The sizes and options are nanoGPT's for one GPU. All rows use the same seed. A run times
its steps, and stops when the remaining steps would need more time than is left. The
record then has the last step and the losses so far.
"""

import functools
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device.job import Job
from benchmarks.training.text import shakespeare_rows
from benchmarks.training.text.shakespeare_rows import GPU, POINTS, VOCABULARY, Protocol
from tools.models.gpt import GPT

ROWS = (
    "float32",
    "lowbit",
    "factored",
    "factored, no extra bits",
    "Kahan",
    "bfloat16, nearest",
)
"""The rows of ``shakespeare_rows`` in the order in which they run."""

SMALL = Protocol(
    GPT(1, 64, 2, 16, dtype=jnp.bfloat16, vocabulary=VOCABULARY, dropout=0.2),
    batch=4,
    steps=200,
    evaluations=2,
)


def measure(job: Job, name: str) -> dict:
    """Train one row, or compile a part of its training if programs do not run here."""
    protocol = SMALL if job.small else GPU
    if not job.runs:
        return compiled(job, name, protocol)
    text = shakespeare_rows.characters(pathlib.Path(job.text or ""))
    job.take_device()
    seconds: list[float] = []

    def parts():
        for part in range(POINTS):
            job.say(step=part * protocol.part)  # the supervisor hears that it runs
            start = time.monotonic()
            yield part
            seconds.append(time.monotonic() - start)
            if part:  # the first part includes the compilation
                left = (POINTS - part - 1) * statistics.median(seconds[1:])
                if time.monotonic() + left > job.end:
                    return

    found = shakespeare_rows.train(name, 0, text, protocol, parts())
    curve = found["curve"]
    return found | {
        "step": len(curve) * protocol.part,
        "steps": protocol.steps,
        "ms_per_step": 1e3 * statistics.median(seconds[1:]) / protocol.part,
        "finite": bool(np.isfinite(curve).all()),
        "first_loss": curve[0],
        "last_loss": curve[-1],
    }


def compiled(job: Job, name: str, protocol: Protocol) -> dict:
    """Compile a part of the training of one row."""
    model, tx = protocol.model, shakespeare_rows.optimizer(name, protocol.steps)

    def init(key):
        return shakespeare_rows.ROWS[name].start(tx, model.init(key))

    key = jax.eval_shape(lambda: jax.random.key(0))
    shape = (protocol.part, protocol.batch, model.context + 1)
    batches = jax.ShapeDtypeStruct(shape, jnp.int32)
    keys = jax.ShapeDtypeStruct(shape[:1], key.dtype)
    train = functools.partial(shakespeare_rows.train_part, tx, model)
    job.compile("part", train, jax.eval_shape(init, key), batches, keys, donate=(0,))
    return {"steps": protocol.steps}


def run(job: Job, name: str) -> None:
    """Train one row."""
    job.attempt("Shakespeare", functools.partial(measure, job, name))
