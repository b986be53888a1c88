"""Leaves of more elements than a kernel counts: a loop over their layers.

A kernel counts the elements of an array in int32, so a leaf has less than 2^31 of them.
A larger one, such as the stacked layers of a model of 70 billion parameters, is updated
layer by layer along its first axis. Each kernel writes its layer into the stacks, in
place.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fused_update import MAX_ELEMENTS, Leaf
from pallas_kernels.layout import layout_of

_LEAST_OF_LAYER = 2**16
"""With smaller layers a loop would take longer than XLA does without kernels."""


def needs_loop(shape: tuple[int, ...]) -> bool:
    """Whether a leaf of this shape has more elements than a kernel counts."""
    return math.prod(shape) > MAX_ELEMENTS


def has_layers(leaf) -> bool:
    """Whether a leaf can be updated layer by layer.

    That is, words and blocks lie within layers, and no axis of the mesh that is known
    spreads the layers over devices.

    Args:
      leaf: an array or a QuantizedTensor.
    """
    shape = leaf.shape
    if len(shape) < 3 or not _LEAST_OF_LAYER <= math.prod(shape[1:]) <= MAX_ELEMENTS:
        return False
    if layout_of(shape).axis != layout_of(shape[1:]).axis:
        return False
    specs = (jax.typeof(x).sharding.spec for x in jax.tree.leaves(leaf))
    return all(not spec or spec[0] is None for spec in specs)


def over_layers(leaf: Leaf, update: Callable[[Leaf, jax.Array], list]) -> list:
    """The results of a leaf, updated layer by layer.

    Args:
      leaf: a whole one, whose results are stored like operands 1, 2 and so on.
      update: of one layer in its stacks, and its number; int32.
    """
    inside = leaf.overwritten

    def advance(layer, stacks: list) -> list:
        # What is overwritten is read from the stack that the layer before has written.
        arrays = leaf.arrays
        for result, stack in zip(leaf.results, stacks, strict=True):
            if result.overwrites is not None:
                arrays[result.overwrites] = stack
        arrays = [
            x if n in inside else lax.dynamic_index_in_dim(x, layer, keepdims=False)
            for n, x in enumerate(arrays)
        ]
        one = dataclasses.replace(leaf, shape=leaf.shape[1:], stacked=True)
        written = update(one.with_arrays(arrays), layer)
        return [
            new
            if result.overwrites is not None
            else lax.dynamic_update_index_in_dim(stack, new, layer, 0)
            for result, stack, new in zip(leaf.results, stacks, written, strict=True)
        ]

    def before(number: int) -> jax.Array:
        result = leaf.results[number]
        if result.overwrites is not None:
            return leaf.arrays[result.overwrites]
        return jnp.zeros_like(leaf.arrays[number + 1], dtype=result.dtype)

    stacks = [before(number) for number in range(len(leaf.results))]
    return lax.fori_loop(jnp.int32(0), jnp.int32(leaf.shape[0]), advance, stacks)
