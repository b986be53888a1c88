"""Memory of a gradient under precision assignments, compiled for an H200.

    .venv/bin/python -m benchmarks precision_memory

The model is ResNet-18 for CIFAR-10 with float32 parameters and HFP8 formats. "Emulated"
stores float32 arrays with rounded values. "Stored" keeps bit patterns of 8 and 16 bits
for the backward pass (``precision.apply(..., stored=True)``). Nothing is run and no GPU
is needed, but the ``gpu-program`` and ``flax`` extras are.
"""

import jax

from benchmarks import records
from lowbit_optax import precision
from tools.gpu_program.targets import compile_for, gpu_mesh
from tools.models.classifier import arguments_of, make_loss_fn
from tools.models.resnet import ResNet

NEEDS = ("jax_plugins.xla_cuda12",)

MIB, RATIOS = 2**20, (0.0, 0.5, 1.0)


def measure(args) -> dict:
    """Return the MiB of temporary memory, and of the tensors of the forward pass."""
    model = ResNet(args.width)
    loss_fn = make_loss_fn(model)
    arguments = arguments_of(model, args.batch_size)

    def temporary(loss_fn) -> float:
        step = jax.value_and_grad(loss_fn, has_aux=True)
        compiled = compile_for(gpu_mesh(), step, *arguments)
        return compiled.memory_analysis().temp_size_in_bytes / MIB

    plan = precision.trace(loss_fn, *arguments, has_aux=True)
    found = {}
    for ratio in RATIOS:
        assignment = precision.demote(plan, ratio)
        apply = lambda stored, assignment=assignment: precision.apply(
            loss_fn, assignment, has_aux=True, stored=stored
        )
        found[f"{ratio:g}"] = {
            "low_ratio": float(assignment.low_ratio),
            "emulated": temporary(apply(False)),
            "stored": temporary(apply(True)),
        }
    whole = sum(plan.sizes) * 4 / MIB
    return {"forward": whole, "float32": temporary(loss_fn), "ratios": found}


main = records.program(__name__, width=64, batch_size=256, ran=records.COMPILED)
