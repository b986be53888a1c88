"""How far quantized weights move, and their losses, by rounding and bits.

    .venv/bin/python -m benchmarks bin_changes

LPMM, figures 2 and 4: with 12, 10 and 8 bits and rounding to nearest, the change of a
weight per step, in units of its quantization step, falls to zero. It falls sooner with
fewer bits. Stochastic rounding keeps the change and the accuracy. In this benchmark, a
network learns the next byte of a text with SGD, an 8-bit momentum and a decaying rate.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks import pictures, records
from benchmarks.papers import next_byte
from lowbit_optax import lpmm

BITS, ROUNDINGS, POINTS = (12, 10, 8), ("nearest", "stochastic"), 50


def steps_moved(old, new) -> jax.Array:
    """Return the mean of |new - old| / delta with the old weights' step sizes."""
    delta = jax.lax.bitcast_convert_type(old.scales, jnp.float32)
    # The blocks of a matrix differ little, so one step size stands for all.
    return jnp.mean(jnp.abs(new.dequantize() - old.dequantize())) / jnp.mean(delta)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def train(bits: int | None, rounding: str, rate: float, params, batches):
    """Train once, and return the parameters and, at ``POINTS``, the steps moved."""
    schedule = optax.cosine_decay_schedule(rate, len(batches))
    if bits is None:
        tx = optax.sgd(schedule, 0.9)
    else:
        tx = lowbit_optax.lpmm_sgd(schedule, 0.9, rounding=rounding)
        params = lowbit_optax.lpmm.quantize_params(params, bits=bits)

    differentiate = lpmm.value_and_grad(next_byte.loss_fn)

    def body(carry, windows):
        params, state = carry
        _, grads = differentiate(params, windows)
        new, state = lowbit_optax.step(tx, params, state, grads)
        is_wide = bits is None
        moved = 0.0 if is_wide else steps_moved(params["hidden"], new["hidden"])
        return (new, state), jnp.float32(moved)

    (params, _), moved = jax.lax.scan(body, (params, tx.init(params)), batches)
    return lowbit_optax.lpmm.dequantize(params), moved.reshape(POINTS, -1).mean(1)


def measure(args) -> dict:
    cases = {f"{b} bits, {r}": (b, r) for b in BITS for r in ROUNDINGS}
    moved: dict[str, list] = {name: [] for name in cases}

    def train_case(name: str, *given):
        params, change = train(*cases.get(name, (None, "")), *given)
        if name in cases:
            moved[name].append(change)
        return params

    found = next_byte.held_out_losses(["float32", *cases], train_case, args)
    return {"held_out": records.spreads(found), "steps_moved": moved}


@pictures.panels(4.2, (3, 2))
def draw(record: dict, curves, losses) -> str:
    held_out, cases = record["held_out"], record["steps_moved"]
    looks = pictures.looks(f"LPMM, {name}" for name in cases)
    x = (np.arange(POINTS) + 0.5) * record["options"]["steps"] / POINTS
    curves.plot([], [], color="black", label="float32")
    for (label, look), runs in zip(looks.items(), cases.values(), strict=True):
        moved = np.mean(runs, 0)
        look = look | {"marker": "", "label": label.removeprefix("LPMM, ")}
        curves.semilogy(x, np.where(moved > 0, moved, np.nan), **look)
    curves.set(title="change of a weight per step", xlabel="step", ylim=(1e-5, 30))
    curves.set(ylabel="in spacings of the quantized numbers")
    for rounding in ROUNDINGS:
        found = [held_out[f"{bits} bits, {rounding}"] for bits in BITS]
        means, bars = ([each[part] for each in found] for part in ("mean", "std"))
        look = looks[f"LPMM, {BITS[0]} bits, {rounding}"]
        losses.errorbar(range(len(BITS)), means, bars, **look)
    losses.axhline(held_out["float32"]["mean"], color="black")
    losses.set_xticks(range(len(BITS)), BITS)
    losses.set(title="loss at the end", xlabel="bits per weight")
    losses.set(ylabel="held-out loss, nats per byte (lower is better)")
    return (
        "LPMM weights that are rounded to nearest stop moving before the training "
        "ends; with stochastic rounding, they keep moving"
    )


main = records.program(__name__, seeds=3, **next_byte.NUMBERS)
