"""Barriers that keep XLA from moving and fusing parts of a released step."""

from collections.abc import Callable

import jax
from jax import lax


def alone(index: jax.Array, update: Callable, *old):
    """Run ``update(*old)`` apart from the reads and writes of stacks around it.

    XLA would fuse these reads and writes with the update. On a GPU, some threads of the
    fusion write a layer's packed words in place while others still read them, and the
    weights become wrong. On GPUs and TPUs, a barrier keeps the reads apart. XLA's CPU
    compiler drops barriers, and would copy whole stacks in every iteration. On CPUs, a
    conditional keeps the reads apart. ``index`` is the number of a layer, which must
    not be negative.
    """

    def branched(index, old):
        return lax.cond(index >= 0, lambda: update(*old), lambda: old)

    direct = lambda _, old: update(*tied(old))
    return lax.platform_dependent(index, old, cpu=branched, default=direct)


def tied(tree):
    """Return the same arrays, and allow no use of one before all have been computed.

    Within ``shard_map``, arrays that vary over the same devices are tied, because JAX
    before 0.12 returns arrays from a barrier that all vary alike.

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
