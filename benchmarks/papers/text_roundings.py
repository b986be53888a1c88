"""bfloat16 weights by rounding, in an encoder that classifies and in a GRU.

    .venv/bin/python -m benchmarks text_roundings

Zamirai et al. 2020, table 4, BERT and DeepSpeech2: weights rounded to nearest lose
accuracy, and stochastic rounding and Kahan summation do not. In this benchmark, a small
transformer encoder learns with AdamW to distinguish modules of Python's standard
library, and a GRU learns the next byte of their text with SGD and momentum. Weights and
gradients are bfloat16, moments and activations float32.
"""

import functools

import jax
import jax.numpy as jnp
import optax

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.papers import small_text_models as models

RUNS = {
    "float32": None,
    "nearest": lowbit_optax.nearest(),
    "stochastic": lowbit_optax.stochastic_rounding(),
    "Kahan": lowbit_optax.kahan(),
}
TASKS = {"encoder": models.ENCODER, "GRU": models.GRU}
RATES = {"encoder": 2e-3, "GRU": 0.3}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def train(task: str, rate: float, name: str, params, rows):
    """Train once, and return float32 parameters."""
    steps = len(rows.labels)
    schedule, dtype = optax.linear_schedule(rate, 0.0, steps), jnp.float32
    is_encoder = task == "encoder"
    tx = optax.adamw(schedule) if is_encoder else optax.sgd(schedule, 0.9)
    if RUNS[name] is not None:
        weights, dtype = RUNS[name], jnp.bfloat16
        tx = lowbit_optax.lowbit(tx, weights=weights, moments="float32", min_size=0)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    widen = lambda params: jax.tree.map(lambda x: x.astype(jnp.float32), params)

    def body(carry, batch):
        params, state = carry
        grads = jax.grad(TASKS[task].loss)(widen(params), batch)
        grads = jax.tree.map(lambda g: g.astype(dtype), grads)
        return lowbit_optax.step(tx, params, state, grads), None

    (params, _), _ = jax.lax.scan(body, (params, tx.init(params)), rows)
    return widen(params)


def measure(args) -> dict:
    spreads, gaps = {}, {}
    for task, model in TASKS.items():
        run = functools.partial(train, task, args.rate * RATES[task])
        found = model.ends(run, RUNS, args)
        spreads[task], gaps[task] = records.compared(found, "float32")
    return {"held_out": spreads, "gaps_to_float32": gaps}


@pictures.panels(3, (1, 1), sharey=True)
def draw(record: dict, *both) -> str:
    tasks = record["gaps_to_float32"].items()
    for axes, (task, gaps) in zip(both, tasks, strict=True):
        label = "held-out loss minus float32's, nats"
        pictures.each_seed(axes, gaps["loss"], label, digits=4)
        axes.set(title=f"{task}, {'AdamW' if task == 'encoder' else 'SGD'}")
    return (
        "Nearest rounding of bfloat16 weights raises the loss; stochastic rounding and "
        "Kahan summation do not"
    )


main = records.program(__name__, **models.NUMBERS, rate=1.0)
