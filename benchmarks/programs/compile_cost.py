"""Time to trace and compile a step, compared with optax's step on the same leaves.

    .venv/bin/python -m benchmarks compile_cost [--for cpu h200] [--launcher mosaic]

The tables list seconds of processor time to trace, lower and compile a donated step of
bfloat16 parameters with ``lowbit_optax.step`` and with optax. They include the
assemblers that the process runs, and Mosaic's own compiler. The steps are compiled for
this machine's CPU, and for an H200 if the ``gpu-program`` extra is installed. JAX's
plugin for CUDA needs ``JAX_PLATFORMS=cpu`` on a machine without a GPU.

``--for training`` compiles a whole training step of a small transformer with 12 layers
and 198 leaves for this CPU: loss, gradients and update. In this table, optax's step
has float32 parameters.
"""

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import lowbit_optax
from benchmarks import records
from benchmarks.leaf_sets import LeafSet, gpt2, resnet50, small_leaves, vit_base
from benchmarks.registry import GPU_COMPILER
from tools import is_installed
from tools.stages import compile_in_stages

MINUTES = 6

RATE = 1e-3
FOR_CPUS = {
    "sr_adamw": lowbit_optax.sr_adamw,
    "extra_bits_adamw(bits=16)": lowbit_optax.extra_bits_adamw,
    "extra_bits_adamw(bits=8)": functools.partial(
        lowbit_optax.extra_bits_adamw, bits=8
    ),
    "kahan_adamw": lowbit_optax.kahan_adamw,
    "lowbit_adamw": lowbit_optax.lowbit_adamw,
}
LPMM = "lpmm_adam"
ALIASES = FOR_CPUS | {LPMM: lowbit_optax.lpmm_adam}

ON_CPUS = (
    LeafSet("12 leaves of 12 shapes", tuple((256, 128 * i) for i in range(1, 13))),
    small_leaves(),
)
ON_GPUS = (
    gpt2(),
    resnet50(),
    vit_base(),
    LeafSet("128 leaves of LoRA", ((768, 16), (16, 768), (768, 16), (16, 3072)) * 32),
    LeafSet("120 vectors", tuple((64 * (1 + i % 20),) for i in range(120))),
)


def cost(name: str, leaf_set: LeafSet, mesh=None, launcher=None) -> dict[str, float]:
    """Return the seconds of each stage of a step.

    Args:
      name: a key of ``ALIASES``; any other name stands for ``optax.adamw``.
      leaf_set: the shapes of the parameters.
      mesh: the devices to compile for; None for this machine.
      launcher: the compiler of the kernels.
    """
    leaves = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in leaf_set.shapes]
    grads = {f"{number:03d}": leaf for number, leaf in enumerate(leaves)}
    params, tx = grads, transformation(name, launcher)
    if name == LPMM:
        quantize = functools.partial(lowbit_optax.lpmm.quantize_params, bits=12)
        params = jax.eval_shape(quantize, grads)
    return cost_of(functools.partial(lowbit_optax.step, tx), tx, params, grads, mesh)


def cost_of(step, tx, params, other, mesh=None) -> dict[str, float]:
    """Return the seconds of each stage of a step that donates parameters and state."""
    given = params, jax.eval_shape(tx.init, params), other
    return compile_in_stages(step, *given, mesh=mesh, donate=(0, 1)).processor


def transformation(name: str, launcher: str | None = None):
    """Return the transformation with this name, or ``optax.adamw`` for other names."""
    if name in ALIASES:
        return ALIASES[name](RATE, implementation=launcher)
    return optax.adamw(RATE)


class Transformer(nn.Module):
    """A small transformer with 12 layers, whose parameters are 198 arrays."""

    @nn.compact
    def __call__(self, tokens):
        dense = functools.partial(nn.Dense, dtype=jnp.bfloat16)
        x = nn.Embed(512, 128, dtype=jnp.bfloat16)(tokens)
        x = x + nn.Embed(64, 128, dtype=jnp.bfloat16)(jnp.arange(tokens.shape[1]))
        mask = nn.make_causal_mask(tokens)
        for _ in range(12):
            attention = nn.SelfAttention(4, dtype=jnp.bfloat16)
            x = x + attention(nn.LayerNorm()(x), mask=mask)
            x = x + dense(128)(nn.gelu(dense(512)(nn.LayerNorm()(x))))
        return dense(512)(nn.LayerNorm()(x)).astype(jnp.float32)


def training_cost(name: str) -> dict[str, float]:
    """Return the seconds of each stage of a training step of :class:`Transformer`."""
    model, tokens = Transformer(), jax.ShapeDtypeStruct((4, 64), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    tx = transformation(name)
    if name in ALIASES:
        params = jax.eval_shape(lambda x: lowbit_optax.from_master(tx, x)[0], params)

    def loss_fn(params, tokens):
        logits = model.apply({"params": params}, tokens)[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    def step(params, state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        return loss, *lowbit_optax.step(tx, params, state, grads)

    return cost_of(step, tx, params, tokens)


def rows(
    leaf_sets: Sequence[LeafSet], names: Sequence[str], mesh, launcher
) -> Iterator[dict[str, str]]:
    """Measure the steps on each set of leaves, beginning with optax."""
    cost("optax.adamw", LeafSet("warm-up", ((256, 384),)), mesh)
    for leaf_set in leaf_sets:
        of = lambda name: cost(name, leaf_set, mesh, launcher)  # noqa: B023
        for row in rows_of(of, names):
            yield {"leaves": leaf_set.name} | row


def rows_of(of: Callable, names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Measure with ``of(name)``, beginning with optax."""
    base = None
    for name in ("optax.adamw", *names):
        found = of(name)
        total = sum(found.values())
        base = base or total
        seconds = {stage: f"{x:.2f}" for stage, x in (found | {"total": total}).items()}
        ratio = {"relative to optax": f"{total / base:.1f}"}
        yield {"step": f"`{name}`"} | seconds | ratio


def main(argv: list[str] | None = None) -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    has_gpu = all(map(is_installed, GPU_COMPILER))
    devices = ["cpu", "training", *(["h200"] if has_gpu else [])]
    parser.add_argument("--for", nargs="*", dest="devices", default=devices)
    parser.add_argument("--launcher", choices=["triton", "mosaic"], default=None)
    parser.add_argument("--sets", nargs="*", help="names of leaf sets; default: all")
    parser.add_argument("--steps", nargs="*", help="names of steps; default: all")
    args = parser.parse_args(argv)
    chosen = lambda sets: [x for x in sets if not args.sets or x.name in args.sets]
    named = lambda names: [x for x in names if not args.steps or x in args.steps]
    if "cpu" in args.devices:
        print("\nCompiled for this CPU, seconds of processor time\n")
        records.print_rows(rows(chosen(ON_CPUS), named(FOR_CPUS), None, None))
    if "training" in args.devices:
        print("\nA training step of 198 leaves, compiled for this CPU\n")
        training_cost("optax.adamw")  # warms up
        records.print_rows(rows_of(training_cost, named(FOR_CPUS)))
    if "h200" in args.devices:
        from tools.gpu_program.targets import gpu_mesh

        print(f"\nCompiled for an H200 ({args.launcher or 'default launcher'})\n")
        names = named(["kahan_adamw", "lowbit_adamw", LPMM])
        found = rows(chosen(ON_GPUS), names, gpu_mesh(), args.launcher)
        records.print_rows(found)
