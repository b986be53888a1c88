"""Time to trace and compile a training step, compared with optax's step.

    .venv/bin/python -m benchmarks compile_cost

The table lists seconds of processor time to trace, lower and compile a whole training
step of a small transformer with 12 layers and 198 leaves for this CPU: loss, gradients
and update. Parameters and state are donated. In optax's step, parameters are float32.
"""

import argparse
import functools
from collections.abc import Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import lowbit_optax
from benchmarks import records
from tools.stages import compile_in_stages

RATE, OPTAX = 1e-3, "optax.adamw"


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

    given = params, jax.eval_shape(tx.init, params), tokens
    return compile_in_stages(step, *given, donate=(0, 1)).processor


def rows() -> Iterator[dict[str, str]]:
    """Measure each step, beginning with optax."""
    training_cost(OPTAX)  # warms up
    base = None
    for name in (OPTAX, "kahan_adamw", "lowbit_adamw"):
        found = training_cost(name)
        total = sum(found.values())
        base = base or total
        seconds = {stage: f"{x:.2f}" for stage, x in (found | {"total": total}).items()}
        yield {"step": name} | seconds | {"relative to optax": f"{total / base:.1f}"}


def main(argv: list[str] | None = None) -> None:
    argparse.ArgumentParser(description=str(__doc__).splitlines()[0]).parse_args(argv)
    records.print_rows(rows())
