"""A GPT trained in each format, to the end of its learning rate schedule.

    .venv/bin/python -m benchmarks compute_optimal
    .venv/bin/python -m benchmarks compute_optimal --rows float32 lowbit --seeds 1
    .venv/bin/python -m benchmarks compute_optimal --torch .venv-torch/bin/python
    .venv/bin/python -m benchmarks compute_optimal --large --seeds 1

The training is compute-optimal: it uses 20 bytes of text per parameter, and text
repeats only by chance. AdamW has b2 = 0.95, weight decay 0.1, clipping by the global
norm, and a learning rate that warms up and then decays to a thousandth of its peak in a
cosine. All rows start from the same weights and use the same batches. The text is
Python's standard library.

Each complete run is stored in its own file. Runs that have a file, or are in the
record, are not trained again, so several processes may train different rows.
``--torch`` also trains PyTorch's AdamW and torchao, with a Python that has both;
flashoptim-jax is trained if it is installed. ``--large`` trains a model with a million
parameters in fewer rows, and has its own record.
"""

import functools
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from flax.training.train_state import TrainState as State
from tqdm import tqdm

from benchmarks import ROOT, pictures, records
from benchmarks.training import format_rows
from benchmarks.training.text import kept_runs, optimal_rows, stdlib_text
from benchmarks.training.text.optimal_rows import GPT2, ROWS, SIZES, Size
from lowbit_optax.training import TrainState
from tools.models.gpt import GPT

POINTS = 100
"""The number of points in a curve. Each is the mean loss of a part of the training."""

TAIL = 10
"""The number of points, at the end, at which the held-out loss is also measured."""

BATCH = 16

TORCH = pathlib.Path(__file__).parent / "text" / "torch_gpt.py"


def main(argv: list[str] | None = None) -> None:
    parser = records.Options(__doc__, seeds=2)
    add = parser.add_argument
    add("--rows", nargs="+", choices=ROWS, metavar="ROW", help="train only these")
    add("--torch", metavar="PYTHON", help="also train torch and torchao")
    add("--large", action="store_true", help="a model with a million parameters")
    args = parser.parse_args(argv)
    path, size = records.path_of(__name__), SIZES["large" if args.large else "small"]
    if args.large:
        path = path.with_stem(f"{path.stem}_large")
    if not args.draw:
        folder = ROOT / "runs" / path.stem
        before = records.load(path) if path.exists() else None
        train_all(args, size, folder, before)
        # These options select runs, and do not describe the record.
        del args.rows, args.torch, args.large
        records.save(path, args, records.ran_here(), **gathered(folder, before, size))
    record = records.load(path)
    print(records.figures(record))
    draw(record, pictures.picture_of(path.stem))


def train_all(args, size: Size, folder: pathlib.Path, record: dict | None) -> None:
    """Train the selected runs that are not complete, and write a file for each."""
    complete, text = _complete(folder, record), stdlib_text.load_whole()
    settings = {"steps": size.steps, "batch_size": BATCH}
    settings["learning_rate"] = size.learning_rate
    of = lambda name, seed: train(name, seed, size.model, text, settings)
    kept_runs.train_missing(args.rows or size.rows, args.seeds, folder, complete, of)
    for seed in range(args.seeds) if args.torch else ():
        kept = [name for name, runs in complete.items() if seed in runs]
        job = settings | {"seed": seed, "complete": kept}
        _train_peers(args.torch, size.model, text, job, folder)


def train(name: str, seed: int, model: GPT, text, settings: dict, rows=ROWS) -> dict:
    """Train one of the ``rows`` with one seed."""
    row, steps = rows[name], settings["steps"]
    tx = row.build(schedule(settings["learning_rate"], steps))
    params, opt_state = row.start(tx, model.init(jax.random.key(seed)))
    kind = State if row.dtype == jnp.float32 else TrainState
    state = kind(0, None, params, tx, opt_state)
    state = state.replace(step=jnp.int32(0))
    losses, held_out, windows = [], [], held_out_windows(model, text)
    bar = tqdm(range(POINTS), f"{name}, seed {seed}", disable=None)
    for point in bar:
        batches = part(text, seed, point, model, settings)
        state, found = _train_part(model, state, batches)
        losses.append(float(found.mean()))
        if point >= POINTS - TAIL:
            held_out.append(float(_losses(model, state.params, windows).mean()))
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    size = row.bytes_per_parameter(GPT2)
    return {"bytes": size, "losses": losses, "held_out": held_out}


