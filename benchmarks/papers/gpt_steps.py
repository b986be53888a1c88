"""Training steps of a GPT on float32 or quantized weights, and their memory."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import lowbit_optax
from lowbit_optax import lpmm, release
from tools.models.gpt import GPT


class Case(NamedTuple):
    """An optimizer and its weights.

    Attributes:
      tx: the optimizer.
      bits: the bits of quantized weights; None for float32 weights.
      releases: whether each layer is updated in the backward pass. This needs quantized
        weights.
    """

    tx: optax.GradientTransformation
    bits: int | None = None
    releases: bool = False


def peak(case: Case, model: GPT) -> int:
    """Return the peak memory in bytes of a step on one sequence, compiled for an H200.

    Parameters and state are donated.
    """
    from tools.gpu_program.release_steps import Model, compile_step

    tokens = jax.ShapeDtypeStruct((1, model.context + 1), jnp.int32)
    params, carry = shapes(model, case.bits), 4 * model.context * model.width
    given = Model(model.loss, params, tokens, carry, model.layers)
    make_step = lambda loss_fn, tx: step_of(case._replace(tx=tx), loss_fn)
    return compile_step(make_step, given, case.tx).peak


@functools.cache
def stored(case: Case, model: GPT) -> int:
    """Return the bytes of parameters and state, and of gradients without release."""
    params = shapes(model, case.bits)
    state = jax.eval_shape(case.tx.init, params)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, state)))
    of_gradient = 4 if case.bits is None else 2
    return held + (0 if case.releases else of_gradient * parameters(model))


def parameters(model: GPT) -> int:
    """Return the number of parameters."""
    return sum(x.size for x in jax.tree.leaves(shapes(model, None)))


@functools.cache
def shapes(model: GPT, bits: int | None):
    """Return the shapes of float32 parameters, with quantized matrices if ``bits``."""

    def init():
        params = model.init(jax.random.key(0))
        if bits is None:
            return params
        is_stacked = lambda path: "layers" in path
        # Stacks of norm scales are smaller than any matrix, and stay float32.
        return lpmm.quantize_params(
            params, bits=bits, min_size=2**19, stacked=is_stacked
        )

    return jax.eval_shape(init)


def step_of(case: Case, loss_fn: Callable) -> Callable:
    """Return a training step, with bfloat16 gradients of quantized weights."""
    if case.releases:
        return release.value_and_update(loss_fn, case.tx, grad_dtype=jnp.bfloat16)
    differentiate = jax.value_and_grad(loss_fn)
    if case.bits is not None:
        differentiate = lpmm.value_and_grad(loss_fn, jnp.bfloat16, lazy=True)

    def train_step(params, state, tokens):
        loss, grads = differentiate(params, tokens)
        return loss, *lowbit_optax.step(case.tx, params, state, grads)

    return train_step
