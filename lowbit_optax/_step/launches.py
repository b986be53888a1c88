"""``Launches``: groups the leaves of a step into kernel launches, and runs them.

:mod:`lowbit_optax._step.run` passes the arrays of each leaf to :meth:`Launches.run`,
and :mod:`lowbit_optax.lpmm.sums` passes sums of gradients. Small leaves share launches.
A kernel counts elements in int32, so it supports fewer than 2^31 elements. A larger
leaf, such as the stacked layers of a model with 70 billion parameters, is updated layer
by layer along its first axis, and each kernel writes its layer into the stacks in
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

from lowbit_optax._jaxprs.elementwise import encode_scalars, plain_scalars
from lowbit_optax._numerics.random_bits import keys_at_layer, take_in
from lowbit_optax._step import context
from lowbit_optax._step.body import KEYS, LeafBody
from lowbit_optax._step.leaf import axes_of_shards, number_of_shard
from lowbit_optax._step.param_shardings import of_a_layer
from lowbit_optax._step.plan import MIN_ELEMENTS_ALONE, needs_loop
from lowbit_optax._step.seeds import Layer
from lowbit_optax._step.step import LeafStep
from pallas_kernels.fused_update import (
    Leaf,
    Scalars,
    cpu,
    fused_update_many,
    sharing_kind,
)
from pallas_kernels.platforms import Implementation


@dataclasses.dataclass(frozen=True, eq=False)
class Launches:
    """The kernel launches of a step.

    Args:
      bodies: dict from leaf index to the static, hashable body. Its ``when`` is the
        column of the scalar that is zero in a skipped step.
      step: the step.
      scalars: the scalars that all leaves share.
      implementation: see :func:`pallas_kernels.fused_update`, or ``"blocks"`` for
        :mod:`pallas_kernels.fused_update.cpu`.
    """

    bodies: Mapping[int, typing.Any]
    step: LeafStep
    scalars: Sequence[jax.Array]
    implementation: Implementation | typing.Literal["blocks"]

    def run(self, leaves: Mapping[int, Leaf]) -> dict[int, list[jax.Array]]:
        """Return the results of each leaf. Similar leaves share a launch."""
        if self.implementation == "blocks":
            return self._by_blocks(leaves)
        groups: dict[typing.Any, list[int]] = {}
        for i, leaf in leaves.items():
            groups.setdefault(self._group(i, leaf), []).append(i)
        written = {}
        for numbers in groups.values():
            numbers.sort(key=lambda i: (math.prod(leaves[i].shape), leaves[i].shape))
            shared = [leaves[i] for i in numbers]
            written |= zip(numbers, self._launch(numbers, shared), strict=True)
        return written

    def _by_blocks(self, leaves: Mapping[int, Leaf]) -> dict[int, list[jax.Array]]:
        """Return the results of each leaf, computed by XLA on a CPU."""
        written: dict[int, list[jax.Array]] = {}
        groups: dict[typing.Any, list[int]] = {}
        keys, scalars = self.step.keys, self._plain_scalars
        for i, leaf in leaves.items():
            dtypes = tuple(x.dtype for x in leaf.arrays)
            group = self._group_of(i), self.bodies[i], dtypes
            groups.setdefault(group, []).append(i)
        before: dict[typing.Any, list] = {}
        for (apart, body, _), numbers in groups.items():
            for part in cpu.divided(numbers, leaves):
                some = [leaves[i] for i in part]
                is_joined = cpu.is_joined(some[0])
                if is_joined:
                    # Joined leaves share memory if one follows the other.
                    some, _ = lax.optimization_barrier((some, before.get(apart, [])))
                new = _blocked(body, some, keys, np.array(part, np.uint32), scalars)
                if is_joined:
                    before[apart] = new
                written |= zip(part, new, strict=True)
        return written

    def _group(self, number: int, leaf: Leaf):
        """Return a key that is equal for leaves that share a kernel."""
        size = math.prod(leaf.shape)
        is_large = size >= MIN_ELEMENTS_ALONE
        if is_large or self._is_layer(number):
            return number
        dtypes = tuple(x.dtype for x in leaf.arrays)
        implementation = typing.cast(Implementation, self.implementation)
        kind = sharing_kind(leaf, implementation)
        if any(x.repeated for x in leaf.operands):
            # The positions of repeated elements depend on the shape.
            kind = tuple(x.repeated for x in leaf.operands), leaf.shape
        return (
            self._group_of(number),
            self.bodies[number],
            dtypes,
            kind,
            self._axes(number),
        )

    def _launch(self, numbers: list[int], leaves: Sequence[Leaf]):
        """Return the results of leaves that share a kernel, or of a very large leaf."""
        number, leaf = numbers[0], leaves[0]
        # The row indices are constants, because slicing the table would need another
        # kernel.
        rows, table = np.array(numbers, np.uint32), self._tables[self._axes(number)]
        first = None
        if self._is_layer(number):
            param = self.step.leaves[number].param
            first = typing.cast(Layer, self.step.layer).first_element(param)
        elif needs_loop(leaf.shape):
            tables = _tables_of_layers(table[number], leaf.shape)
            update = lambda one, i: self._fused(numbers, [one], tables, i[None], i)[0]
            return [_over_layers(leaf, update)]
        return self._fused(numbers, leaves, table, rows, first=first)

    def _fused(self, numbers, leaves, table, rows, layer=None, first=None):
        body = self.bodies[numbers[0]]
        scalars = Scalars(table, rows, self._plain_scalars, body.when)
        return _fused(body, self.implementation, leaves, scalars, layer, first)

    def _group_of(self, number: int):
        """Return the group in which a leaf is updated."""
        group_of = context.current().group_of
        return group_of and group_of(self.step.leaves[number].name)

    def _is_layer(self, number: int) -> bool:
        layer = self.step.layer
        return layer is not None and self.step.leaves[number].name in layer.names

    def _axes(self, number: int) -> tuple[str, ...]:
        return axes_of_shards(self.step.leaves[number].param)

    @functools.cached_property
    def _tables(self) -> dict[tuple[str, ...], jax.Array]:
        """The tables of scalars, keyed by the ``jax.shard_map`` axes that change them.

        A table has a uint32 row for each leaf, with its keys and the shared scalars.
        """
        words = encode_scalars(self.scalars) if self.scalars else None
        tables = {}
        for axes in dict.fromkeys(map(self._axes, self.bodies)):
            keys = self.step.keys
            if axes:
                keys = take_in(keys[0], keys[1], number_of_shard(axes))
            columns = [k[:, None] for k in keys]
            if words is not None:
                shape = len(self.step.leaves), words.size
                columns.append(jnp.broadcast_to(words, shape))
            tables[axes] = jnp.concatenate(columns, axis=1)
        return tables

    @functools.cached_property
    def _plain_scalars(self) -> list[jax.Array]:
        return plain_scalars(self.scalars)


def _over_layers(leaf: Leaf, update: Callable[[Leaf, jax.Array], list]) -> list:
    """Update a leaf layer by layer; ``update`` returns the results of one layer."""
    overwritten = {
        number: result.overwrites
        for number, result in enumerate(leaf.results)
        if result.overwrites is not None
    }

    def advance(layer, stacks: list) -> list:
        arrays = [
            None
            if n in leaf.overwritten
            else lax.dynamic_index_in_dim(x, layer, keepdims=False)
            for n, x in enumerate(leaf.arrays)
        ]
        # Overwritten operands are read from the stack that the previous layer wrote.
        for number, operand in overwritten.items():
            arrays[operand] = stacks[number]
        place = of_a_layer(leaf.sharding)
        one = dataclasses.replace(
            leaf, shape=leaf.shape[1:], stacked=True, sharding=place
        )
        written = update(one.with_arrays(arrays), layer)
        return [
            new
            if number in overwritten
            else lax.dynamic_update_index_in_dim(stack, new, layer, 0)
            for number, (stack, new) in enumerate(zip(stacks, written, strict=True))
        ]

    stacks = [
        leaf.arrays[overwritten[number]]
        if number in overwritten
        else jnp.zeros_like(leaf.arrays[number + 1], dtype=result.dtype)
        for number, result in enumerate(leaf.results)
    ]
    return lax.fori_loop(jnp.int32(0), jnp.int32(leaf.shape[0]), advance, stacks)


def _tables_of_layers(row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return a table with a row for each layer, which may have its own keys."""
    numbers = jnp.arange(shape[0], dtype=jnp.int32)
    keys = keys_at_layer(row[0], row[1], numbers, shape[0], shape[1:])
    table = jnp.broadcast_to(row, (shape[0], row.size))
    columns = [jnp.broadcast_to(key, shape[0]) for key in keys]
    return table.at[:, :KEYS].set(jnp.stack(columns, axis=-1))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _fused(
    body: LeafBody,
    implementation: Implementation,
    leaves: Sequence[Leaf],
    scalars: Scalars,
    layer: jax.Array | None,
    first: jax.Array | None,
) -> list[list[jax.Array]]:
    """Update leaves. Traced and lowered once for equal shapes and programs."""
    return fused_update_many(
        body,
        leaves,
        scalars=scalars,
        layer=layer,
        first=first,
        implementation=implementation,
    )


@functools.partial(jax.jit, static_argnums=0)
def _blocked(
    body: LeafBody, leaves: Sequence[Leaf], keys, numbers, scalars
) -> list[list[jax.Array]]:
    """Update leaves block by block. Traced once for equal shapes and programs."""
    keys = [key[numbers] for key in keys]
    return cpu.update(body, leaves, keys, scalars, when=body.when)
