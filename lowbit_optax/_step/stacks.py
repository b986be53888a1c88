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

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.extend.core import get_opaque_trace_state

from lowbit_optax._numerics.random_bits import RandomBits
from lowbit_optax._step import context
from lowbit_optax._step.identity import ByIdentity, is_one_of

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


@dataclasses.dataclass(eq=False)
class Layer:
    """One layer of some of the parameters.

    An update gets arrays that :meth:`of` has taken out of their stacks. They pass
    through optax's wrappers unchanged, so the code inside can recognise each one by
    identity, and :meth:`stack_of` returns the stack that it may write into. Likewise
    :meth:`put` recognises results that have been written already.

    Args:
      index: int32 scalar, the layer's number.
      names: paths of the stacked parameters.
    """

    index: jax.Array
    names: frozenset[str]
    _stacks: ByIdentity[jax.Array] = dataclasses.field(
        default_factory=ByIdentity, init=False, repr=False
    )
    _written: ByIdentity[jax.Array] = dataclasses.field(
        default_factory=ByIdentity, init=False, repr=False
    )
    _trace_state: object = dataclasses.field(
        default_factory=lambda: _trace_state(), init=False, repr=False
    )

    @property
    def is_of_this_trace(self) -> bool:
        """Whether the running function belongs to the trace that made this layer."""
        return self._trace_state == _trace_state()

    def of(self, stack: jax.Array) -> jax.Array:
        """The layer of a stack, as an array that :meth:`stack_of` will recognise."""
        layer = self._taken_from(stack)
        self._stacks.add(layer, stack)
        return layer

    def stack_of(self, layer) -> jax.Array | None:
        """The stack from which :meth:`of` took this array; None for other arrays."""
        return self._stacks.get(layer)

    def into_stacks(self, arrays: Sequence[jax.Array], old, new):
        """Write some results of an update into the stacks of the arrays they replace.

        Args:
          arrays: the leaves of ``old``, by identity, whose results go into stacks.
          old, new: arguments and results of an update, trees of one structure.

        Returns:
          ``new``, with whole stacks in the places of these arrays.
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
        bits.at_layer(layer.index, leaf.shape)
        if layer is not None and name in layer.names
        else bits
        for bits, name, leaf in zip(random, names, leaves, strict=True)
    ]


def _map_where(fn: Callable, arrays: Sequence[jax.Array], old, new):
    """``new``, with ``fn(old, new)`` wherever the old leaf is one of the arrays."""
    olds, (news, structure) = jax.tree.leaves(old), jax.tree.flatten(new)
    return structure.unflatten(
        fn(a, b) if is_one_of(a, arrays) else b for a, b in zip(olds, news, strict=True)
    )


def _trace_state():
    return get_opaque_trace_state(convention="nnx")
