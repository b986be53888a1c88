"""The AdamW variants that ``first_device`` times and trains with."""

import functools
import importlib
import importlib.util
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

import lowbit_optax as lo
from tools.gpu_program.steps import replaced, with_master

RATE, DECAY = 1e-3, 1e-4


class Optimizer(typing.NamedTuple):
    """An optimizer with the same interface for every library.

    Attributes:
      init: function of bfloat16 parameters, which returns the parameters as the
        optimizer stores them, and the optimizer's state.
      step: function of parameters, state and gradients, which returns new parameters
        and state.
      tx: the optax transformation, if there is one.
      reads_params: False if the step computes new parameters from the state alone.
    """

    init: Callable
    step: Callable
    tx: typing.Any = None
    reads_params: bool = True


def _wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _float32(rate) -> Optimizer:
    """Return optax's AdamW with float32 parameters and moments."""
    tx = optax.adamw(rate, weight_decay=DECAY)

    def step(params, state, grads):
        updates, state = tx.update(_wide(grads), state, params)
        return optax.apply_updates(params, updates), state

    return Optimizer(lambda params: (_wide(params), tx.init(_wide(params))), step)


def _master(rate) -> Optimizer:
    """Return optax's AdamW with float32 master weights and bfloat16 parameters."""
    tx = with_master(optax.adamw(rate, weight_decay=DECAY))
    init = lambda params: (params, tx.init(params))
    return Optimizer(init, replaced(tx), reads_params=False)


def _ours(alias: Callable, rate, quantised=False, **options) -> Optimizer:
    tx = alias(rate, weight_decay=DECAY, **options)

    def init(params):
        params = lo.lpmm.quantize_params(params, bits=12) if quantised else params
        return params, tx.init(params)

    step = lambda params, state, grads: lo.step(tx, params, state, grads)
    return Optimizer(init, step, tx)


def _flash(rate) -> Optimizer:
    """Return FlashOptim's AdamW, with 24-bit weights and 8-bit moments."""
    tx = importlib.import_module("flashoptim_jax").flash_adamw(
        learning_rate=rate, weight_decay=DECAY, master_weight_bits=24
    )
    step = lambda params, state, grads: tx.step(params, state, grads)
    return Optimizer(lambda params: (params, tx.init(params)), step)


def _bind(alias: Callable, **options) -> Callable:
    return functools.partial(_ours, alias, **options)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "lowbit_adamw": _bind(lo.lowbit_adamw),
    "optax, float32 master": _master,
    "kahan_adamw": _bind(lo.kahan_adamw),
    "sr_adamw": _bind(lo.sr_adamw),
    "extra_bits_adamw(bits=8)": _bind(lo.extra_bits_adamw, bits=8),
    "factored_adamw": _bind(lo.factored_adamw),
    "sr_adamw, error into 8-bit mu": _bind(
        lo.sr_adamw, error_feedback="mu", moments=lo.block_quantized(8)
    ),
    "lpmm_adam, 12 bits": _bind(lo.lpmm_adam, quantised=True),
    "optax, float32": _float32,
    "flashoptim_jax": _flash,
}
"""Functions of a learning rate by optimizer name, the most important first."""

PEER = "flashoptim_jax"


def timed_here() -> list[str]:
    """Return the names of the optimizers that can be imported here."""
    has_peer = importlib.util.find_spec(PEER) is not None
    return [name for name in OPTIMIZERS if has_peer or name != PEER]


def nbytes(tree) -> int:
    """Return the number of bytes in all arrays of a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
