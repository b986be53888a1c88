"""nanoGPT's training on the characters of Shakespeare, in each format.

    .venv/bin/python -m benchmarks shakespeare --text tinyshakespeare.txt
    .venv/bin/python -m benchmarks shakespeare --text PATH --rows float32 --seeds 1

The sizes, the schedule and the options of AdamW are nanoGPT's for a CPU. The first 90%
of the text is for training. The validation loss is the mean over the whole rest, not
over a sample. All rows start from the same weights and use the same batches, and each
seed is compared with its own float32 run.

A run takes two to four minutes on one core, and is stored in its own file when it is
complete. Runs that have a file, or are in the record, are not trained again, so several
processes may train different rows, and a run that was interrupted can continue.
"""

import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import lowbit_optax
from benchmarks import ROOT, pictures, records
from benchmarks.training import format_rows
from benchmarks.training.format_rows import Row
from benchmarks.training.text import stdlib_text
from benchmarks.training.text.stdlib_text import Text
from lowbit_optax import block_quantized, lpmm, stochastic_rounding
from tools.models.gpt import GPT

NEEDS = ("matplotlib", "tqdm")

SOURCE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
    "input.txt"
)
MODEL = GPT(4, 128, 4, 64, vocabulary=65)
POINTS = 100
"""The number of points of a curve. Each is the mean loss of a part of the training."""

_B1, _B2, _DECAY, _CLIP = 0.9, 0.99, 0.1, 1.0


def _matrices(params):
    """Return a tree that is False for norms, which do not decay, and True otherwise."""
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


def _factored(rate):
    """Return ``factored_adamw``'s inner transformation; matrices here have 64 rows."""
    return _clipped(
        optax.chain(
            lowbit_optax.scale_by_factored_adam(_B1, _B2, min_dim_size_to_factor=64),
            optax.add_decayed_weights(_DECAY, _matrices),
            optax.scale_by_learning_rate(rate),
        )
    )


_row = functools.partial(format_rows.of, _of(optax.adamw))
_bfloat16 = lowbit_optax.cast(jnp.bfloat16)
_FEW_BITS = {"mu": block_quantized(4), "nu": block_quantized(8)}

ROWS = {
    "float32": format_rows.of_float32(_of(optax.adamw)),
    "lowbit": _row(),
    "Kahan": _row(lowbit_optax.kahan(), _bfloat16),
    "stochastic": _row(stochastic_rounding(), _bfloat16),
    "factored": format_rows.of(_factored, moments=_FEW_BITS),
    "factored, no extra bits": format_rows.of(
        _factored, stochastic_rounding(error_feedback="mu"), _FEW_BITS
    ),
    "LPMM, 12 bits": Row(_lpmm, None),
    "bfloat16, nearest": _row(lowbit_optax.nearest(), _bfloat16),
}


def main(argv: list[str] | None = None) -> None:
    parser = records.Options(__doc__, seeds=10)
    add = parser.add_argument
    add("--text", type=pathlib.Path, help=f"the text, from {SOURCE}")
    add("--rows", nargs="+", choices=ROWS, metavar="ROW", help="train only these")
    args = parser.parse_args(argv)
    path = records.path_of(__name__)
    if not args.draw:
        if args.text is None or not args.text.is_file():
            sys.exit(f"error: --text must be the file from {SOURCE}, got {args.text}")
        record = records.load(path) if path.exists() else {"runs": {}}
        folder = ROOT / "runs" / path.stem
        _train_all(args, folder, record)
        del args.text, args.rows
        records.save(path, args, records.ran_here(), runs=_gathered(folder, record))
    record = records.load(path)
    print(table(record))
    draw(record, pictures.picture_of(path.stem))


def characters(path: pathlib.Path) -> Text:
    """Return the text as numbers of characters. The last tenth is held out."""
    data = np.frombuffer(path.read_bytes(), np.uint8)
    known, numbers = np.unique(data, return_inverse=True)
    if len(known) != MODEL.vocabulary:
        sys.exit(
            f"error: --text must contain {MODEL.vocabulary} different characters, got "
            f"{len(known)} in {path}"
        )
    count = int(0.9 * len(numbers))
    return Text(numbers[:count], numbers[count:])


