"""Time a training step with and without gradient release, on this machine.

    .venv/bin/python -m benchmarks release_time --rounds 11

The model is a scan over layers ``tanh(h @ w)``. Both steps are jitted, donate
parameters and state, and run alternately. The table has the medians of their process
time, and the ratio of the medians. Process time adds up all threads, so other programs
disturb it less than wall time.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import optax

import lowbit_optax
from benchmarks import records
from lowbit_optax import release
from tools.gpu_program.release_steps import plain

MINUTES = 1

OPTIMIZERS = {
    "optax.adamw, float32": (optax.adamw(1e-3), jnp.float32),
    "extra_bits_adamw(bits=8)": (
        lowbit_optax.extra_bits_adamw(1e-3, bits=8),
        jnp.bfloat16,
    ),
    "lowbit_adamw": (lowbit_optax.lowbit_adamw(1e-3), jnp.bfloat16),
}


def loss_fn(params, h):
    """Return the mean square of the output of the layers."""

    def body(h, w):
        return jnp.tanh(h @ w.astype(h.dtype)), None

    h, _ = jax.lax.scan(body, h, params["w"])
    return jnp.mean(h**2)


def medians(tx, dtype, args: argparse.Namespace) -> list[float]:
    """Return the seconds of process time per step, without and with release."""
    shape = (args.layers, args.width, args.width)
    params = {"w": (jax.random.normal(jax.random.key(0), shape) * 0.03).astype(dtype)}
    batch = jax.random.normal(jax.random.key(1), (args.batch_size, args.width))
    steps = [
        jax.jit(make(loss_fn, tx), donate_argnums=(0, 1))
        for make in (plain, release.value_and_update)
    ]
    trees = [[jax.tree.map(jnp.copy, params), tx.init(params)] for _ in steps]
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(args.rounds + 2):
        for i, step in enumerate(steps):
            start = time.process_time()
            _, *trees[i] = jax.block_until_ready(step(*trees[i], batch))
            times[i].append(time.process_time() - start)
    return [statistics.median(each[2:]) for each in times]


def row(name: str, args: argparse.Namespace) -> dict[str, str]:
    without, with_release = medians(*OPTIMIZERS[name], args)
    return {
        "step": name,
        "without release, ms": f"{1e3 * without:.0f}",
        "with, ms": f"{1e3 * with_release:.0f}",
        "ratio": f"{with_release / without:.2f}",
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in {
        "rounds": 11,
        "layers": 8,
        "width": 768,
        "batch-size": 2048,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(argv)
    print(
        f"{args.layers} layers of {args.width} x {args.width}, batch "
        f"{args.batch_size}, {jax.devices()[0].device_kind}, jax {jax.__version__}"
    )
    records.print_rows(row(name, args) for name in OPTIMIZERS)
