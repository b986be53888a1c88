"""Memory of a gradient under precision assignments, compiled for an H200.

    .venv/bin/python -m benchmarks precision_memory

ResNet-18 for CIFAR-10, float32 parameters, HFP8 formats. "Emulated" keeps float32
arrays with rounded values; "stored" keeps patterns of 8 and 16 bits for the backward
pass (``precision.apply(..., stored=True)``). Nothing is run and no GPU is needed, but
the ``gpu-program`` and ``flax`` extras are.
"""

import jax
import jax.numpy as jnp
import optax

from benchmarks import records
from lowbit_optax import precision
from tools.gpu_program.targets import compile_for, gpu_mesh
from tools.models.resnet import ResNet

MIB = 2**20


def measure(width: int, batch: int, ratios: list[float]) -> dict:
    """MiB of temporary memory, and of the tensors of the forward pass."""
    model = ResNet(width)
    images = jax.ShapeDtypeStruct((batch, 32, 32, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
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

    def temporary(loss_fn) -> float:
        step = jax.value_and_grad(loss_fn, has_aux=True)
        compiled = compile_for(gpu_mesh(), step, *arguments)
        return compiled.memory_analysis().temp_size_in_bytes / MIB

    plan = precision.trace(loss_fn, *arguments, has_aux=True)
    found = {}
    for ratio in ratios:
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


def show(record: dict) -> None:
    options = record["options"]
    print(f"ResNet-18 of width {options['width']}, batch {options['batch_size']}")
    print(f"forward tensors in float32: {record['forward']:,.0f} MiB; temporary MiB:\n")
    rows = [["none, float32", "", f"{record['float32']:,.0f}", ""]]
    for ratio, found in record["ratios"].items():
        cells = [f"{found[kind]:,.0f}" for kind in ("emulated", "stored")]
        rows.append([f"r = {ratio}", f"{found['low_ratio']:.2f}", *cells])
    heads = ["assignment", "low-precision ratio", "emulated", "stored"]
    print(records.table(heads, rows))


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = records.parser(__doc__, has_full=False)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    args = parser.parse_args(argv)
    path = records.path_of(__name__, args.is_apart)
    if not args.draw:
        found = measure(args.width, args.batch_size, args.ratios)
        records.save(path, args, "compiled for an H200; not run", **found)
    show(records.load(path))
