"""Time to trace and compile a step, compared with optax's step on the same leaves.

    .venv/bin/python -m benchmarks compile_cost

The table lists seconds of processor time to trace, lower and compile a donated step on
the 148 bfloat16 leaves of GPT-2 for an H200, with each launcher. They include the
assemblers that the process runs, and Mosaic's own compiler. JAX's plugin for CUDA needs
``JAX_PLATFORMS=cpu`` on a machine without a GPU.

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
from benchmarks.leaf_sets import gpt2
from tools.stages import compile_in_stages

MINUTES = 6
NEEDS = ("jax_plugins.xla_cuda12",)

RATE, OPTAX = 1e-3, "optax.adamw"


def cost_of(step, tx, params, other, mesh=None) -> dict[str, float]:
    """Return the seconds of each stage of a step that donates parameters and state."""
    given = params, jax.eval_shape(tx.init, params), other
    return compile_in_stages(step, *given, mesh=mesh, donate=(0, 1)).processor


def cost(name: str, shapes: Sequence | None = None) -> dict[str, float]:
    """Return the seconds of each stage of a step for an H200.

    Args:
      name: ``OPTAX``, or the launcher that compiles the kernels of ``lowbit_adamw``.
      shapes: the shapes of the leaves; None for those of GPT-2.
    """
    from tools.gpu_program.targets import gpu_mesh

    is_optax = name == OPTAX
    tx = optax.adamw(RATE)
    tx = tx if is_optax else lowbit_optax.lowbit_adamw(RATE, implementation=name)
    leaves = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes or gpt2().shapes
    ]
    params = {f"{number:03d}": leaf for number, leaf in enumerate(leaves)}
    step = functools.partial(lowbit_optax.step, tx)
    return cost_of(step, tx, params, params, gpu_mesh())


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
    tx = optax.adamw(RATE)
    if name != OPTAX:
        tx = getattr(lowbit_optax, name)(RATE)
        params = jax.eval_shape(lambda x: lowbit_optax.from_master(tx, x)[0], params)

    def loss_fn(params, tokens):
        logits = model.apply({"params": params}, tokens)[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    def step(params, state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        return loss, *lowbit_optax.step(tx, params, state, grads)

    return cost_of(step, tx, params, tokens)


def rows(of: Callable, names: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """Measure with ``of(name)``, beginning with optax."""
    base = None
    for name in (OPTAX, *names):
        found = of(name)
        total = sum(found.values())
        base = base or total
        seconds = {stage: f"{x:.2f}" for stage, x in (found | {"total": total}).items()}
        yield {"step": name} | seconds | {"relative to optax": f"{total / base:.1f}"}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--for", choices=("h200", "training"), default="h200", dest="x")
    if parser.parse_args(argv).x == "training":
        training_cost(OPTAX)  # warms up
        records.print_rows(rows(training_cost, ("kahan_adamw", "lowbit_adamw")))
    else:
        cost(OPTAX, ((256, 384),))
        records.print_rows(rows(cost, ("triton", "mosaic")))
