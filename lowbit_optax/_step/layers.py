"""The update of one layer of stacked parameters, and what its code must know.

:mod:`lowbit_optax.release` calls a transformation with one layer in place of the whole
stack: ``params[i]`` for ``params``, and ``state[i]`` for the state that belongs to it.
If the update treats all layers alike, the result is layer ``i`` of the whole stack's
update, except in two respects. Random numbers depend on where an element lies in the
stack, and a kernel can write into the stack itself. :class:`Layer` holds what is needed
for both.
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import get_opaque_trace_state

from lowbit_optax._numerics.random_bits import (
    RandomBits,
    keys_at_layer,
    layers_have_keys,
)

Value = typing.TypeVar("Value")


class ByIdentity(typing.Generic[Value]):
    """A mapping whose keys are compared by ``is`` alone.

    It is meant for arrays and tracers, which have no hash and whose ``==`` compares
    elements; and the ``id`` of an array that no longer exists can be given to another
    one. The mapping keeps its keys alive. A look-up goes through all of them, so there
    should be few.

    Args:
      pairs: keys and their values; if a key occurs twice, the last value counts.
    """

    def __init__(self, pairs: Iterable[tuple[typing.Any, Value]] = ()):
        self._pairs = list(pairs)

    def add(self, key, value: Value) -> None:
        """Add a key and its value."""
        self._pairs.append((key, value))

    def get(self, key) -> Value | None:
        """The value of a key; None if it was not added."""
        return next((v for k, v in reversed(self._pairs) if k is key), None)


@dataclasses.dataclass(eq=False)
class Layer:
    """One layer of some of the parameters.

    An update gets arrays that :meth:`of` has taken out of their stacks. They pass
    through optax's wrappers unchanged, so the code inside can recognise each one by
    identity, and :meth:`stack_of` returns the stack that it may write into. Likewise
    :meth:`put` recognises results that have been written already.

    Args:
      index: int32 scalar, the layer's number.
      count: how many layers there are.
      names: paths of the stacked parameters.
    """

    index: jax.Array
    count: int
    names: frozenset[str]

    def __post_init__(self):
        self._stacks: ByIdentity[jax.Array] = ByIdentity()
        self._written: ByIdentity[jax.Array] = ByIdentity()
        self._trace_state = _trace_state()

    @property
    def is_of_this_trace(self) -> bool:
        """Whether the running function belongs to the trace that made this layer.

        Inside a conditional, or another function that is traced on its own, stacks
        cannot be written, because it could not hand them to the caller.
        """
        return self._trace_state == _trace_state()

    def bits(self, random: RandomBits, name: str, leaf) -> RandomBits:
        """The random bits of a leaf, at the layer's place in its stack."""
        if name not in self.names:
            return random
        return random.at_layer(self.index, self.count, leaf.shape)

    def first_element(self, leaf) -> jax.Array:
        """The index of a layer's first element in its stack, modulo 2^32."""
        size = jnp.uint32(math.prod(leaf.shape) % 2**32)
        return self.index.astype(jnp.uint32) * size

    def keys(
        self, keys: tuple[jax.Array, jax.Array], names: Sequence[str], leaves: Sequence
    ) -> tuple[jax.Array, jax.Array]:
        """The keys of each leaf, from those of whole leaves, in a form for kernels.

        A layer of a large stack has keys of its own.
        """
        key, second = keys
        for i, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
            if name in self.names and layers_have_keys(self.count, leaf.shape):
                first, other = keys_at_layer(
                    key[i], second[i], self.index, self.count, leaf.shape
                )
                key, second = key.at[i].set(first), second.at[i].set(other)
        return key, second

    def of(self, stack: jax.Array) -> jax.Array:
        """The layer of a stack, as an array that :meth:`stack_of` will recognise."""
        layer = self._taken_from(stack)
        self._stacks.add(layer, stack)
        return layer

    def stack_of(self, layer) -> jax.Array | None:
        """The stack from which :meth:`of` took this array; None for other arrays."""
        return self._stacks.get(layer)

    def into_stacks(self, arrays: Sequence[jax.Array], old, new):
        """``new``, with results written into the stacks of the layers they replace.

        Args:
          arrays: the leaves of ``old``, by identity, that are such layers.
          old, new: arguments and results of an update, trees of one structure.
        """

        def put(layer, result):
            stack = self.stack_of(layer)
            assert stack is not None, "only layers that were taken from a stack"
            return self.put(stack, result)

        return _map_where(put, arrays, old, new)

    def out_of_stacks(self, arrays: Sequence[jax.Array], old, new):
        """The inverse of :meth:`into_stacks`: layers in the places of whole stacks.

        :meth:`put` recognises these layers as written and returns their stacks.
        """

        def taken(_, stack):
            layer = self._taken_from(stack)
            self._written.add(layer, stack)
            return layer

        return _map_where(taken, arrays, old, new)

    def put(self, stack: jax.Array, layer: jax.Array) -> jax.Array:
        """The stack with a new layer, which may have been written into it already."""
        written = self._written.get(layer)
        if written is not None:
            return written
        return lax.dynamic_update_index_in_dim(stack, layer, self.index, 0)

    def _taken_from(self, stack: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(stack, self.index, 0, keepdims=False)


def _map_where(fn: Callable, arrays: Sequence[jax.Array], old, new):
    """``new``, with ``fn(old, new)`` wherever the old leaf itself is in ``arrays``."""
    olds, (news, structure) = jax.tree.leaves(old), jax.tree.flatten(new)
    return structure.unflatten(
        fn(a, b) if any(a is x for x in arrays) else b
        for a, b in zip(olds, news, strict=True)
    )


def _trace_state():
    return get_opaque_trace_state(convention="nnx")
