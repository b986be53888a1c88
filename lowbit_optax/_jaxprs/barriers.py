"""Barriers that order the operations of a compiled program."""

import jax
from jax import lax


def tied(tree):
    """Return the same arrays, none of which can be used before all are computed.

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
