"""Values in an order that the compiler keeps."""

import jax
from jax import lax


def tied(tree):
    """The same arrays, none of which can be used before all have been computed.

    Within ``shard_map``, arrays that vary over the same devices are tied, because JAX
    before 0.12 returns arrays from a barrier that all vary alike.

    >>> tied({"a": jax.numpy.float32(1), "b": ()})
    {'a': Array(1., dtype=float32), 'b': ()}
    """
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[object, list[int]] = {}
    for number, leaf in enumerate(leaves):
        varying = getattr(jax.typeof(leaf), "manual_axis_type", None)
        groups.setdefault(varying, []).append(number)
    for numbers in groups.values():
        arrays = lax.optimization_barrier([leaves[n] for n in numbers])
        for number, array in zip(numbers, arrays, strict=True):
            leaves[number] = array
    return structure.unflatten(leaves)
