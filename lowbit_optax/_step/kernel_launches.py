"""Launches of fused kernels: which leaves share one, and which need many."""

import dataclasses
import functools
import math
import typing
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit_optax._numerics.random_bits import keys_at_layer
from lowbit_optax._step.body import KEYS, LeafBody
from lowbit_optax._step.layer import Layer
from lowbit_optax._step.layer_loops import needs_loop, over_layers
from pallas_kernels.fused_update import (
    MAX_ELEMENTS_OF_SMALL_LEAF,
    Leaf,
    Scalars,
    blocked,
    fused_update,
    fused_update_many,
)
from pallas_kernels.platforms import Implementation

MIN_ELEMENTS_ALONE = 2**22
"""A leaf with as many elements has a kernel of its own: a launch costs little beside
it, and a kernel over many leaves takes longer to compile."""


@dataclasses.dataclass(frozen=True, eq=False)
class Launches:
    """The kernels of a step.

    Args:
      bodies: of the leaves, by their indices.
      axes: of the user's ``jax.shard_map`` over which the leaves' shards differ.
      tables: for such axes a uint32 table, a row of scalars for each leaf; keys first.
      values: the scalars after the keys, as :func:`.scalar_words.plain_scalars` has
        them.
      firsts: of each leaf, the index of its first element in a stack that it is a layer
        of; None if it is none.
      layer: which of their stacks kernels write the leaves into.
      implementation: as in :func:`pallas_kernels.fused_update`.
    """

    bodies: Mapping[int, LeafBody]
    axes: Mapping[int, tuple[str, ...]]
    tables: Mapping[tuple[str, ...], jax.Array]
    values: Sequence[jax.Array]
    firsts: Sequence[jax.Array | None]
    layer: Layer | None
    implementation: Implementation

    def results(self, leaves: Mapping[int, Leaf]) -> dict[int, list[jax.Array]]:
        """The results of each leaf; leaves that can share a kernel are one launch."""
        groups: dict[typing.Any, list[int]] = {}
        for i, leaf in leaves.items():
            groups.setdefault(self._group(i, leaf), []).append(i)
        written = {}
        for numbers in groups.values():
            if len(numbers) == 1:
                (only,) = numbers
                written[only] = self._alone(only, leaves[only])
            else:
                numbers.sort(key=lambda i: math.prod(leaves[i].shape))
                many = self._together(numbers, [leaves[i] for i in numbers])
                written |= zip(numbers, many, strict=True)
        return written

    def _group(self, number: int, leaf: Leaf):
        """What leaves that share a kernel have in common."""
        size, is_layer = math.prod(leaf.shape), self.firsts[number] is not None
        if is_layer or size >= MIN_ELEMENTS_ALONE:
            return number
        dtypes = tuple(x.dtype for x in leaf.arrays)
        is_plain = not leaf.has_words_or_blocks
        is_small = is_plain and size <= MAX_ELEMENTS_OF_SMALL_LEAF
        shape = None if is_small else leaf.shape
        return self.bodies[number], dtypes, shape, self.axes[number]

    def _alone(self, number: int, leaf: Leaf) -> list[jax.Array]:
        # Rows have constant numbers: a slice of the table would be one more kernel.
        rows, layer, first = np.array([number], np.uint32), None, self.firsts[number]
        if leaf.stacked:
            assert self.layer is not None
            layer, first = self.layer.index, None
        elif needs_loop(leaf.shape) and first is None:
            return self._layer_by_layer(number, leaf)
        return self._fused(number, leaf, self._table(number), rows, layer, first)

    def _table(self, number: int) -> jax.Array:
        return self.tables[self.axes[number]]

    def _layer_by_layer(self, number: int, leaf: Leaf) -> list[jax.Array]:
        """The results of a leaf that has too many elements for one kernel."""
        tables = _tables_of_layers(self._table(number)[number], leaf.shape)
        update = lambda one, i: self._fused(number, one, tables, i[None], i, None)
        return over_layers(leaf, update)

    def _fused(self, number: int, leaf: Leaf, table, row, layer, first):
        return _fused(
            leaf.arrays,
            table,
            self.values,
            row,
            layer,
            first,
            body=self.bodies[number],
            like=_abstract(leaf),
            implementation=self.implementation,
        )

    def _together(self, numbers: list[int], leaves: Sequence[Leaf]):
        return _fused_many(
            [leaf.arrays for leaf in leaves],
            self._table(numbers[0]),
            self.values,
            np.array(numbers, np.uint32),
            body=self.bodies[numbers[0]],
            like=tuple(map(_abstract, leaves)),
            implementation=self.implementation,
        )


def block_by_block(
    bodies: Mapping[int, LeafBody],
    leaves: Mapping[int, Leaf],
    keys: tuple[jax.Array, jax.Array],
    scalars: Sequence[jax.Array],
) -> dict[int, list[jax.Array]]:
    """The results of each leaf by :mod:`pallas_kernels.fused_update.blocked`.

    Args:
      bodies: as for :class:`Launches`.
      leaves: by their indices.
      keys: two vectors, with a number per leaf.
      scalars: that all leaves share, as :func:`.scalar_words.plain_scalars` has them.
    """
    return {
        i: _blocked(
            leaf.arrays,
            keys,
            np.uint32(i),
            scalars,
            body=bodies[i],
            like=_abstract(leaf),
        )
        for i, leaf in leaves.items()
    }


def _tables_of_layers(row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A leaf's row of the table for each of its layers, which may have their own keys.

    Args:
      row: the leaf's.
      shape: the leaf's, with the layers first.
    """
    numbers = jnp.arange(shape[0], dtype=jnp.int32)
    keys = keys_at_layer(row[0], row[1], numbers, shape[0], shape[1:])
    table = jnp.broadcast_to(row, (shape[0], row.size))
    columns = [jnp.broadcast_to(key, shape[0]) for key in keys]
    return table.at[:, :KEYS].set(jnp.stack(columns, axis=-1))


def _abstract(leaf: Leaf) -> Leaf:
    """The leaf without its arrays, which makes it static and hashable."""
    return leaf.with_arrays([None] * len(leaf.operands))


@functools.partial(jax.jit, static_argnames=("body", "like", "implementation"))
def _fused(
    arrays,
    table,
    values,
    row,
    layer,
    first,
    *,
    body: LeafBody,
    like: Leaf,
    implementation,
):
    """Update one leaf; traced and lowered once for equal shapes and programs."""
    leaf = like.with_arrays(arrays)
    return fused_update(
        body,
        leaf.operands,
        leaf.results,
        shape=leaf.shape,
        scalars=Scalars(table, row, values, body.when),
        layer=layer,
        first=first,
        implementation=implementation,
    )


@functools.partial(jax.jit, static_argnames=("body", "like"))
def _blocked(arrays, keys, number, scalars, *, body: LeafBody, like: Leaf):
    """Update one leaf block by block; traced once for equal shapes and programs."""
    own = [lax.dynamic_index_in_dim(key, number, keepdims=False) for key in keys]
    leaf = like.with_arrays(arrays)
    return blocked.update(body, leaf, [*own, *scalars], when=body.when)


@functools.partial(jax.jit, static_argnames=("body", "like", "implementation"))
def _fused_many(
    arrays,
    table,
    values,
    rows,
    *,
    body: LeafBody,
    like: tuple[Leaf, ...],
    implementation,
):
    """Update several leaves in few kernels."""
    leaves = [leaf.with_arrays(a) for leaf, a in zip(like, arrays, strict=True)]
    return fused_update_many(
        body,
        leaves,
        scalars=Scalars(table, rows, values, body.when),
        implementation=implementation,
    )
