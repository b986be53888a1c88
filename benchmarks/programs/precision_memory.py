"""Memory of a gradient under precision assignments, compiled for an H200.

    .venv/bin/python -m benchmarks precision_memory

ResNet-18 for CIFAR-10, float32 parameters, HFP8 formats. "Emulated" keeps float32
arrays with rounded values; "stored" keeps patterns of 8 and 16 bits for the backward
pass (``precision.apply(..., stored=True)``). Nothing is run and no GPU is needed, but
the ``gpu-program`` and ``flax`` extras are.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

from lowbit_optax import precision
from tools.gpu_program.targets import compile_for, gpu_mesh
from tools.models.resnet import ResNet

MIB = 2**20


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    flags = parser.parse_args(argv)

    model = ResNet(flags.width)
    images = jax.ShapeDtypeStruct((flags.batch_size, 32, 32, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((flags.batch_size,), jnp.int32)
    init = lambda key, images: model.init(key, images, train=False)
    variables = jax.eval_shape(init, jax.random.key(0), images)
    arguments = variables["params"], variables["batch_stats"], images, labels

    def loss_fn(params, batch_stats, images, labels):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updates = model.apply(
            variables, images, train=True, mutable=["batch_stats"]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), updates["batch_stats"]

    def temporary(loss_fn) -> str:
        step = jax.value_and_grad(loss_fn, has_aux=True)
        compiled = compile_for(gpu_mesh(), step, *arguments)
        return f"{compiled.memory_analysis().temp_size_in_bytes / MIB:,.0f}"

    plan = precision.trace(loss_fn, *arguments, has_aux=True)
    print(f"ResNet-18 of width {flags.width}, batch {flags.batch_size}, temporary MiB")
    print(f"forward tensors in float32: {sum(plan.sizes) * 4 / MIB:,.0f}\n")
    print("| assignment | low-precision ratio | emulated | stored |")
    print("|---|---|---|---|")
    print(f"| none, float32 | | {temporary(loss_fn)} | |", flush=True)
    for ratio in flags.ratios:
        assignment = precision.demote(plan, ratio)
        cells = [
            temporary(precision.apply(loss_fn, assignment, has_aux=True, stored=stored))
            for stored in (False, True)
        ]
        low_ratio = float(assignment.low_ratio)
        print(f"| r = {ratio:g} | {low_ratio:.2f} | {' | '.join(cells)} |", flush=True)
