"""Bytes of weight patches, by learning rate, for the model of ``reinforcement``.

    .venv/bin/python -m benchmarks weight_patches

The bfloat16 weights of ``lowbit`` are fine-tuned as in ``reinforcement``. After each
step, a patch brings a sampler's copy of the weights, in NumPy, to the trainer's
weights. The record contains the bytes of a patch, divided by the bytes of all weights,
and whether all bits of the two copies are equal after the last step. The run at 3e-6
has five times as many steps as the others.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import lowbit_optax
from benchmarks import records
from benchmarks.training import reinforcement
from benchmarks.training.reinforcement import PROMPT, PROMPTS
from benchmarks.training.text import stdlib_text
from lowbit_optax import patches

RATES = (1e-6, 3e-6, 1e-5, 1e-4)
LONGEST, TIMES = 3e-6, 5
SHARES = "changed", "bytes", "largest"


@functools.partial(jax.jit, static_argnums=0)
def _step(tx, params, state, prompts, key):
    grads, _ = reinforcement.gradients(params, prompts, key)
    new, state = lowbit_optax.step(tx, params, state, grads)
    return new, state, patches.diff(params, new)


def train(rate: float, args) -> dict:
    """Return the sizes of the patches of a run, relative to the weights."""
    tx, params, state = reinforcement.begun("lowbit", rate)
    steps = args.steps * (TIMES if rate == LONGEST else 1)
    text = stdlib_text.load().held_out
    prompts = stdlib_text.random_windows(text, (0,), (steps, PROMPTS), PROMPT)
    sampled = jax.tree.map(np.asarray, params)
    sent = received = patches.start(params)
    weights = sum(x.nbytes for x in jax.tree.leaves(sampled))
    count = sum(x.size for x in jax.tree.leaves(sampled))
    sizes, changed = [], []
    for number, key in enumerate(jax.random.split(jax.random.key(0), steps)):
        params, state, marks = _step(tx, params, state, prompts[number], key)
        patch, sent = patches.pack(params, marks, sent)
        sampled, received = patches.apply(sampled, patch, received)
        sizes.append(len(patch) / weights)
        changed.append(sum(jnp.bitwise_count(x).sum() for x in jax.tree.leaves(marks)))
    ended = patches.start(params) == patches.start(sampled) and sent == received
    print(f"{rate:g}: {np.mean(sizes):.4f} of {weights:,} bytes", flush=True)
    return {
        "steps": steps,
        "bytes": float(np.mean(sizes)),
        "largest": float(np.max(sizes)),
        "changed": float(np.mean(changed) / count),
        "is_equal": bool(ended),
    }


def table(record: dict) -> str:
    """Return a Markdown table with a row for each learning rate."""
    heads = ["learning rate", "changed weights", "bytes per step", "largest patch"]
    heads.append("steps")
    rows = [
        [f"{float(rate):.0e}".replace("e-0", "e-"), *map(str, cells)]
        for rate, run in record["runs"].items()
        for cells in [[*(f"{run[x]:.2%}" for x in SHARES), run["steps"]]]
    ]
    return records.table(heads, rows)


def text(record: dict) -> str:
    equal = all(run["is_equal"] for run in record["runs"].values())
    return f"{table(record)}\n\nbits are equal at the end: {equal}"


def measure(args) -> dict:
    return {"runs": {f"{rate:g}": train(rate, args) for rate in RATES}}


main = records.program(__name__, steps=100)
