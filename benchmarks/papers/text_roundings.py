"""bfloat16 weights by rounding, of an encoder that classifies and of a GRU.

    .venv/bin/python -m benchmarks text_roundings

Zamirai et al. 2020, table 4, rows of BERT and DeepSpeech2: with weights rounded to
nearest they lose accuracy, with stochastic rounding or Kahan summation they do not. In
small: a transformer encoder tells modules of Python's standard library apart, by AdamW,
and a GRU learns the next byte of their text, by SGD with momentum. Weights and
gradients are bfloat16, moments and activations float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
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


def optimizer(task: str, rate) -> optax.GradientTransformation:
    return optax.adamw(rate) if task == "encoder" else optax.sgd(rate, 0.9)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def train(task: str, name: str, rate: float, params, rows):
    """float32 parameters after one run."""
    steps = len(rows.labels)
    tx, dtype = optimizer(task, optax.linear_schedule(rate, 0.0, steps)), jnp.float32
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


def draw(record: dict, is_apart: bool) -> None:
    path = pictures.picture_of("text_roundings", is_apart)
    with pictures.drawn(path, 2.6, (1, 1)) as both:
        for axes, (task, gaps) in zip(
            both, record["gaps_to_float32"].items(), strict=True
        ):
            for name, found in gaps["loss"].items():
                values, color = found["values"], pictures.COLORS[name]
                axes.plot(values, [name] * len(values), ".", color=color, alpha=0.5)
                axes.plot(found["mean"], name, "|", color=color, ms=18, mew=2.5)
            axes.axvline(0, color="black", lw=1)
            axes.invert_yaxis()
            axes.margins(y=0.3)
            axes.set(xlabel=f"{task}: held-out loss, minus float32's")


def main(argv: list[str] | None = None) -> None:
    parser = records.parser(__doc__, seeds=4)
    parser.add_argument("--steps", type=int, help="1000 by default")
    parser.add_argument("--width", type=int, help="a multiple of 4; 32 by default")
    parser.add_argument("--rate", type=float, default=1.0, help="a factor of the rates")
    args = parser.parse_args(argv)
    args.steps = args.steps or (50_000 if args.full else 1000)
    args.width = args.width or (256 if args.full else models.WIDTH)
    path = records.path_of(__name__, args.is_apart)
    if not args.draw:
        spreads, gaps = {}, {}
        for name, task in TASKS.items():
            found: dict = {p: {run: [] for run in RUNS} for p in ("loss", "accuracy")}
            held_out = task.held_out()
            for seed in range(args.seeds):
                rows, start = task.rows(seed, args.steps), task.init(seed, args.width)
                for run in RUNS:
                    params = train(name, run, args.rate * RATES[name], start, rows)
                    for part, values in found.items():
                        end = jax.jit(getattr(task, part))(params, held_out)
                        values[run].append(float(end))
                    loss, right = (found[part][run][-1] for part in found)
                    text = f"loss {loss:.4f}, {right:.2%}"
                    print(f"seed {seed} {name:8} {run:11} {text}", flush=True)
            spreads[name] = {
                part: {run: records.spread(v) for run, v in each.items()}
                for part, each in found.items()
            }
            gaps[name] = {p: records.gaps(v, "float32") for p, v in found.items()}
        ran = records.ran_here()
        records.save(path, args, ran, held_out=spreads, gaps_to_float32=gaps)
    record = records.load(path)
    for name, gaps in record["gaps_to_float32"].items():
        loss, right = (record["held_out"][name][p]["float32"] for p in gaps)
        right = f"{100 * right['mean']:.2f} ± {100 * right['std']:.2f} %"
        print(f"{name:8} float32     {records.shown(loss, 4)}  {right}")
        for run in gaps["loss"]:
            loss, right = (gaps[part][run] for part in gaps)
            right = np.array([right["mean"], right["std"]]) * 100
            text = f"{records.shown(loss, 4)}  {right[0]:+.2f} ± {right[1]:.2f} %"
            print(f"{name:8} {run:11} {text}")
    draw(record, args.is_apart)
