"""The update of one layer of stacked parameters, and what its code must know.

:mod:`lowbit_optax.release` calls a transformation with one layer in place of the whole
stack: ``params[i]`` for ``params``, and ``state[i]`` for the state that belongs to it.
If the update treats all layers alike, the result is layer ``i`` of the whole stack's
update, except in two respects. Random numbers depend on where an element lies in the
stack, and a kernel can write into the stack itself. :class:`Layer` holds what is needed
for both.

Whether an update treats all layers alike is read off its jaxpr. The packing of bits is
hard to follow there, so :func:`marked_layerwise` marks calls that are known to treat
all layers alike.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.core
import jax.numpy as jnp

from lowbit_optax._numerics.random_bits import (
    RandomBits,
    keys_at_layer,
    layers_have_keys,
)
from lowbit_optax._step import context
from lowbit_optax._step.layer import Layer

LAYERWISE = "lowbit_layerwise"
"""The name of the calls that :func:`marked_layerwise` marks."""


def marked_layerwise(function: Callable, *args):
    """Call a function that treats the layers of stacked arguments alike, and mark it.

    That is, ``function(x)[i]`` must be ``function(x[i])`` for every layer ``i``. While
    a step is analysed, the call appears in its jaxpr under the name ``LAYERWISE``.

    Args:
      function: takes the arguments.
      *args: arrays, either all stacked along their first axis or all of one layer; or
        None.

    Returns:
      ``function(*args)``.
    """
    if not context.current().is_analysed:
        return function(*args)
    call = functools.wraps(function, assigned=())(lambda *args: function(*args))
    call.__name__ = call.__qualname__ = LAYERWISE
    return jax.jit(call)(*args)


def stacks_to_write() -> Layer | None:
    """The layer that the running update is called with, if its stacks can be written.

    Otherwise None. Inside a conditional, or another function that is traced on its own,
    stacks cannot be written, because it could not hand them to the caller.
    """
    layer = context.current().layer
    return layer if layer is not None and layer.is_of_this_trace else None


def bits_at_layers(
    random: Sequence[RandomBits], names: Sequence[str], leaves: Sequence
) -> list[RandomBits]:
    """The random bits of each leaf.

    Those of a layer are the bits at its place in the stack.
    """
    layer = context.current().layer
    return [
        bits.at_layer(layer.index, layer.count, leaf.shape)
        if layer is not None and name in layer.names
        else bits
        for bits, name, leaf in zip(random, names, leaves, strict=True)
    ]


def first_elements(names: Sequence[str], leaves: Sequence) -> list[jax.Array | None]:
    """The index of each layer's first element in its stack, modulo 2^32.

    None for leaves that are no layers.
    """
    layer = context.current().layer
    if layer is None:
        return [None] * len(names)
    index = layer.index.astype(jnp.uint32)
    return [
        index * jnp.uint32(math.prod(leaf.shape) % 2**32)
        if name in layer.names
        else None
        for name, leaf in zip(names, leaves, strict=True)
    ]


def keys_at_layers(
    keys: tuple[jax.Array, jax.Array], names: Sequence[str], leaves: Sequence
) -> tuple[jax.Array, jax.Array]:
    """The keys of each leaf, in the form that kernels take.

    Those of a layer are its own if the stack is a large one.

    Args:
      keys: two vectors, of whole leaves.
      names, leaves: of the parameters.
    """
    layer = context.current().layer
    if layer is None:
        return keys
    key, second = keys
    for i, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
        if name in layer.names and layers_have_keys(layer.count, leaf.shape):
            own = keys_at_layer(key[i], second[i], layer.index, layer.count, leaf.shape)
            key, second = key.at[i].set(own[0]), second.at[i].set(own[1])
    return key, second
