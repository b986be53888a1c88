"""The largest GPTs that train in 11 GB, in float32 and with LPMM, compiled.

    .venv/bin/python -m benchmarks largest_gpt

Li et al., table 6: with a batch of one and 11 GB of memory, LPMM trains larger models
than full precision. This benchmark uses a GPT with the sizes of RoBERTa-Large: 24
layers of width 1,024, a context of 512 tokens, and 50,304 tokens in the vocabulary. One
search varies the number of layers, and the other varies the width in steps of 64, the
width of an attention head. Computations and activations are float32, and the backward
pass computes each layer again. Steps are compiled for an H200; nothing is run. 1 GB is
10^9 bytes.
"""

import bisect
from collections.abc import Callable

import optax

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.papers import gpt_steps
from benchmarks.papers.gpt_steps import Case
from tools.models.gpt import GPT

NEEDS = ("jax_plugins.xla_cuda12",)

GB = 10**9
ROOM = 11 * GB
HEAD = 64
"""The width of an attention head."""
MODEL = GPT(24, 16 * HEAD, 16, 512, "full", vocabulary=50304)
SEARCHES: dict[str, Callable[[int], GPT]] = {
    "depth": lambda layers: MODEL._replace(layers=layers),
    "width": lambda heads: MODEL._replace(heads=heads, width=HEAD * heads),
}

LPMM = lowbit_optax.lpmm_adam(1e-4)
CASES = {
    "float32": Case(optax.adamw(1e-4)),
    "LPMM, 12 bits": Case(LPMM, 12),
    "LPMM, 8 bits": Case(LPMM, 8),
    "LPMM, 8 bits, release": Case(LPMM, 8, releases=True),
}


def largest(
    bytes_of: Callable[[int], int],
    predicted: Callable[[int], int],
    room: int,
    extra: float = 0,
    limit: int = 1024,
) -> tuple[int, float]:
    """Find the largest number whose bytes fit; the bytes of the next one do not fit.

    The bytes of the last number tried show how much must be added to their prediction.
    The next number to try is the largest one that then fits, among the numbers that are
    not yet known to fit or not to fit.

    Args:
      bytes_of: the bytes of a number, which grow with it.
      predicted: an estimate of these bytes, which grows with the number.
      room: the number of bytes to fit into.
      extra: the bytes to add to the first prediction.
      limit: a number that does not fit.

    Returns:
      The largest number, 0 if none fits, and the bytes to add to the last prediction.
    """
    fits, too_many = 0, limit
    while fits + 1 < too_many:
        between = range(fits + 1, too_many)
        n = fits + bisect.bisect_right(between, room - extra, key=predicted)
        n = max(n, fits + 1)
        found = bytes_of(n)
        extra = found - predicted(n)
        fits, too_many = (n, too_many) if found <= room else (fits, n)
    return fits, extra


def found_by(
    model_of: Callable[[int], GPT], case: Case, extra: float
) -> tuple[dict[str, int], float]:
    """Return the sizes of the largest model and its peak, and the last ``extra``."""
    peaks: dict[int, int] = {}

    def bytes_of(n: int) -> int:
        model = model_of(n)
        peaks[n] = gpt_steps.peak(case, model)
        size = f"{model.layers} layers of width {model.width}"
        print(f"  {size}: {peaks[n] / GB:.3f} GB", flush=True)
        return peaks[n]

    predicted = lambda n: gpt_steps.stored(case, model_of(n))
    n, extra = largest(bytes_of, predicted, ROOM, extra)
    model = model_of(n)
    return {
        "layers": model.layers,
        "width": model.width,
        "parameters": gpt_steps.parameters(model),
        "peak": peaks[n],
        "peak of the next": peaks[n + 1],
    }, extra


def measure(args) -> dict:
    found: dict[str, dict] = {}
    for search, model_of in SEARCHES.items():
        extra = 0.0
        for name, case in CASES.items():
            print(f"{search}, {name}:", flush=True)
            # The memory of activations and copies is similar for similar optimizers.
            of_case, extra = found_by(model_of, case, extra)
            found.setdefault(search, {})[name] = of_case
    return {"room": ROOM, "largest": found}


@pictures.panels(2.9, (1, 1), sharey=True)
def draw(record: dict, *both) -> str:
    titles, times = ("more layers of width 1,024", "24 wider layers"), []
    found = record["largest"].values()
    for axes, title, cases in zip(both, titles, found, strict=True):
        sizes = {name: x["parameters"] / 1e9 for name, x in cases.items()}
        texts = {name: f"{size:.2f}" for name, size in sizes.items()}
        bars = {name: {"": size} for name, size in sizes.items()}
        pictures.stacked(axes, bars, {"": ""}, 1, texts)
        axes.set(title=title, xlabel="billion parameters (higher is better)")
        times.append(sizes["LPMM, 8 bits, release"] / sizes["float32"])
    low, high = sorted(times)
    return (
        f"In 11 GB, 8-bit LPMM with gradient release trains models {low:.1f} to "
        f"{high:.1f} times as large as float32"
    )


main = records.program(__name__, ran=records.COMPILED)
