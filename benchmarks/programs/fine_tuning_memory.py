"""Memory of fine-tuning all weights of Llama 3.1 in 1.1 to 1.6 bytes per parameter.

    .venv/bin/python -m benchmarks fine_tuning_memory

Weights are codes of 8, 6 or 4 bits in blocks of 64, trained with gradient release by
``factored_adamw`` with ``bits=0``, which adds their rounding errors to a momentum of 4
bits. The step of Llama 3.1 8B is compiled for one H200, for one sequence of 4,096
tokens. Layers are recomputed for their gradients. The bytes of the 70B model follow
from the shapes. Nothing is run.
"""

import functools

import jax.numpy as jnp

import lowbit_optax
from benchmarks import pictures, records
from lowbit_optax import release
from tools import large_steps
from tools.large_steps import GIB, Case
from tools.models.llama import Llama

NEEDS = ("jax_plugins.xla_cuda12",)

BITS = (8, 6, 4)
MODELS = {"8B": Llama(), "70B": Llama(80, 8192, 28672, 64, 8)}
PARTS = {
    "parameters": "weights",
    "state": "optimizer state",
    "temporary": "gradients, weights of one layer",
    "carries": "activations kept",
}


def case_of(bits: int) -> Case:
    """Return the training step on weights of this many bits."""
    make_step = functools.partial(release.value_and_update, grad_dtype=jnp.bfloat16)
    return Case(make_step, lowbit_optax.factored_adamw(1e-5, bits=0), bits)


def from_shapes(model: Llama, bits: int) -> dict[str, float]:
    """Return the bytes per parameter of weights and state, and all of their bytes."""
    case = case_of(bits)
    report = lowbit_optax.memory_report(
        case.tx, case.params(model), stacked=large_steps.is_stacked
    )
    size = report.bytes_per_param
    return {"bytes_per_parameter": size, "stored": report.total.total}


def measure(args) -> dict:
    compiled = {}
    for bits in BITS:
        found = large_steps.device_bytes(case_of(bits), MODELS["8B"], "1 H200")
        compiled[str(bits)] = found
        beside = (found["peak"] - found["carries"]) / GIB
        print(f"{bits} bits: {beside:.2f} GiB beside activations", flush=True)
    stored = {
        name: {str(bits): from_shapes(model, bits) for bits in BITS}
        for name, model in MODELS.items()
    }
    return {"compiled": compiled, "stored": stored}


@pictures.panels(4)
def draw(record: dict, axes) -> str:
    steps = {f"{bits} bits": each for bits, each in record["compiled"].items()}
    peaks = {name: f"{each['peak'] / GIB:.1f}" for name, each in steps.items()}
    pictures.stacked(axes, steps, PARTS, GIB, peaks)
    axes.set(xlabel="GiB on one H200, compiled and not run (lower is better)")
    return f"All weights of Llama 3.1 8B in 8 bits train in {peaks['8 bits']} GiB"


main = records.program(__name__, ran="compiled for an H200; not run")
