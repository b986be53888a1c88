"""Wrappers around a transformation, whose state contains the transformation's state."""

import jax
import jax.numpy as jnp
import optax

import lowbit_optax

RATE = 0.1


def kernel_or_other(params):
    """Labels for ``optax.partition`` that distinguish the kernel from other leaves."""

    def label(path, _):
        return "kernel" if jax.tree_util.keystr(path) == "['kernel']" else "other"

    return jax.tree_util.tree_map_with_path(label, params)


def _only(label):
    """A mask for the leaves with a label, as a function of the parameters."""
    return lambda params: jax.tree.map(lambda x: x == label, kernel_or_other(params))


WRAPPERS = {
    "chain": lambda make, other: optax.chain(optax.clip(100.0), make(RATE)),
    "multi_steps": lambda make, other: optax.MultiSteps(make(RATE), 2),
    "masked": lambda make, other: optax.chain(
        optax.masked(make(RATE), _only("kernel")), optax.masked(other, _only("other"))
    ),
    "partition": lambda make, other: optax.partition(
        {"kernel": make(RATE), "other": other}, kernel_or_other
    ),
    "inject_hyperparams": lambda make, other: optax.inject_hyperparams(
        make, hyperparam_dtype=jnp.float32
    )(learning_rate=RATE),
    "loss_scale": lambda make, other: lowbit_optax.with_loss_scale(
        make(RATE), lowbit_optax.loss_scaling.static_scale(1.0)
    ),
    "accumulation": lambda make, other: lowbit_optax.accumulate_gradients(
        make(RATE), 2, lowbit_optax.block_quantized(8), min_size=0
    ),
}
"""``wrap(make, other)`` wraps ``make(learning_rate)``. Some wrappers apply it to the
kernel only, and apply ``other`` to all other leaves.
"""
