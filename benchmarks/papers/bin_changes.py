"""Quantised weights, nearest against stochastic by bits: how far they move, the loss.

    .venv/bin/python -m benchmarks bin_changes

LPMM, figure 2 and section 6: with 12, 10 and 8 bits and rounding to nearest the actual
change of a weight per step, in units of its quantisation step, falls to nothing, the
sooner the fewer bits; stochastic rounding keeps it and the accuracy. Here a network
learns the next byte of a text by SGD with momentum in 8 bits and a falling rate.
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
    """The mean of |new - old| / delta, by the old weights' step sizes."""
    delta = jax.lax.bitcast_convert_type(old.scales, jnp.float32)
    # One step size for all, to compare: blocks of a matrix differ little.
    return jnp.mean(jnp.abs(new.dequantize() - old.dequantize())) / jnp.mean(delta)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def train(bits: int | None, rounding: str, rate: float, params, batches):
    """One run; its held-out parameters and, at ``POINTS``, the steps moved."""
    schedule = optax.cosine_decay_schedule(rate, len(batches))
    if bits is None:
        tx = optax.sgd(schedule, 0.9)
    else:
        tx = lowbit_optax.lpmm_sgd(schedule, 0.9, rounding=rounding)
        params = lowbit_optax.quantize_params(params, bits=bits)

    def body(carry, windows):
        params, state = carry
        if bits is None:
            grads = jax.grad(next_byte.loss_fn)(params, windows)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), jnp.float32(0)
        _, grads = lpmm.value_and_grad(next_byte.loss_fn)(params, windows)
        new, state = lowbit_optax.step(tx, params, state, grads)
        return (new, state), steps_moved(params["hidden"], new["hidden"])

    (params, _), moved = jax.lax.scan(body, (params, tx.init(params)), batches)
    return lowbit_optax.dequantize(params), moved.reshape(POINTS, -1).mean(1)


def draw(record: dict, is_apart: bool) -> None:
    path = pictures.picture_of("bin_changes", is_apart)
    lines = dict(zip(BITS, ("-", "--", ":"), strict=True))
    with pictures.drawn(path, 3.2, (3, 2)) as (curves, losses):
        steps = record["options"]["steps"]
        x = (np.arange(POINTS) + 0.5) * steps / POINTS
        for name, runs in record["steps_moved"].items():
            bits, rounding = name.split(" bits, ")
            mean = np.maximum(np.mean(runs, 0), 1e-5)
            color, line = pictures.COLORS[rounding], lines[int(bits)]
            curves.semilogy(x, mean, line, color=color, label=name)
        curves.set(xlabel="step", ylabel="steps of its grid that a weight moves")
        curves.legend(fontsize=8)
        for i, rounding in enumerate(ROUNDINGS):
            found = [record["held_out"][f"{bits} bits, {rounding}"] for bits in BITS]
            losses.errorbar(
                np.arange(len(BITS)) + 0.06 * i,
                [each["mean"] for each in found],
                [each["std"] for each in found],
                fmt="o-",
                capsize=3,
                color=pictures.COLORS[rounding],
                label=rounding,
            )
        master = record["held_out"]["float32"]
        losses.axhline(master["mean"], color="black", label="float32", lw=1.2)
        losses.set_xticks(range(len(BITS)), [f"{bits} bits" for bits in BITS])
        losses.set(ylabel="loss on held-out text, mean ± std")
        losses.legend()


def main(argv: list[str] | None = None) -> None:
    parser = records.parser(__doc__, seeds=3)
    parser.add_argument("--steps", type=int, help="a multiple of 50, 1500 by default")
    parser.add_argument("--learning-rate", type=float, default=0.1, help="the first")
    args = parser.parse_args(argv)
    args.steps = args.steps or (50_000 if args.full else 1500)
    path = records.path_of(__name__, args.is_apart)
    if not args.draw:
        cases = {f"{b} bits, {r}": (b, r) for b in BITS for r in ROUNDINGS}
        cases = {"float32": (None, ""), **cases}
        held_out: dict[str, list] = {name: [] for name in cases}
        moved: dict[str, list] = {name: [] for name in cases}
        windows = next_byte.held_out()
        for seed in range(args.seeds):
            batches = next_byte.batches(seed, args.steps)
            for name, (bits, rounding) in cases.items():
                start = next_byte.init(seed)
                params, change = train(
                    bits, rounding, args.learning_rate, start, batches
                )
                loss = float(jax.jit(next_byte.loss_fn)(params, windows))
                held_out[name].append(loss)
                moved[name].append(change)
                print(f"seed {seed} {name:20} {loss:.4f}", flush=True)
        del moved["float32"]
        records.save(
            path,
            args,
            records.ran_here(),
            held_out={
                name: records.spread(values) for name, values in held_out.items()
            },
            steps_moved=moved,
        )
    record = records.load(path)
    for name, found in record["held_out"].items():
        print(f"{name:20} {records.shown(found)}")
    draw(record, args.is_apart)
