"""LPMM: codes of the momentum, quantized Adam, and bits of live arrays.

    .venv/bin/python -m benchmarks lpmm_states

LPMM, section 5.1 and tables 4 and 5: the momentum uses a non-linear code, quantized
Adam is as good as Adam in float32, and weights, accumulators and moments need fewer
bits. Networks learn noisy digits, one image per step, and all see the same images. Bits
are measured on live arrays, for two matrices of 1024 x 1024.
"""

import re

import jax
import jax.numpy as jnp
import optax

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.papers import noisy_digits

RATES = {"SGD": 0.004, "Adam": 0.001}
CODES = (("dynamic", 8), ("linear", 8), ("dynamic", 4), ("linear", 4))


def cases(scale: float, steps: int) -> dict:
    """Return optimizers and weight bits by name. ``scale`` multiplies ``RATES``."""
    sgd, adam = (
        noisy_digits.rate_of(scale * rate, 1, steps) for rate in RATES.values()
    )
    found: dict = {"SGD, float32": (optax.sgd(sgd, 0.9), None)}
    weights = lowbit_optax.formats.quantized_weights()
    for code, bits in CODES:
        format_ = lowbit_optax.block_quantized(bits, code=code, block_size=2048)
        inner, moments = optax.sgd(sgd, 0.9), {"trace": format_}
        found[f"SGD, 12 bits, {code} {bits}"] = (
            lowbit_optax.lowbit(inner, weights=weights, moments=moments, min_size=0),
            12,
        )
    found["Adam, float32"] = optax.adam(adam), None
    for bits in (12, 8):
        found[f"Adam, {bits} bits"] = lowbit_optax.lpmm_adam(adam, min_size=0), bits
    return found


def live_bits() -> dict[str, float]:
    """Return bits per parameter of weights, accumulators and state after two steps."""
    arrays = {"a": jnp.ones((1024, 1024)), "b": jnp.ones((1024, 1024))}
    found = {}
    for name, tx, bits in (
        ("SGD, float32", optax.MultiSteps(optax.sgd(0.1, 0.9), 2), None),
        ("LPMM-SGD, 12 bits", lowbit_optax.lpmm_sgd(0.1, 0.9), 12),
        ("LPMM-SGD, 8 bits", lowbit_optax.lpmm_sgd(0.1, 0.9), 8),
        ("Adam, float32", optax.MultiSteps(optax.adam(0.1), 2), None),
        ("LPMM-Adam, 12 bits", lowbit_optax.lpmm_adam(0.1), 12),
        ("LPMM-Adam, 8 bits", lowbit_optax.lpmm_adam(0.1), 8),
    ):
        params = arrays
        if bits is not None:
            params = lowbit_optax.lpmm.quantize_params(arrays, bits=bits)
            tx = lowbit_optax.accumulate_gradients(tx, 2)
        state = tx.init(params)
        step = jax.jit(lambda params, state, tx=tx: tx.update(arrays, state, params))
        for _ in range(2):
            updates, state = step(params, state)
            params = optax.apply_updates(params, updates)
        size = sum(x.nbytes for x in jax.tree.leaves((params, state)))
        found[name] = 8 * size / sum(x.size for x in arrays.values())
    return found


def measure(args) -> dict:
    loss, seeds = {}, jnp.arange(args.seeds)
    for name, (tx, bits) in cases(args.rate, args.steps).items():
        run = tx, bits, args.steps, args.width, seeds, noisy_digits.data()
        loss[name] = noisy_digits.train(*run).loss
        print(name, flush=True)
    gaps = {}
    for kind in RATES:
        of_kind = {name: each for name, each in loss.items() if kind in name}
        gaps |= records.gaps(of_kind, f"{kind}, float32")
    return {
        "held_out": records.spreads(loss),
        "gaps_to_float32": gaps,
        "bits": live_bits(),
    }


@pictures.panels(6.4, (4, 3), stack=True)
def draw(record: dict, losses, sizes) -> str:
    code = lambda name: re.sub(r"(\w+) (\d)$", r"\2-bit \1 code", name)
    full = lambda name: f"LPMM {code(name)}" if "bits" in name else name
    found = {full(name): each for name, each in record["held_out"].items()}
    pictures.each_seed(losses, found, "held-out loss, nats")
    bits = {name.replace("-", " "): {"": x} for name, x in record["bits"].items()}
    texts = {name: f"{x['']:.1f}" for name, x in bits.items()}
    pictures.stacked(sizes, bits, {"": ""}, 1, texts)
    sizes.set(xlabel="bits per parameter of weights, accumulators and state")
    return (
        "On this small task, LPMM with 12-bit weights and 8-bit moments ends within "
        f"the spread of float32. SGD needs {texts['LPMM SGD, 12 bits']} bits per "
        f"parameter instead of {texts['SGD, float32']}"
    )


main = records.program(__name__, **noisy_digits.numbers(6000), rate=1.0)
