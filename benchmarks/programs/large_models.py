"""Memory of a step of Llama 3.1 8B, and the largest models that fit, compiled.

    .venv/bin/python -m benchmarks large_models

Each device has one sequence of 4,096 tokens. Layers are recomputed for their gradients,
and parameters and state are sharded over the devices by rows. The "float32 master" is
optax.adamw on float32 parameters, with bfloat16 gradients of a copy that each step
makes. The largest model for one device has the largest number of these layers that
fits. Programs are compiled for H200s and TPUs v6e; nothing is run.
"""

import re

import jax
import optax

import lowbit_optax
from benchmarks import pictures, records
from lowbit_optax import release
from tools import large_steps
from tools.gpu_program.release_steps import plain, usual_mixed_precision
from tools.large_steps import GIB, Case
from tools.models.llama import Llama

NEEDS = ("jax_plugins.xla_cuda12", "libtpu")

LLAMA_8B = Llama()

CASES = {
    "float32 master": Case(usual_mixed_precision, optax.adamw(1e-4)),
    "lowbit_adamw": Case(plain, lowbit_optax.lowbit_adamw(1e-4)),
    "lowbit_adamw, release": Case(
        release.value_and_update, lowbit_optax.lowbit_adamw(1e-4)
    ),
}

PLACES = ("8 H200s", "8 v6e's")
LARGEST = {
    "1 H200": (4, 8),
    "1 v6e": (2, 4),
}
"""The devices, each with two depths that always fit."""
PARTS = {
    "parameters": "parameters",
    "state": "optimizer state, extra bits",
    "carries": "activations kept",
    "temporary": "gradients, copies, one layer",
}


class Compiled:
    """The number of bytes of each step. Each step is compiled once."""

    def __init__(self):
        self.found: dict[str, dict[str, int]] = {}

    def bytes_of(self, case: str, model: Llama, where: str) -> dict[str, int]:
        key = f"{case} | {where} | {model.layers} layers of {model.width}"
        if key not in self.found:
            self.found[key] = large_steps.device_bytes(CASES[case], model, where)
            print(f"{key}: {self.found[key]['peak'] / GIB:.2f} GiB", flush=True)
        return self.found[key]


def most_layers(
    compiled: Compiled, case: str, depths: tuple[int, int], where: str
) -> dict:
    """Find the largest number of layers whose step fits, and the bytes of the step.

    The last two depths that fit predict the bytes per layer, and so how many more
    layers fit. This depth is compiled next, until the next depth is known not to fit.
    """
    room = large_steps.MEMORY[where.split()[1]]
    (before, layers), too_many = depths, None

    def peak(depth: int) -> int | None:
        model = LLAMA_8B._replace(layers=depth)
        try:
            return compiled.bytes_of(case, model, where)["peak"]
        except jax.errors.JaxRuntimeError as error:
            # XLA:TPU does not compile a program that does not fit.
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return None

    while True:
        last = peak(layers)
        added = (last - peak(before)) / (layers - before)
        more = layers + max(1, int((room - last) // added))
        more = more if too_many is None else min(more, too_many - 1)
        if more == layers:
            break
        size = peak(more)
        if size is None or size > room:
            too_many = more
        else:
            before, layers = layers, more
    return {
        "layers": layers,
        "parameters": large_steps.parameters(LLAMA_8B._replace(layers=layers)),
        "peak": last,
        "room": room,
    }


def measure(args) -> dict:
    compiled = Compiled()
    llama = {
        f"{name}, {where}": compiled.bytes_of(name, LLAMA_8B, where)
        for where in PLACES
        for name in CASES
    }
    largest = {
        f"{name}, {where}": most_layers(compiled, name, depths, where)
        for where, depths in LARGEST.items()
        for name in CASES
        if name != "lowbit_adamw"
    }
    return {"steps": compiled.found, "llama_8b": llama, "largest": largest}


@pictures.panels(4.4, (7, 5), columns=2, sharey=True)
def draw(record: dict, bars, sizes) -> str:
    device = lambda name: re.sub(r", \d (\w+?)('?s)?$", r" (\1)", name)
    steps = {device(name): each for name, each in record["llama_8b"].items()}
    peaks = {name: each["peak"] / GIB for name, each in steps.items()}
    texts = {name: f"{peak:.1f}" for name, peak in peaks.items()}
    pictures.stacked(bars, steps, PARTS, GIB, texts)
    bars.set(title="a step of Llama 3.1 8B, on 8 devices")
    bars.set(xlabel="GiB per device, compiled and not run (lower is better)")
    largest = {device(n): x["parameters"] / 1e9 for n, x in record["largest"].items()}
    texts = dict.fromkeys(steps, "not compiled")
    texts |= {name: f"{billions:.1f}" for name, billions in largest.items()}
    billions = {name: {"": largest.get(name, 0)} for name in steps}
    pictures.stacked(sizes, billions, {"": ""}, 1, texts)
    sizes.set(title="largest model that fits 1 device")
    sizes.set(xlabel="billion parameters (higher is better)")
    master, _, lowbit = (f"{name} (H200)" for name in CASES)
    share, times = (x[lowbit] / x[master] for x in (peaks, largest))
    return (
        f"On H200s, lowbit_adamw with gradient release needs {1 - share:.0%} less "
        f"memory than a float32 master, and fits a model {times:.1f} times as large"
    )


main = records.program(__name__, ran="compiled for H200s and TPUs v6e; not run")
