"""LPMM's Adam on a small encoder of text, by bits of the weights.

    .venv/bin/python -m benchmarks lpmm_text

LPMM, table 4: RoBERTa-Large on GLUE by Adam with weights of 12, 10 and 8 bits, 8-bit
moments. In small: a transformer encoder tells modules of Python's standard library
apart. Weights are rounded stochastically, and for comparison to nearest.
"""

import functools

import jax
import optax

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.papers import small_text_models as models
from lowbit_optax import lpmm

BITS = (12, 10, 8)
ROUNDINGS = ("stochastic", "nearest")
RUNS = {"float32": None} | {
    f"{bits} bits, {rounding}": (bits, rounding)
    for rounding in ROUNDINGS
    for bits in BITS
}
TASK = models.ENCODER


@functools.partial(jax.jit, static_argnums=(0, 1))
def train(name: str, rate: float, params, rows):
    """float32 parameters after one run."""
    schedule = optax.linear_schedule(rate, 0.0, len(rows.labels))
    if RUNS[name] is None:
        tx = optax.adam(schedule)
    else:
        bits, rounding = RUNS[name]
        tx = lowbit_optax.lpmm_adam(schedule, rounding=rounding, min_size=0)
        params = lowbit_optax.quantize_params(params, bits=bits, min_size=0)
    differentiate = lpmm.value_and_grad(TASK.loss)

    def body(carry, batch):
        params, state = carry
        _, grads = differentiate(params, batch)
        return lowbit_optax.step(tx, params, state, grads), None

    (params, _), _ = jax.lax.scan(body, (params, tx.init(params)), rows)
    return lowbit_optax.dequantize(params)


def draw(record: dict, is_apart: bool) -> None:
    def color(name: str) -> str:
        return pictures.COLORS[name.split(", ")[-1]]

    found = record["loss"]
    path = pictures.picture_of("lpmm_text", is_apart)
    with pictures.drawn(path, 2.8, (1,)) as (axes,):
        text = lambda name: f"{found[name]['mean']:.3f}"
        pictures.each_seed(axes, found, color, text)


def main(argv: list[str] | None = None) -> None:
    parser = records.parser(__doc__, seeds=4)
    parser.add_argument("--steps", type=int, help="1000 by default")
    parser.add_argument("--width", type=int, help="a multiple of 32; 32 by default")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="the first")
    args = parser.parse_args(argv)
    args.steps = args.steps or (50_000 if args.full else 1000)
    args.width = args.width or (256 if args.full else models.WIDTH)
    path = records.path_of(__name__, args.is_apart)
    if not args.draw:
        found: dict = {part: {run: [] for run in RUNS} for part in ("loss", "accuracy")}
        held_out = TASK.held_out()
        for seed in range(args.seeds):
            rows, start = TASK.rows(seed, args.steps), TASK.init(seed, args.width)
            for run in RUNS:
                params = train(run, args.learning_rate, start, rows)
                for part, values in found.items():
                    end = jax.jit(getattr(TASK, part))(params, held_out)
                    values[run].append(float(end))
                loss, right = (found[part][run][-1] for part in found)
                print(f"seed {seed} {run:20} loss {loss:.4f}, {right:.2%}", flush=True)
        gaps = {part: records.gaps(each, "float32") for part, each in found.items()}
        spreads = {
            part: {run: records.spread(values) for run, values in each.items()}
            for part, each in found.items()
        }
        ran = records.ran_here()
        records.save(path, args, ran, **spreads, gaps_to_float32=gaps)
    record = records.load(path)
    for run, each in record["loss"].items():
        gap = record["gaps_to_float32"]["loss"].get(run)
        against = records.shown(gap, 4) if gap else ""
        right = record["accuracy"][run]
        right = f"{100 * right['mean']:.2f} ± {100 * right['std']:.2f} %"
        print(f"{run:20} {records.shown(each, 4)}  {right}  {against}")
    draw(record, args.is_apart)
