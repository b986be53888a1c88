"""Fine-tuning all weights of a small GPT in 1.1 to 1.6 bytes, compared with float32.

    .venv/bin/python -m benchmarks fine_tuning --text FILE
    .venv/bin/python -m benchmarks fine_tuning --text FILE --rows "8 bits" LoRA
    .venv/bin/python -m benchmarks fine_tuning --gather
    .venv/bin/python -m benchmarks fine_tuning --draw

The protocol was written before the first run:

- *Start*: for each seed, a GPT with 217,664 parameters is trained in float32 on
  Python's standard library, with the optimizer, the learning rates and the number of
  steps of ``compute_optimal``.
- *Fine-tuning*: all rows of a seed start from these weights, and use the same 1,000
  batches of 16 windows of 64 bytes of FILE, which was Shakespeare (``tinyshakespeare``
  of nanoGPT). The weight decay is 0. Gradients are clipped to a norm of 1, and the
  learning rate warms up over 2% of the steps and decays to a thousandth in a cosine.
- *Figure*: the loss at the end on held-out text, the last twentieth of FILE, in nats
  per byte.
- *Rows*: ``float32`` is AdamW, and all other rows except LoRA have the factored second
  moment of ``factored_adamw``, so ``float32, factored`` shows the effect of the
  optimizer alone. Weights in float8, 8, 6 or 4 bits (blocks of 64) add their rounding
  errors to a first moment of 4 bits. In ``8 bits, errors lost``, they are rounded
  stochastically instead.
- *LoRA*: AdamW trains float32 factors of the matrices of the layers. The other weights
  are codes of 8 bits that do not change. The rank is the smallest one whose
  weights and state need at least the bytes of the row ``8 bits``.
- *Learning rates*: each row is trained at the three rates 1e-5, 1e-4 and 1e-3, and LoRA
  at rates ten times as high. No run is left out. The rate 0, which was added after the
  runs of two seeds, stands for the loss before fine-tuning. It shows the effect of
  rounding the weights at the start.
- *Pairs*: ten seeds, from 0 to 9. A row is compared with float32 at the same rate, and
  LoRA at the corresponding rate, by the differences of the losses of each seed. A row
  is also compared with LoRA, each at the rate with its lowest mean loss.
- *Verdict*: as in ``equivalence``, with the same margin of 0.004 nats. If the best rate
  is the highest rate, the comparison of best rates is for these three rates only.

A complete run is stored in its own file, and is not repeated. Several processes may
train at the same time, and you can interrupt them. ``--gather`` trains nothing, and
writes the record of all runs that are complete.
"""

import functools
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks import ROOT, pictures, records
from benchmarks.training import compute_optimal, equivalence, format_rows
from benchmarks.training.text import kept_runs, optimal_rows, stdlib_text
from benchmarks.training.text.optimal_rows import B1, B2, CLIP, SIZES
from lowbit_optax import lpmm
from tools.models.gpt import GPT

BEFORE = 0.0
"""The learning rate of the runs that show the loss before fine-tuning."""

RATES = (1e-5, 1e-4, 1e-3)
LORA_RATES = 10.0
"""The rates of LoRA divided by the rates of the other rows."""

SEEDS = 10
BASE, LORA = "float32", "LoRA"
BLOCK_SIZE = 64
WIDTH = 64
"""The smallest width of a matrix whose second moment is factored."""

MATRICES = ("qkv", "out", "up", "down")
"""The matrices of the layers, which LoRA changes."""


class Plan(NamedTuple):
    """The sizes of all runs."""

    model: GPT = SIZES["small"].model._replace(is_unrolled=True)
    first_steps: int = SIZES["small"].steps
    first_rate: float = SIZES["small"].learning_rate
    steps: int = 1000
    batch: int = compute_optimal.BATCH


