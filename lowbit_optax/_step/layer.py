"""One layer of stacked parameters, and the stacks that it was taken from."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.extend.core import get_opaque_trace_state

from lowbit_optax._step.identity import ByIdentity, is_one_of


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


def _map_where(fn: Callable, arrays: Sequence[jax.Array], old, new):
    """``new``, with ``fn(old, new)`` wherever the old leaf is one of the arrays."""
    olds, (news, structure) = jax.tree.leaves(old), jax.tree.flatten(new)
    return structure.unflatten(
        fn(a, b) if is_one_of(a, arrays) else b for a, b in zip(olds, news, strict=True)
    )


def _trace_state():
    return get_opaque_trace_state(convention="nnx")
