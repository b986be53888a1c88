"""Quantized weights with N microbatches per update, and the sizes of updates.

    .venv/bin/python -m benchmarks microbatches

LPMM, figure 3 and tables 2 and 3: most updates are smaller than the quantization step
of their weight, so 8 bits lose accuracy even with stochastic rounding. Summing N
gradients before an update, with one learning rate for all N, makes updates larger and
recovers most of the loss from the same data. In this benchmark, each gradient is from a
single image and therefore noisy. Quantized weights are trained with Algorithm 1, which
rounds each gradient to 8 bits, including with N = 1.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.papers import noisy_digits

BITS, FACTORS = (12, 10, 8), (1, 4, 16)
SMALL = tuple(2.0**power for power in range(-12, 5))
"""Update sizes in quantization steps. The share of updates below each is counted."""


def cases() -> dict[str, tuple[int | None, str, int]]:
    """Return bits, rounding and N by name."""
    found: dict = {f"float32, N={n}": (None, "", n) for n in FACTORS}
    for bits in BITS:
        found[f"{bits} bits, nearest"] = (bits, "nearest", 1)
        for n in FACTORS:
            found[f"{bits} bits, N={n}"] = (bits, "stochastic", n)
    return found


def optimizer(bits: int | None, rounding: str, every: int, rate: float, steps: int):
    """Return momentum SGD for sums of N gradients, or means at N times the rate."""
    of_mean = noisy_digits.rate_of(rate, every, steps)
    if bits is None:
        tx = optax.sgd(of_mean, 0.9)
        return optax.MultiSteps(tx, every) if every > 1 else tx
    of_sum = lambda count: of_mean(count) / every
    tx = lowbit_optax.lpmm_sgd(of_sum, 0.9, rounding=rounding, min_size=0)
    format_ = lowbit_optax.block_quantized(
        8, code="linear", block_size=2048, rounding=rounding
    )
    return lowbit_optax.accumulate_gradients(tx, every, format_, min_size=0)


def shares_below(tx, every: int, rate: float, steps: int, halfway) -> np.ndarray:
    """Return the shares of hidden weights whose updates are below each of ``SMALL``."""
    params, state = halfway
    plain = optimizer(None, "", 1, rate, steps)
    plain = lowbit_optax.accumulate_gradients(plain, every, min_size=0)
    trace = optax.tree.get(
        jax.vmap(lambda p, s: lowbit_optax.convert(p, s, tx, plain)[1])(params, state),
        "trace",
    )
    now = noisy_digits.rate_of(rate, every, steps)(steps // 2 // every) / every
    delta = jax.lax.bitcast_convert_type(params["hidden"].scales, jnp.float32)
    # Each step size belongs to 64 rows by 32 columns.
    delta = jnp.repeat(jnp.repeat(delta, 64, 1), 32, 2)
    sizes = jnp.abs(now * trace["hidden"]) / delta
    return np.asarray([jnp.mean(sizes < limit) for limit in SMALL])


def measure(args) -> dict:
    loss, accuracy, below = {}, {}, {}
    for name, (bits, rounding, n) in cases().items():
        numbers = args.learning_rate, args.steps
        tx = optimizer(bits, rounding, n, *numbers)
        seeds = jnp.arange(args.seeds)
        run = tx, bits, args.steps, args.width, seeds, noisy_digits.data()
        trained = noisy_digits.train(*run)
        loss[name], accuracy[name] = trained.loss, 100 * trained.accuracy
        if bits == BITS[-1] and rounding == "stochastic" and n in FACTORS[::2]:
            below[name] = shares_below(tx, n, *numbers, trained.halfway)
        print(name, flush=True)
    return {
        "held_out": records.spreads(loss),
        "accuracy": records.spreads(accuracy),
        "gaps_to_float32": records.gaps(loss, "float32, N=1"),
        "sizes": SMALL,
        "shares_below": below,
    }


@pictures.panels(4.4, (1, 1))
def draw(record: dict, losses, sizes) -> str:
    found = record["gaps_to_float32"]
    looks = pictures.looks(f"LPMM, {bits} bits" for bits in BITS)
    orange, _ = pictures.FORMATS["nearest"]
    for i, (bits, (name, look)) in enumerate(zip(BITS, looks.items(), strict=True)):
        cases = [f"{bits} bits, nearest", *(f"{bits} bits, N={n}" for n in FACTORS)]
        means, bars = ([found[case][key] for case in cases] for key in ("mean", "std"))
        x = np.arange(len(cases)) + 0.12 * (i - 1)
        losses.errorbar(x[:1], means[:1], bars[:1], **look | {"color": orange})
        losses.errorbar(x[1:], means[1:], bars[1:], label=name, **look)
    base = [0] + [found[f"float32, N={n}"]["mean"] for n in FACTORS[1:]]
    losses.plot(range(1, len(base) + 1), base, "k", label="float32")
    losses.set_xticks(range(len(FACTORS) + 1), ["1\nnearest", *map(str, FACTORS)])
    losses.set(title="loss", xlabel="microbatches per update, N")
    losses.set(ylabel="held-out loss minus float32's at N = 1 (lower is better)")
    for (name, share), line in zip(record["shares_below"].items(), ":-", strict=True):
        look = {"color": pictures.FORMATS["LPMM"][0], "base": 2}
        sizes.semilogx(SMALL, share, line, label=f"updates of {name}", **look)
    sizes.axvline(0.5, color="gray", lw=1, ls="--", label="half a spacing")
    sizes.set(title="size of the updates", xlabel="spacings of the 8-bit numbers")
    sizes.set(ylabel="share of the updates that are smaller", xlim=(SMALL[0], 2))
    return (
        "Summing more microbatches per update makes updates larger, and wins back most "
        "of the loss that weights of 8 bits cost"
    )


main = records.program(__name__, **noisy_digits.numbers(12_000), learning_rate=0.004)