class Row(NamedTuple):
    """A way to fine-tune.

    Attributes:
      build: a function from a schedule of learning rates to the optimizer.
      start: a function of the optimizer and float32 weights that returns what is
        trained, its state, and weights that do not change.
      weights: a function of what is trained and of the weights that do not change; it
        returns the weights of the model.
      factor: the factor of the learning rates.
    """

    build: Callable[[Any], optax.GradientTransformation]
    start: Callable
    weights: Callable = lambda trained, fixed: trained
    factor: float = 1.0


def _clipped(tx) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(CLIP), tx)


def adamw(rate) -> optax.GradientTransformation:
    return _clipped(optax.adamw(rate, B1, B2, weight_decay=0.0))


def factored(rate) -> optax.GradientTransformation:
    tx = format_rows.factored_adamw(rate, B1, B2, weight_decay=0.0, least=WIDTH)
    return _clipped(tx)


def into_mu(rate) -> optax.GradientTransformation:
    """Return the optimizer that adds rounding errors to a first moment of 4 bits."""
    tx = lowbit_optax.factored_adamw(
        rate, B1, B2, weight_decay=0.0, bits=0, min_dim_size_to_factor=WIDTH
    )
    return _clipped(tx)


def errors_lost(rate) -> optax.GradientTransformation:
    tx = lowbit_optax.factored_adamw(
        rate, B1, B2, weight_decay=0.0, min_dim_size_to_factor=WIDTH
    )
    return _clipped(tx)


def _whole(tx, weights):
    return weights, tx.init(weights), ()


def _float8(tx, weights):
    is_norm = format_rows.is_norm
    found = lowbit_optax.from_master(tx, weights, jnp.float8_e4m3fn, is_norm)
    return *found, ()


def quantized(bits: int, weights):
    return lpmm.quantize_params(weights, bits=bits, block_size=BLOCK_SIZE)


def _codes(bits: int, tx, weights):
    return _whole(tx, quantized(bits, weights))


def factors(rank: int, layers: dict) -> dict:
    """Return LoRA's factors of stacked matrices; the second factors are zeros."""
    keys = jax.random.split(jax.random.key(0), len(MATRICES))

    def of(key, name):
        depth, rows, columns = layers[name].shape
        first = jax.random.normal(key, (depth, rows, rank)) / np.sqrt(rows)
        return {"first": first, "second": jnp.zeros((depth, rank, columns))}

    return {x: of(key, x) for key, x in zip(keys, MATRICES, strict=True)}


def _lora(rank: int, tx, weights):
    added = factors(rank, weights["layers"])
    return added, tx.init(added), quantized(8, weights)


def merged(added: dict, fixed):
    """Return the weights of the model with LoRA, ``W + 2 A B``."""
    weights = lpmm.dequantize(fixed)
    layers = dict(weights["layers"])
    for name, each in added.items():
        layers[name] = layers[name] + 2 * each["first"] @ each["second"]
    return weights | {"layers": layers}


_BITS = {
    f"{bits} bits": Row(into_mu, functools.partial(_codes, bits)) for bits in (8, 6, 4)
}

FULL = {
    BASE: Row(adamw, _whole),
    "float32, factored": Row(factored, _whole),
    "float8": Row(into_mu, _float8),
    **_BITS,
    "8 bits, errors lost": Row(errors_lost, functools.partial(_codes, 8)),
}
"""The rows that train all weights."""

NAMES = (*FULL, LORA)

LABELS = {
    "float32": (0, 8, "center"),
    "float32, factored": (0, -16, "center"),
    "float8": (-6, -12, "right"),
    "6 bits": (-6, 4, "right"),
    "8 bits": (6, -14, "left"),
}
"""Where the picture has the labels of rows: the distance from the point, in points."""


def bytes_of(row: Row, model: GPT) -> int:
    """Return the bytes of weights and state, from shapes."""
    master = jax.eval_shape(model.init, jax.random.key(0))
    tx = row.build(optax.constant_schedule(1e-3))
    stored = jax.eval_shape(functools.partial(row.start, tx), master)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(stored))


def lora(rank: int) -> Row:
    """Return the row of LoRA with this rank."""
    return Row(adamw, functools.partial(_lora, rank), merged, LORA_RATES)


