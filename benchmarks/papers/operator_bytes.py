"""Bytes that an addition to a split tensor moves, by extra bits, compiled for an H200.

    .venv/bin/python -m benchmarks operator_bytes

Lewandowski and Kosson 2023, figure 3: operators on 16-bit tensors with extra bits use
about the same share of the GPU's bandwidth as PyTorch's operators, and less for sizes
that need more work in shared memory. Measuring time needs a GPU. This benchmark instead
compares the bytes that the kernels of a donated addition read and write with the bytes
that they need. The ratio is the share of a copy's bandwidth that a program reaches if
memory limits it. The addition is compiled once with ``SplitArray``, and once as a step
of ``optax.sgd(1.0)`` in ``lowbit``, which is one fused kernel.
"""

import jax
import jax.numpy as jnp
import optax

import lowbit_optax
from benchmarks import pictures, records

NEEDS = ("jax_plugins.xla_cuda12",)

BITS = (0, 1, 2, 4, 6, 8, 10, 12, 16)


def moved(bits: int, shape: tuple[int, int]) -> dict:
    """Return bytes per element of ``split + array`` in bfloat16 with extra bits."""
    from tools.gpu_program.steps import leaf, lower_step
    from tools.gpu_program.targets import compile_lowered, gpu_mesh, lower_for
    from tools.hlo import kernels, memory

    format_ = lowbit_optax.extra_bits(bits, residual_rounding="nearest")
    step = lower_step(
        lowbit_optax.lowbit(optax.sgd(1.0), weights=format_), leaf(*shape)
    )
    start = jax.ShapeDtypeStruct(shape, jnp.float32)
    split = jax.eval_shape(
        lambda x: lowbit_optax.split_array(x, jnp.bfloat16, format_), start
    )
    other = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    add = lambda split, other: split + other
    program = compile_lowered(lower_for(gpu_mesh(), add, split, other, donate=(0,)))
    size = shape[0] * shape[1]
    launches = [x / size for _, x in kernels(program) if x > size / 100]
    return {
        "least": 6 + 2 * bits / 8,
        "moved": sum(launches),
        "launches": len(launches),
        "temporary": memory(program).temp_size_in_bytes / size,
        "fused_moved": step.moved,
        "fused_launches": len([s for _, s in step.launches if s > size / 100]),
    }


def measure(args) -> dict:
    return {"rows": {str(bits): moved(bits, (args.rows, 4096)) for bits in BITS}}


@pictures.panels(4, columns=2)
def draw(record: dict, axes) -> str:
    rows = {int(bits): row for bits, row in record["rows"].items()}
    color, mark = pictures.FORMATS["extra bits"]
    look, thin = {"color": color, "marker": mark}, {"color": "black", "lw": 1}
    for key, label, style in (
        ("moved", "SplitArray + array", look | {"ls": ":", "mfc": "white"}),
        ("fused_moved", "fused step of lowbit", look),
        ("least", "least that is possible", thin | {"ls": ":"}),
    ):
        axes.plot(list(rows), [row[key] for row in rows.values()], label=label, **style)
    axes.axhline(10, ls="--", label="float32 array + bfloat16 array", **thin)
    axes.set(xlabel="extra bits of a bfloat16 array", ylim=(0, 26))
    axes.set(ylabel="bytes per element, compiled for an H200 (lower is better)")
    ratios = [row["moved"] / row["least"] for bits, row in rows.items() if bits]
    return (
        "A fused step moves only the bytes that it must; adding to a SplitArray moves "
        f"{min(ratios):.1f} to {max(ratios):.1f} times as many"
    )


main = records.program(__name__, rows=4096, ran=records.COMPILED)
