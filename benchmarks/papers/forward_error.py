"""Forward error of arithmetic on split float16 numbers, by number of extra bits.

    .venv/bin/python -m benchmarks forward_error

Lewandowski and Kosson 2023, figure 6: after one addition, 16-bit numbers whose extra
bits were cut off are somewhat less accurate than plain float16. After many additions,
numbers with extra bits are far more accurate. This benchmark adds normal random numbers
with ``SplitArray`` and compares the sums with float64.

"Toward zero" is the paper's scheme: a float32 sum is cut off after the extra bits.
"Nearest" rounds the 16-bit part and the last extra bit to nearest, and "stochastic"
rounds both stochastically.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import lowbit_optax
from benchmarks import pictures, records

STEPS = (1, 3, 10, 30, 100, 300, 1000)
BITS = (2, 4, 6, 8, 10, 13)
CLOSE = {"+2, toward zero": 1.3, "+4, toward zero": 2.4, "float16": 0.5}
"""Factors that move the labels of lines that end close to each other."""

FORMATS = {
    "float16": lowbit_optax.nearest(),
    "float16, stochastic": lowbit_optax.stochastic_rounding(),
    **{
        f"+{bits}, toward zero": lowbit_optax.extra_bits(
            bits, rounding="toward_zero", residual_rounding="toward_zero"
        )
        for bits in BITS
    },
    "+8, nearest": lowbit_optax.extra_bits(8, residual_rounding="nearest"),
    "+8, stochastic": lowbit_optax.extra_bits(8, rounding="stochastic"),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def sums(format_, steps: int, start, terms, seed):
    """Return the running sums of a split array: the 16-bit parts, and all bits."""
    split = lowbit_optax.split_array(start, jnp.float16, format_, seed=seed)

    def body(split, term):
        split = split + term
        return split, (split.param, lowbit_optax.join_array(split))

    _, (params, joined) = jax.lax.scan(body, split, terms[:steps])
    kept = np.array([step - 1 for step in STEPS if step <= steps])
    return params[kept], joined[kept]


def errors(name: str, size: int, seed: int) -> dict[str, list[float]]:
    """Return the relative errors after each number of additions in ``STEPS``."""
    random = np.random.default_rng(seed)
    # The terms are float16, so that only the sums are rounded.
    start, terms = (
        random.standard_normal(shape).astype(np.float16).astype(np.float32)
        for shape in (size, (STEPS[-1], size))
    )
    found = sums(FORMATS[name], STEPS[-1], start, terms, seed)
    exact = start + np.cumsum(terms, 0, dtype=np.float64)
    exact = exact[np.array(STEPS) - 1]
    norm = lambda x: np.linalg.norm(x, axis=1)
    param, joined = (
        norm(np.asarray(x, np.float64) - exact) / norm(exact) for x in found
    )
    return {"16-bit part": list(param), "joined": list(joined)}


def condition(size: int) -> list[float]:
    """Return the median ratio of the sum of magnitudes to the magnitude of the sum."""
    terms = np.random.default_rng(0).standard_normal((STEPS[-1] + 1, size))
    whole, parts = (np.cumsum(x, 0) for x in (terms, np.abs(terms)))
    return [float(np.median(parts[s] / np.abs(whole[s]))) for s in STEPS]


def measure(args) -> dict:
    found: dict[str, dict] = {}
    for name in FORMATS:
        runs = [errors(name, args.size, seed) for seed in range(args.seeds)]
        found[name] = {
            part: [
                records.spread(each)
                for each in zip(*(r[part] for r in runs), strict=True)
            ]
            for part in runs[0]
        }
    return {
        "additions": STEPS,
        "condition": condition(args.size),
        "errors": found,
    }


@pictures.panels(4, (2, 3))
def draw(record: dict, one, many) -> str:
    errors, extra = record["errors"], pictures.FORMATS["extra bits"][0]
    for rounding in ("nearest", "stochastic", "toward zero"):
        error = 1e4 * errors[f"+8, {rounding}"]["16-bit part"][0]["mean"]
        one.barh(f"8 extra bits,\n{rounding}", error, color=extra)
    lines = {f"+{n}, toward zero": pictures.tint(extra, 0.4 + n / 22) for n in BITS}
    lines["float16"] = pictures.FORMATS["nearest"][0]
    lines["float16, stochastic"] = pictures.FORMATS["stochastic"][0]
    error = 1e4 * errors["float16"]["16-bit part"][0]["mean"]
    one.barh("float16, nearest", error, color=lines["float16"])
    one.set(title="16-bit part, one addition")
    one.set(xlabel="relative error, 1e-4 (lower is better)")
    for name, color in lines.items():
        means = [each["mean"] for each in errors[name]["joined"]]
        # Sums of a few float16 numbers can be exact.
        many.loglog(STEPS, np.maximum(means, 1e-9), color=color)
        label = name.replace(", toward zero", " bits")
        y = means[-1] * CLOSE.get(name, 1)
        many.text(STEPS[-1] * 1.3, y, label, va="center")
    many.set(title="all bits, many additions", xlabel="additions", ylim=(5e-10, 0.2))
    many.set(ylabel="relative error (lower is better)", xlim=(0.9, 1e6))
    many.set(xticks=(1, 10, 100, 1000))
    end = lambda name: errors[name]["joined"][-1]["mean"]
    factor = lambda name: float(f"{end('float16') / end(name):.2g}")
    return (
        "8 extra bits make the error of float16 after 1,000 additions "
        f"{factor('+8, toward zero'):.0f} times smaller if the remaining bits are cut "
        f"off, and {factor('+8, nearest'):.0f} times if they are rounded to nearest"
    )


main = records.program(__name__, seeds=5, size=4096)