def rank_of(model: GPT) -> int:
    """Return the smallest rank whose LoRA needs the bytes of ``8 bits``."""
    room, rank = bytes_of(FULL["8 bits"], model), 1
    while bytes_of(lora(rank), model) < room:
        rank += 1
    return rank


def rows_of(model: GPT) -> dict[str, Row]:
    """Return all rows."""
    return FULL | {LORA: lora(rank_of(model))}


def main(argv: list[str] | None = None) -> None:
    parser = records.Options(__doc__)
    parser.add_argument("--rows", nargs="+", choices=NAMES, metavar="ROW")
    parser.add_argument("--text", type=pathlib.Path, metavar="FILE", help="a text file")
    parser.add_argument("--gather", action="store_true", help="train nothing")
    args = parser.parse_args(argv)
    path = records.path_of(__name__)
    if not args.draw:
        if not args.gather and (args.text is None or not args.text.is_file()):
            sys.exit(f"error: --text must be a text file, got {args.text}")
        folder = ROOT / "runs" / path.stem
        old = records.load(path) if path.exists() else {}
        recorded = _recorded(old) if old else {}
        if not args.gather:
            known = kept_runs.complete(folder, recorded)
            texts = stdlib_text.load_whole(), stdlib_text.load_file(args.text)
            train_all(
                Plan(),
                args.rows or NAMES,
                (BEFORE, *RATES),
                SEEDS,
                folder,
                known,
                texts,
            )
        found = figures(kept_runs.complete(folder, recorded), Plan().model)
        if args.gather and old:
            sizes = {name: old[name] for name in ("spacings", "sums of rates")}
        else:
            weights = started(Plan(), 0, folder, stdlib_text.load_whole())
            sizes = update_sizes(Plan(), weights)
        # These options select runs, and do not describe the record.
        del args.rows, args.text, args.gather
        records.save(path, args, records.ran_here(), **sizes, **found)
    record = records.load(path)
    print(text(record), verdicts(record), sep="\n\n")
    draw(record, pictures.picture_of(path.stem))


def run_name(row: str, rate: float) -> str:
    return f"{row}, {rate:g}"


def train_all(plan, names, rates, seeds: int, folder, known, texts) -> None:
    """Train the runs that are missing, and write a file for each.

    Args:
      plan: the sizes.
      names, rates, seeds: the rows, the learning rates, and the number of seeds.
      folder: the folder of the files.
      known: the complete runs.
      texts: the text for the start, and the text for fine-tuning.
    """
    rows = rows_of(plan.model)
    runs = {
        run_name(name, rate): (rows[name], rate) for name in names for rate in rates
    }

    def train(name: str, seed: int) -> dict:
        row, rate = runs[name]
        weights = started(plan, seed, folder, texts[0])
        loss = tuned(plan, row, rate, seed, weights, texts[1])
        print(f"seed {seed}, {name}: {loss:.4f}", flush=True)
        return {"held_out": loss}

    kept_runs.train_missing(runs, seeds, folder, known, train)


def started(plan: Plan, seed: int, folder: pathlib.Path, text):
    """Return the float32 weights of a seed, which are trained once and then loaded."""
    path = folder / f"start_{seed}.npz"
    shapes = jax.eval_shape(plan.model.init, jax.random.key(0))
    leaves, treedef = jax.tree.flatten(shapes)
    if not path.exists():
        steps, rate = plan.first_steps, plan.first_rate
        program = _program(plan.model, Row(optimal_rows.adamw, _whole), rate, steps)
        batches = _batches(plan, text, (seed, 0), steps)
        trained, _ = program.train(plan.model.init(jax.random.key(seed)), batches)
        folder.mkdir(parents=True, exist_ok=True)
        # Another process may read the file, so it appears with all of its bytes.
        part = path.with_suffix(f".{os.getpid()}.part")
        with part.open("wb") as file:
            np.savez(file, *jax.tree.leaves(trained))
        part.replace(path)
    with np.load(path) as arrays:
        found = [jnp.asarray(arrays[f"arr_{i}"]) for i in range(len(leaves))]
    return treedef.unflatten(found)


