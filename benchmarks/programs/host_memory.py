"""Memory of steps compiled for a TPU v5e, with the state of layers in host memory.

    .venv/bin/python -m benchmarks host_memory

The model is 12 layers tanh(h @ w) of 4096 x 4096 in bfloat16 with a batch of 512, each
computed again for its gradient. Parameters and state are donated. *Moved whole*: the
step without release copies the whole state to the device and back. Nothing is run.
Needs the ``tpu-program`` extra.
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import optax

import lowbit_optax
from lowbit_optax import release
from tools.gpu_program.release_steps import MIB, matrices, plain
from tools.tpu_program.release_steps import compile_step, moved_whole, streamed

OPTIMIZERS = {
    "float32 moments": lambda: lowbit_optax.lowbit(
        optax.adamw(1e-3), weights=lowbit_optax.nearest(), moments="float32"
    ),
    "extra_bits_adamw(bits=8)": lambda: lowbit_optax.extra_bits_adamw(1e-3, bits=8),
    "lowbit_adamw": lambda: lowbit_optax.lowbit_adamw(1e-3),
    "lowbit_adamw, kernels": lambda: lowbit_optax.lowbit_adamw(
        1e-3, implementation="pallas"
    ),
}
MODES = {
    "without release": plain,
    "without, moved whole": moved_whole,
    "release": release.value_and_update,
    "release, in host memory": streamed,
}


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--steps", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS)
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    flags = parser.parse_args(argv)
    print("| AdamW step, MiB | | arguments | temporary | device | host |")
    print("|---|---|---|---|---|---|")
    for name in flags.steps:
        for mode in flags.modes:
            step = compile_step(MODES[mode], matrices(), OPTIMIZERS[name]())
            device = step.arguments + step.temporary
            sizes = (step.arguments, step.temporary, device, step.host)
            cells = [name, mode, *(f"{x / MIB:,.0f}" for x in sizes)]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
