"""Steps on one layer of stacked parameters: what the code that runs them must know.

:mod:`lowbit_optax.release` calls a transformation with one layer of a stack in the
stack's place, ``params[i]`` for ``params`` and ``state[i]`` for what belongs to it. For
an update that treats the layers alike the result is that layer of the whole stack's
update, but for two things. Random numbers depend on where an element is in the stack,
and a kernel can write into the stack itself: :class:`Layer` tells both.

Whether an update treats the layers alike is seen in its jaxpr. There the packing of
bits is a maze; :func:`layerwise` marks what is known to treat them alike.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence

import jax
from jax import lax
from jax.extend.core import get_opaque_trace_state

from lowbit_optax._numerics.random_bits import RandomBits
from lowbit_optax._step import context

LAYERWISE = "lowbit_layerwise"
"""Name of the calls that :func:`layerwise` marks."""


def layerwise(function: Callable, *args):
    """``function(*args)``, of stacks or of layers: a layer of one is that of the other.

    Args:
      function: of arrays; None among them stays None.
      *args: arrays, stacked along their first axis or not stacked at all.
    """
    if not context.current().is_analysed:
        return function(*args)
    call = functools.wraps(function, assigned=())(lambda *args: function(*args))
    call.__name__ = call.__qualname__ = LAYERWISE
    return jax.jit(call)(*args)


@dataclasses.dataclass(eq=False)
class Layer:
    """One layer of some leaves of the parameters.

    Args:
      index: int32 scalar, which one.
      names: paths of these leaves.
      stacks: pairs of an array that was handed to the transformation, and the stack of
        which it is this layer.
    """

    index: jax.Array
    names: frozenset[str]
    stacks: dict[int, tuple[jax.Array, jax.Array]] = dataclasses.field(
        default_factory=dict
    )
    written: dict[int, tuple[jax.Array, jax.Array]] = dataclasses.field(
        default_factory=dict
    )
    _trace: object = dataclasses.field(default_factory=lambda: _trace_state())

    def of(self, stack: jax.Array) -> jax.Array:
        """The layer of a stack, as an array that :meth:`stack_of` will know."""
        layer = lax.dynamic_index_in_dim(stack, self.index, 0, keepdims=False)
        self.stacks[id(layer)] = layer, stack
        return layer

    def stack_of(self, layer) -> jax.Array | None:
        """The stack that an array is this layer of, if it is known."""
        return self.stacks.get(id(layer), (None, None))[1]

    def into_stacks(self, ids: Collection[int], old, new):
        """Results with whole stacks in the places of these old arrays.

        Args:
          ids: of those of the old arrays.
          old, new: arguments and results of an update, trees of the same structure.
        """
        return _map_some(lambda a, b: self.put(self.stack_of(a), b), ids, old, new)

    def out_of_stacks(self, ids: Collection[int], old, new):
        """Results with layers for :meth:`into_stacks`'s stacks, known as written."""

        def layer_of(_, stack):
            layer = lax.dynamic_index_in_dim(stack, self.index, 0, keepdims=False)
            self.written[id(layer)] = layer, stack
            return layer

        return _map_some(layer_of, ids, old, new)

    def put(self, stack: jax.Array, layer: jax.Array) -> jax.Array:
        """The stack with a new layer, unless it was written into it already."""
        if id(layer) in self.written:
            return self.written[id(layer)][1]
        return lax.dynamic_update_index_in_dim(stack, layer, self.index, 0)


def stacks_to_write() -> Layer | None:
    """The layer that a transformation was called with, if its stacks can be written.

    Not inside of a conditional or another function that is traced on its own: what is
    written into a stack there could not be told to the caller.
    """
    layer = context.current().layer
    return layer if layer is not None and layer._trace == _trace_state() else None


def placed(
    random: Sequence[RandomBits], names: Sequence[str], leaves: Sequence
) -> list[RandomBits]:
    """Leaves' random bits; of a layer, those that its stack has there."""
    layer = context.current().layer
    return [
        bits.at_layer(layer.index, leaf.shape)
        if layer is not None and name in layer.names
        else bits
        for bits, name, leaf in zip(random, names, leaves, strict=True)
    ]


def _map_some(fn, ids: Collection[int], old, new):
    olds, (news, structure) = jax.tree.leaves(old), jax.tree.flatten(new)
    return structure.unflatten(
        fn(a, b) if id(a) in ids else b for a, b in zip(olds, news, strict=True)
    )


def _trace_state():
    return get_opaque_trace_state(convention="nnx")