def update_sizes(plan: Plan, weights) -> dict:
    """Return what decides whether an update is lost.

    Args:
      plan: the sizes of all runs.
      weights: float32 weights before fine-tuning.

    Returns:
      ``spacings``, the median spacing of the codes of each number of bits, and
      ``sums of rates``, the sum of the learning rates of all steps for each peak. AdamW
      moves a weight by about this sum if its gradients all have the same sign.
    """
    spacings = {}
    for bits in (8, 6, 4):
        codes = quantized(bits, weights)
        is_quantized = lambda x: isinstance(x, lpmm.QuantizedTensor)
        leaves = filter(is_quantized, jax.tree.leaves(codes, is_leaf=is_quantized))
        each = [x.scales.view(jnp.float32).ravel() for x in leaves]
        spacings[f"{bits} bits"] = float(np.median(np.concatenate(each)))
    steps = np.arange(plan.steps)
    sums = {
        f"{rate:g}": compute_optimal.schedule(rate, plan.steps)(steps).sum().item()
        for rate in RATES
    }
    return {"spacings": spacings, "sums of rates": sums}


def tuned(plan: Plan, row: Row, rate: float, seed: int, weights, text) -> float:
    """Return the held-out loss after fine-tuning from these weights."""
    program = _program(plan.model, row, row.factor * rate, plan.steps)
    batches = _batches(plan, text, (seed, 1), plan.steps)
    if rate == BEFORE:
        batches = batches[:0]
    trained, fixed = program.train(weights, batches)
    windows = compute_optimal.held_out_windows(plan.model, text)
    return float(program.losses(trained, fixed, windows).mean())


def _batches(plan: Plan, text, seed: tuple[int, int], steps: int) -> np.ndarray:
    shape, length = (steps, plan.batch), plan.model.context + 1
    return stdlib_text.random_windows(text.train, seed, shape, length)


class _Program(NamedTuple):
    """Jitted functions of a row, which all seeds share.

    Attributes:
      train: a function of float32 weights and batches. It returns what was trained, and
        the weights that did not change.
      losses: a function of both and of windows. It returns the loss of each batch.
    """

    train: Callable
    losses: Callable


@functools.cache
def _program(model: GPT, row: Row, peak: float, steps: int) -> _Program:
    tx = row.build(compute_optimal.schedule(peak, steps))

    def train(weights, batches):
        trained, state, fixed = row.start(tx, weights)

        def loss_fn(trained, tokens):
            return model.loss(row.weights(trained, fixed), tokens)

        def step(run, tokens):
            _, grads = optimal_rows.loss_and_grads(loss_fn, run[0], tokens)
            return lowbit_optax.step(tx, *run, grads), None

        (trained, _), _ = jax.lax.scan(step, (trained, state), batches)
        return trained, fixed

    def losses(trained, fixed, windows):
        weights = row.weights(trained, fixed)
        return jax.lax.map(lambda tokens: model.loss(weights, tokens), windows)

    return _Program(jax.jit(train), jax.jit(losses))


def _recorded(record: dict) -> kept_runs.Runs:
    """Return the runs in a record."""
    return {
        run_name(name, float(rate)): {
            seed: {"held_out": loss}
            for seed, loss in zip(each["seeds"], each["losses"], strict=True)
        }
        for name, row in record["rows"].items()
        for rate, each in row["rates"].items()
    }


def figures(found: kept_runs.Runs, model: GPT) -> dict:
    """Return the losses and differences of each row, at each rate and at the best."""
    rows, count = rows_of(model), model_size(model)
    best = {name: _best(name, found) for name in rows}
    of_lora = found.get(run_name(LORA, best[LORA]), {}) if best[LORA] else {}
    made = {}
    for name, row in rows.items():
        rates = {}
        for rate in (BEFORE, *RATES):
            own = found.get(run_name(name, rate))
            if own:
                base = found.get(run_name(BASE, rate), {}) if name != BASE else {}
                rates[f"{rate:g}"] = _figures(own) | _difference("gap", own, base)
        if not rates:
            continue
        own = found[run_name(name, best[name])]
        others = of_lora if name != LORA else {}
        made[name] = {
            "bytes_per_parameter": bytes_of(row, model) / count,
            "rates": rates,
            "best": f"{best[name]:g}",
            **_difference("minus_lora", own, others),
        }
    return {"margin": equivalence.MARGIN, "rank": rank_of(model), "rows": made}


