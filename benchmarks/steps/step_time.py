"""Compare the time of this package's AdamW steps with optax's, on this machine.

    .venv/bin/python -m benchmarks step_time --rounds 15
    .venv/bin/python -m benchmarks step_time --rounds 15 --layers 3

The parameters are one leaf of 4096 x 4096, or the matrices of some layers of GPT-2. All
variants run once per round, so that other programs disturb them equally. The table has
the median time, and the median over the rounds of its ratio to the time of optax's
float32 step. Gradients have the dtype of the parameters. Every step is jitted and
donates parameters and state.
"""

import argparse
import functools
import platform
import statistics
import time
from operator import truediv

import jax
import jax.numpy as jnp
import optax

import lowbit_optax
from benchmarks import leaf_sets, records
from tools.gpu_program.steps import applied, fast, replaced, with_master

LARGE, RATE, DECAY = (4096, 4096), 1e-3, 1e-4


def variants(implementation: str | None) -> dict[str, tuple]:
    """Return dtypes, transformations and steps; the first one is the baseline."""
    adamw = optax.adamw(RATE, weight_decay=DECAY)
    by_optax = functools.partial(applied, apply=optax.apply_updates)
    options = {"weight_decay": DECAY, "implementation": implementation}
    found = {
        "optax adamw float32": (jnp.float32, adamw, by_optax),
        "optax adamw float32 master": (jnp.bfloat16, with_master(adamw), replaced),
    }
    for name, tx in {
        "kahan_adamw": lowbit_optax.kahan_adamw(RATE, **options),
        "sr_adamw": lowbit_optax.sr_adamw(RATE, **options),
        "extra_bits_adamw(bits=8)": lowbit_optax.extra_bits_adamw(
            RATE, bits=8, **options
        ),
        "lowbit_adamw": lowbit_optax.lowbit_adamw(RATE, **options),
    }.items():
        found[name] = jnp.bfloat16, tx, fast
    return found


class Running:
    """The compiled step of a variant, with its parameters and state."""

    def __init__(self, shapes, dtype, tx, make_step):
        self.params = [jnp.ones(shape, dtype) for shape in shapes]
        keys = jax.random.split(jax.random.key(0), len(shapes))
        self.grads = [
            jax.random.normal(key, shape, dtype)
            for key, shape in zip(keys, shapes, strict=True)
        ]
        # A buffer cannot be donated twice, so a master needs its own.
        self.state = jax.tree.map(jnp.copy, tx.init(self.params))
        self.step = jax.jit(make_step(tx), donate_argnums=(0, 1))
        lowered = self.step.lower(self.params, self.state, self.grads)
        memory = lowered.compile().memory_analysis()
        self.temporary = memory.temp_size_in_bytes / sum(x.size for x in self.params)
        self()
        self.seconds: list[float] = []

    def __call__(self) -> float:
        start = time.perf_counter()
        self.params, self.state = self.step(self.params, self.state, self.grads)
        jax.block_until_ready((self.params, self.state))
        return time.perf_counter() - start


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--implementation", help="of the optimizers, such as 'xla'")
    parser.add_argument("--layers", type=int, help="layers of GPT-2, without vectors")
    args = parser.parse_args(argv)
    shapes = [LARGE]
    if args.layers:
        of_layers = leaf_sets.gpt2(layers=args.layers).shapes[2:]
        shapes = [shape for shape in of_layers if len(shape) == 2]
    found = variants(args.implementation).items()
    running = {name: Running(shapes, *variant) for name, variant in found}
    for _ in range(args.rounds):
        for run in running.values():
            run.seconds.append(run())
    device = jax.devices()[0].device_kind
    print(f"jax {jax.__version__} on {device} ({platform.machine()})")
    base = next(iter(running.values())).seconds
    records.print_rows(
        {
            "step": name,
            "ms": f"{1e3 * statistics.median(run.seconds):.1f}",
            "ratio": f"{statistics.median(map(truediv, run.seconds, base)):.2f}",
            "temp B/param": f"{run.temporary:.2f}",
        }
        for name, run in running.items()
    )
