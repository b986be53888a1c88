"""Derivatives and batches of kernels, which have none of their own."""

from collections.abc import Callable

import jax
from jax.custom_batching import custom_vmap


def transformable(kernel: Callable, reference: Callable) -> Callable:
    """The kernel, with the reference's derivatives and batches.

    Args:
      kernel: from trees of arrays to a tree of arrays.
      reference: a function of array operations that computes the same.
    """

    @custom_vmap
    def run(*args):
        return kernel(*args)

    @run.def_vmap
    def _(axis_size, batched, *args):
        axes = jax.tree.map(lambda each: 0 if each else None, batched)
        out = jax.vmap(reference, in_axes=axes, axis_size=axis_size)(*args)
        return out, jax.tree.map(lambda _: True, out)

    differentiable = jax.custom_jvp(lambda *args: run(*args))

    @differentiable.defjvp
    def _(primals, tangents):
        return jax.jvp(lambda *args: reference(*args), primals, tangents)

    return differentiable