def model_size(model: GPT) -> int:
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return sum(x.size for x in jax.tree.leaves(shapes))


def _best(name: str, found: kept_runs.Runs) -> float | None:
    """Return the rate with the lowest mean loss over the seeds that all rates have."""
    runs = {rate: found.get(run_name(name, rate), {}) for rate in RATES}
    runs = {rate: each for rate, each in runs.items() if each}
    if not runs:
        return None
    seeds = set.intersection(*map(set, runs.values())) or set()
    mean = lambda each: np.mean([each[seed]["held_out"] for seed in seeds or each])
    return min(runs, key=lambda rate: mean(runs[rate]))


def _figures(own: dict[int, dict]) -> dict:
    return {"seeds": list(own), "losses": [x["held_out"] for x in own.values()]}


def _difference(key: str, own: dict[int, dict], base: dict[int, dict]) -> dict:
    pairs = equivalence.differences(own, base)
    if len(pairs) < 2:
        return {}
    return {key: {"pairs": pairs} | equivalence.verdict(pairs, SEEDS)}


def text(record: dict) -> str:
    """Return a table of the differences from float32, with the spread of the seeds."""
    head = [f"rate {rate:g}" for rate in RATES]
    columns = ["weights", "bytes", "before", *head, "minus LoRA"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    rates = (BEFORE, *RATES)
    for name, row in record["rows"].items():
        cells = [name, f"{row['bytes_per_parameter']:.2f}"]
        cells += [_cell(row["rates"].get(f"{x:g}", {}).get("gap")) for x in rates]
        cells.append(_cell(row.get("minus_lora")))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def verdicts(record: dict) -> str:
    """Return the interval, the number of pairs and the verdict of each difference."""
    lines = []
    for name, row in record["rows"].items():
        for rate, each in row["rates"].items():
            if "gap" in each:
                gap = each["gap"]
                interval = "{:+.4f} to {:+.4f}".format(*gap["interval"])
                count = f"{len(gap['pairs'])} of {SEEDS} pairs"
                verdict = f"{interval}, {count}, {gap['verdict']}"
                lines.append(f"{name}, rate {rate}: {verdict}")
    return "\n".join(lines)


def _cell(found: dict | None) -> str:
    if found is None:
        return ""
    return f"{found['mean']:+.4f} ± {np.std(found['pairs'], ddof=1):.4f}"


@pictures.panels(4)
def draw(record: dict, axes) -> str:
    """Draw the loss of each row at its best rate, against its bytes per parameter."""
    rows = record["rows"]
    best = {
        name: np.array(row["rates"][row["best"]]["losses"])
        for name, row in rows.items()
    }
    for name, losses in best.items():
        size = rows[name]["bytes_per_parameter"]
        axes.plot([size] * len(losses), losses, ".", color="0.7")
        axes.plot(size, losses.mean(), "o", color="C1" if name == LORA else "C0")
        right, up, side = LABELS.get(name, (6, 4, "left"))
        place = {"xytext": (right, up), "textcoords": "offset points", "ha": side}
        axes.annotate(name, (size, losses.mean()), **place)
    axes.axhline(best[BASE].mean(), color="black", lw=1)
    axes.set(xscale="log", xlabel="bytes per parameter of weights and state")
    axes.set(ylabel="held-out loss, nats per byte")
    axes.set_xticks([1, 2, 4, 8, 12], ["1", "2", "4", "8", "12"])
    axes.minorticks_off()
    axes.margins(y=0.12)
    above = lambda name: f"{best[name].mean() - best[BASE].mean():.3f} above float32"
    return f"8-bit weights end {above('8 bits')}, and LoRA {above(LORA)}"
