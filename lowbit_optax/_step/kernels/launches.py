"""Launches of fused kernels: which leaves share one, and which need many.

A kernel counts the elements of an array in int32, so a leaf has less than 2^31 of them.
A larger one, such as the stacked layers of a model of 70 billion parameters, is updated
layer by layer along its first axis. Each kernel writes its layer into the stacks, in
place.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit_optax._jaxprs.leaf_program import encode_scalars, plain_scalars
from lowbit_optax._numerics.random_bits import keys_at_layer, take_in
from lowbit_optax._step.kernels.body import KEYS, LeafBody
from lowbit_optax._step.layers import Layer
from lowbit_optax._step.leaf import axes_of_shards, number_of_shard
from lowbit_optax._step.step import Step
from pallas_kernels.fused_update import (
    MAX_ELEMENTS,
    MAX_ELEMENTS_OF_SMALL_LEAF,
    Leaf,
    Scalars,
    blocked,
    fused_update,
    fused_update_many,
)
from pallas_kernels.layout import layout_of
from pallas_kernels.platforms import Implementation

MIN_ELEMENTS_ALONE = 2**22
"""A leaf with as many elements has a kernel of its own: a launch costs little beside
it, and a kernel over many leaves takes longer to compile."""

_LEAST_OF_LAYER = 2**16
"""With smaller layers a loop would take longer than XLA does without kernels."""


@dataclasses.dataclass(frozen=True, eq=False)
class Launches:
    """The kernels of a step.

    Args:
      bodies: of the leaves, by their numbers.
      step: whose they are.
      scalars: that all leaves share.
      layer: which of their stacks kernels write the leaves into.
      implementation: as in :func:`pallas_kernels.fused_update`.
    """

    bodies: Mapping[int, LeafBody]
    step: Step
    scalars: Sequence[jax.Array]
    layer: Layer | None
    implementation: Implementation

    def run(self, leaves: Mapping[int, Leaf]) -> dict[int, list[jax.Array]]:
        """The results of each leaf; leaves that can share a kernel are one launch."""
        groups: dict[typing.Any, list[int]] = {}
        for i, leaf in leaves.items():
            groups.setdefault(self._group(i, leaf), []).append(i)
        written = {}
        for numbers in groups.values():
            numbers.sort(key=lambda i: math.prod(leaves[i].shape))
            shared = [leaves[i] for i in numbers]
            many = self._alone(numbers[0], shared[0]) if len(shared) == 1 else None
            written |= zip(numbers, many or self._shared(numbers, shared), strict=True)
        return written

    def _group(self, number: int, leaf: Leaf):
        """What leaves that share a kernel have in common."""
        size = math.prod(leaf.shape)
        if self._is_layer(number) or size >= MIN_ELEMENTS_ALONE:
            return number
        dtypes = tuple(x.dtype for x in leaf.arrays)
        is_small = not leaf.has_words_or_blocks and size <= MAX_ELEMENTS_OF_SMALL_LEAF
        shape = None if is_small else leaf.shape
        return self.bodies[number], dtypes, shape, self._axes(number)

    def _alone(self, number: int, leaf: Leaf) -> list[list[jax.Array]]:
        # Rows have constant numbers: a slice of the table would be one more kernel.
        rows, table = np.array([number], np.uint32), self._table(number)
        layer = first = None
        if leaf.stacked:
            assert self.layer is not None
            layer = self.layer.index
        elif self._is_layer(number):
            first = self._first_element(number)
        elif needs_loop(leaf.shape):
            return [self._layer_by_layer(number, leaf)]
        return [self._fused(number, leaf, table, rows, layer, first)]

    def _layer_by_layer(self, number: int, leaf: Leaf) -> list[jax.Array]:
        """The results of a leaf that has too many elements for one kernel."""
        tables = _tables_of_layers(self._table(number)[number], leaf.shape)
        update = lambda one, i: self._fused(number, one, tables, i[None], i, None)
        return _over_layers(leaf, update)

    def _fused(self, number: int, leaf: Leaf, table, row, layer=None, first=None):
        return _fused(
            leaf.arrays,
            Scalars(table, row, self._plain_scalars, self.bodies[number].when),
            layer,
            first,
            body=self.bodies[number],
            like=_abstract(leaf),
            implementation=self.implementation,
        )

    def _shared(self, numbers: list[int], leaves: Sequence[Leaf]):
        rows, body = np.array(numbers, np.uint32), self.bodies[numbers[0]]
        table = self._table(numbers[0])
        return _fused_many(
            [leaf.arrays for leaf in leaves],
            Scalars(table, rows, self._plain_scalars, body.when),
            body=body,
            like=tuple(map(_abstract, leaves)),
            implementation=self.implementation,
        )

    def _is_layer(self, number: int) -> bool:
        layer = self.step.layer
        return layer is not None and self.step.leaves[number].name in layer.names

    def _first_element(self, number: int) -> jax.Array:
        """The index of a layer's first element in its stack."""
        leaf, layer = self.step.leaves[number], typing.cast(Layer, self.step.layer)
        return layer.first_element(leaf.param)

    def _axes(self, number: int) -> tuple[str, ...]:
        return axes_of_shards(self.step.leaves[number].param)

    def _table(self, number: int) -> jax.Array:
        """The table for a leaf and all that vary over the same axes."""
        return self._tables[self._axes(number)]

    @functools.cached_property
    def _tables(self) -> dict[tuple[str, ...], jax.Array]:
        """By the axes of the user's ``jax.shard_map`` over which shards differ.

        Each is a uint32 table with a row per leaf: its keys, and what all share.
        """
        words = encode_scalars(self.scalars) if self.scalars else None
        tables = {}
        for axes in dict.fromkeys(map(self._axes, self.bodies)):
            keys = self.step.keys
            if axes:
                keys = take_in(*keys, number_of_shard(axes))
            columns = [k[:, None] for k in keys]
            if words is not None:
                shape = len(self.step.leaves), words.size
                columns.append(jnp.broadcast_to(words, shape))
            tables[axes] = jnp.concatenate(columns, axis=1)
        return tables

    @functools.cached_property
    def _plain_scalars(self) -> list[jax.Array]:
        return plain_scalars(self.scalars)


def block_by_block(
    bodies: Mapping[int, LeafBody],
    leaves: Mapping[int, Leaf],
    keys: tuple[jax.Array, jax.Array],
    scalars: Sequence[jax.Array],
) -> dict[int, list[jax.Array]]:
    """The results of each leaf by :mod:`pallas_kernels.fused_update.blocked`.

    Args:
      bodies: as for :class:`Launches`.
      leaves: by their numbers.
      keys: two vectors, with a number per leaf.
      scalars: that all leaves share.
    """
    plain = plain_scalars(scalars)
    return {
        i: _blocked(
            leaf.arrays, keys, np.uint32(i), plain, body=bodies[i], like=_abstract(leaf)
        )
        for i, leaf in leaves.items()
    }


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


def _over_layers(leaf: Leaf, update: Callable[[Leaf, jax.Array], list]) -> list:
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
    scalars: Scalars,
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
        scalars=scalars,
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
    arrays, scalars: Scalars, *, body: LeafBody, like: tuple[Leaf, ...], implementation
):
    """Update several leaves in few kernels."""
    leaves = [leaf.with_arrays(a) for leaf, a in zip(like, arrays, strict=True)]
    return fused_update_many(
        body,
        leaves,
        scalars=scalars,
        implementation=implementation,
    )
