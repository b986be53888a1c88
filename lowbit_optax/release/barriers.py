"""Barriers that keep XLA from moving and fusing parts of a released step."""

from collections.abc import Callable

import jax
from jax import lax

from lowbit_optax._step import context


def alone(update: Callable, *old):
    """Run the update of a layer so that XLA does not fuse it with accesses to stacks.

    If a GPU kernel fuses the update with the reads and writes of a stack, some threads
    write a layer's packed words in place while others still read them, and the weights
    become wrong. On GPUs and TPUs, a barrier prevents this fusion. The compiler for
    CPUs drops barriers and would copy whole stacks in every iteration, so a conditional
    prevents the fusion there. Outside of loops, this is ``update(*old)``.
    """
    layer = context.current().layer
    if layer is None:
        return update(*old)

    def branched(index, old):
        # The index is never negative, but the compiler cannot infer this.
        return lax.cond(index >= 0, lambda: update(*old), lambda: old)

    direct = lambda _, old: update(*tied(old))
    return lax.platform_dependent(layer.index, old, cpu=branched, default=direct)


def tied(tree):
    """Return the same arrays, which can be used only after all of them are computed.

    Within ``shard_map``, only arrays that vary over the same mesh axes are tied to each
    other. Before JAX 0.12, the results of a barrier all vary over the same axes.

    >>> tied({"a": jax.numpy.float32(1), "b": ()})
    {'a': Array(1., dtype=float32), 'b': ()}
    """
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[object, list[int]] = {}
    for number, leaf in enumerate(leaves):
        if leaf.dtype != jax.dtypes.float0:
            varying = getattr(jax.typeof(leaf), "manual_axis_type", None)
            groups.setdefault(varying, []).append(number)
    for numbers in groups.values():
        arrays = lax.optimization_barrier([leaves[n] for n in numbers])
        for number, array in zip(numbers, arrays, strict=True):
            leaves[number] = array
    return structure.unflatten(leaves)
