"""Memory of a step of Llama 3.1 8B, and the largest models that fit, compiled.

    .venv/bin/python -m benchmarks large_models

Each device has one sequence of 4,096 tokens. Layers are recomputed for their gradients,
and parameters and state are sharded over the devices by rows. The "float32 master" is
optax.adamw on float32 parameters, with bfloat16 gradients of a copy that each step
makes. The largest model for one device has the largest number of these layers that
fits. Programs are compiled for H200s and TPUs v6e; nothing is run.
"""

import jax
import optax

import lowbit_optax
from benchmarks import pictures, records
from lowbit_optax import release
from tools import large_steps
from tools.gpu_program.release_steps import plain, usual_mixed_precision
from tools.large_steps import GIB, Case
from tools.models.llama import Llama

NEEDS = ("jax_plugins.xla_cuda12", "libtpu", "matplotlib")

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
"""The devices of the largest models, each with two depths that always fit."""
PARTS = {
    "parameters": "parameters",
    "state": "optimizer state, extra bits",
    "carries": "activations kept",
    "temporary": "gradients, copies, one layer",
}


class Compiled:
    """Bytes of steps, each compiled once."""

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

    The last two depths that fit predict the bytes of a layer, and thus how many more
    layers fit. That depth is compiled too, until the next depth is known not to fit.
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


def text(record: dict) -> str:
    rows = [
        (name, each["layers"], f"{each['parameters'] / 1e9:.1f}")
        for name, each in record["largest"].items()
    ]
    return records.table(("the largest that fits", "layers", "10^9 parameters"), rows)


@pictures.panels(4, (1.3, 1))
def draw(record: dict, bars, sizes) -> None:
    steps = record["llama_8b"]
    texts = {name: f"{found['peak'] / GIB:.1f}" for name, found in steps.items()}
    pictures.stacked(bars, steps, PARTS, GIB, texts)
    bars.set(xlabel="GiB of each device", title="A step of Llama 3.1 8B")
    bars.legend(loc="upper center", bbox_to_anchor=(0.3, -0.16), ncols=2)
    for name, found in record["largest"].items():
        billions = found["parameters"] / 1e9
        color = pictures.COLORS["float32" if "float32" in name else "lowbit"]
        sizes.barh(name, billions, color=color)
        sizes.text(billions, name, f" {billions:.1f}", va="center")
    sizes.invert_yaxis()
    sizes.set(xlabel="billions of parameters", title="The largest that fits")
    sizes.margins(x=0.2)


def main(argv: list[str] | None = None) -> None:
    args = records.Options(__doc__).parse_args(argv)
    ran = "compiled for H200s and TPUs v6e; not run"
    records.run(__name__, args, measure, text, draw, ran)