def _train_all(args, folder: pathlib.Path, record: dict) -> None:
    """Train the selected runs that are not complete, and write a file for each."""
    folder.mkdir(parents=True, exist_ok=True)
    text, found = characters(args.text), _complete(folder, record)
    for seed in range(args.seeds):
        for name in args.rows or ROWS:
            if seed not in found.get(name, {}):
                run = {"row": name, "seed": seed, **train(name, seed, text)}
                path = folder / f"{name.replace(', ', '_').replace(' ', '_')}_{seed}"
                path.with_suffix(".json").write_text(json.dumps(run))


def _complete(folder: pathlib.Path, record: dict) -> dict[str, dict[int, dict]]:
    """Return the complete runs by row and seed."""
    found = {
        name: {int(seed): run for seed, run in runs["each"].items()}
        for name, runs in record["runs"].items()
    }
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text())
        found.setdefault(run.pop("row"), {})[run.pop("seed")] = run
    return found


@functools.cache
def _optimizer(name: str) -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, 2000, 1e-4)
    return ROWS[name].build(rate)


def train(name: str, seed: int, text: Text) -> dict:
    """Train one row with one seed, and return its losses."""
    tx, losses = _optimizer(name), []
    carry = ROWS[name].start(tx, MODEL.init(jax.random.key(seed)))
    for point in tqdm(range(POINTS), f"{name}, seed {seed}", disable=None):
        windows = stdlib_text.random_windows(
            text.train, (seed, point), 20 * 12, MODEL.context + 1
        )
        carry, loss = _train_part(tx, carry, windows.reshape(20, 12, -1))
        losses.append(float(loss))
    return {
        "validation": _validation_loss(carry[0], text.held_out),
        "training": float(np.mean(losses[-10:])),
        "curve": losses,
    }


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _train_part(tx, carry, batches):
    def step(carry, tokens):
        params, state = carry
        loss, grads = lpmm.value_and_grad(MODEL.loss, lazy=True)(params, tokens)
        return lowbit_optax.step(tx, params, state, grads), loss

    carry, losses = jax.lax.scan(step, carry, batches)
    return carry, losses.mean()


def _validation_loss(params, held_out: np.ndarray) -> float:
    """Return the mean loss over the held-out text, in windows that do not overlap."""
    count = (len(held_out) - 1) // MODEL.context
    starts = MODEL.context * np.arange(count)
    windows = held_out[starts[:, None] + np.arange(MODEL.context + 1)]
    batches = windows.astype(np.int32).reshape(-1, 26, MODEL.context + 1)
    return float(jnp.mean(_losses(params, batches)))


@jax.jit
def _losses(params, windows):
    return jax.lax.map(lambda tokens: MODEL.loss(params, tokens), windows)


def _gathered(folder: pathlib.Path, record: dict) -> dict:
    """Return the figures of all complete runs, next to float32 with the same seed."""
    found = _complete(folder, record)
    figures = {}
    for name in filter(found.get, ROWS):
        own, base = dict(sorted(found[name].items())), found["float32"]
        both = [seed for seed in own if seed in base]
        figures[name] = {
            "bytes_per_parameter": ROWS[name].bytes_per_parameter(
                format_rows.OF_BYTES
            ),
            "each": own,
            **{
                end: records.spread([run[end] for run in own.values()])
                for end in ("validation", "training")
            },
            "gaps": {
                end: records.spread([own[i][end] - base[i][end] for i in both])
                for end in ("validation", "training")
            },
        }
    return figures


def table(record: dict) -> str:
    """Return a Markdown table of the losses, next to the losses in float32."""
    heads = ["format", "seeds", "bytes per parameter", "validation loss"]
    lines = []
    for name, run in record["runs"].items():
        gaps = [records.shown(run["gaps"][x], 4) for x in ("validation", "training")]
        gaps = ["", ""] if name == "float32" else gaps
        size = f"{run['bytes_per_parameter']:.2f}"
        loss = records.shown(run["validation"], 4)
        lines.append([name, len(run["each"]), size, loss, *gaps])
    return records.table([*heads, "minus float32's", "in training"], lines)


@pictures.panels(4)
def draw(record: dict, axes) -> str:
    runs = {name: run for name, run in record["runs"].items() if name != "float32"}
    gaps = {name: run["gaps"]["validation"] for name, run in runs.items()}
    sizes = {name: run["bytes_per_parameter"] for name, run in runs.items()}
    label = "validation loss minus float32's, nats per character"
    pictures.each_seed(axes, gaps, label, sizes=sizes)
    return ""