def schedule(peak: float, steps: int) -> optax.Schedule:
    """Return a warmup over 2% of the steps, then a cosine to a thousandth."""
    return optax.warmup_cosine_decay_schedule(0.0, peak, steps // 50, steps, peak / 1e3)


def part(text, seed: int, point: int, model: GPT, settings: dict) -> np.ndarray:
    """Return the batches of a part: int32 [steps, batch, context + 1]."""
    shape = settings["steps"] // POINTS, settings["batch_size"]
    return stdlib_text.random_windows(
        text.train, (seed, point), shape, model.context + 1
    )


def held_out_windows(model: GPT, text) -> np.ndarray:
    """Return 64 KiB of held-out text: int32 [batches, 16, context + 1]."""
    count = 2**16 // model.context
    windows = stdlib_text.even_windows(text.held_out, count, model.context + 1)
    return windows.reshape(-1, 16, model.context + 1)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _train_part(model: GPT, state, batches):
    def step(state, tokens):
        loss, grads = optimal_rows.loss_and_grads(model.loss, state.params, tokens)
        return state.apply_gradients(grads=grads), loss

    return jax.lax.scan(step, state, batches)


@functools.partial(jax.jit, static_argnums=0)
def _losses(model: GPT, params, windows):
    return jax.lax.map(lambda tokens: model.loss(params, tokens), windows)


def _train_peers(python: str, model: GPT, text, settings: dict, folder) -> None:
    """Run PyTorch in another process, with the same weights, text and schedule."""
    seed = settings["seed"]
    job = folder / f"peers_{seed}.npz"
    weights = traverse_util.flatten_dict(model.init(jax.random.key(seed)), sep="/")
    shared = {
        **settings,
        "points": POINTS,
        "tail": TAIL,
        "heads": model.heads,
        "betas": (optimal_rows.B1, optimal_rows.B2),
        "decay": optimal_rows.DECAY,
        "clip": optimal_rows.CLIP,
    }
    rates = schedule(settings["learning_rate"], settings["steps"])
    np.savez(
        job,
        **weights,
        train=text.train,
        held_out=held_out_windows(model, text),
        rates=jax.vmap(rates)(jnp.arange(settings["steps"])),
        settings=json.dumps(shared),
    )
    done = subprocess.run([python, str(TORCH), str(job)], cwd=ROOT)
    if done.returncode:
        sys.exit(f"error: {TORCH.name} ended with {done.returncode}")


def gathered(folder: pathlib.Path, record: dict | None, of: Size) -> dict:
    """Return the figures of the record, from the old record and new complete runs."""
    found = _complete(folder, record)
    shapes = jax.eval_shape(of.model.init, jax.random.key(0))
    size = sum(x.size for x in jax.tree.leaves(shapes))
    order = dict.fromkeys(name for name in [*ROWS, *found] if name in found)
    return {
        "parameters": size,
        "steps": of.steps,
        "tokens_per_parameter": of.steps * BATCH * of.model.context / size,
        "runs": {name: _figures(name, found) for name in order},
    }


def _complete(folder: pathlib.Path, record: dict | None) -> kept_runs.Runs:
    """Return the complete runs by row and seed."""
    recorded: kept_runs.Runs = {}
    for name, run in record["runs"].items() if record else ():
        size, runs = run["bytes_per_parameter"], recorded.setdefault(name, {})
        each = zip(run["seeds"], run["curves"], run["tails"], strict=True)
        for seed, losses, held_out in each:
            runs[seed] = {"bytes": size, "losses": losses, "held_out": held_out}
    return kept_runs.complete(folder, recorded)


def _figures(name: str, found: kept_runs.Runs) -> dict:
    """Return the curves and final losses of a row, and its differences to its base."""
    own = found[name]
    return {
        "bytes_per_parameter": next(iter(own.values()))["bytes"],
        "seeds": list(own),
        "curves": [run["losses"] for run in own.values()],
        "tails": [run["held_out"] for run in own.values()],
        **format_rows.compared(_ends(own), _ends(found.get(_base(name), {}))),
    }


def _ends(runs: dict[int, dict]) -> dict[int, dict[str, float]]:
    """Return the final losses of each seed."""
    training = lambda run: np.mean(run["losses"][-TAIL:])
    return {
        seed: {"training": training(run), "held_out": run["held_out"][-1]}
        for seed, run in runs.items()
    }


def _base(name: str) -> str:
    if name in ROWS:
        return ROWS[name].base
    return "torch AdamW, float32" if name.startswith("torch") else "float32"


@pictures.panels(5)
def draw(record: dict, axes) -> str:
    runs = {
        name: run
        for name, run in record["runs"].items()
        if name != _base(name) and "held_out" in run["gaps"]
    }
    found = {name: run["gaps"]["held_out"] for name, run in runs.items()}
    sizes = {name: run["bytes_per_parameter"] for name, run in runs.items()}
    label = "held-out loss minus float32's, nats per byte"
    pictures.each_seed(axes, found, label, sizes=sizes)
    ends = {name: f"{each['mean']:.3f} above float32" for name, each in found.items()}
    plain, lowbit = map(ends.get, ("bfloat16, nearest", "lowbit"))
    return f"Plain bfloat16 ends {plain}; lowbit ends {lowbit}"
