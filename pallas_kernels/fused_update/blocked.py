"""Fused updates of large leaves on CPUs, in a loop over blocks of the leaf.

XLA's CPU compiler makes one loop for each result of an update, and cannot overwrite an
array that another loop still reads. For a whole leaf, it therefore writes every result
to new memory, whose pages the system must clear, and then copies the result. Here, a
loop updates blocks of :data:`BLOCK` elements. The results of a block stay in a few MiB
of memory until all of them are computed, and the next iteration reuses that memory.

:mod:`pallas_kernels.fused_update.xla` updates each block, so the results are equal.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fused_update import xla
from pallas_kernels.fused_update.spec import BlockBody, Body, Leaf
from pallas_kernels.layout import layout_of
from pallas_kernels.platforms import transformable

BLOCK = 2**17
"""Approximate number of elements of a block. Its arrays fit into a core's caches."""


def update(
    body: Body | BlockBody,
    leaf: Leaf,
    scalars: Sequence[jax.Array],
    when: int | None = None,
) -> list[jax.Array]:
    """Run :func:`pallas_kernels.fused_update.xla.update` block by block.

    Args:
      body, leaf, when: see :func:`.xla.update`. The leaf must not be stacked.
      scalars: scalars of the body, in any dtypes that it accepts. The results can be
        differentiated with respect to them.
    """

    def blocks(scalars, leaf):
        parts = _parts(leaf)
        seen = dataclasses.replace(leaf, shape=parts.shape)
        arrays = [o.array.reshape(seen.stored_shape(o)) for o in leaf.operands]

        def arguments(first, length):
            shape = (length, *parts.shape[1:])
            first = jnp.uint32(first) * jnp.uint32(math.prod(parts.shape[1:]))
            return scalars, xla.index_of(shape, parts.shape, first)

        skips = None if when is None else scalars[when] == jnp.uint32(0)
        new = over_parts(body, seen.with_arrays(arrays), parts, arguments, skips)
        return [
            x.reshape(leaf.stored_shape(result))
            for x, result in zip(new, leaf.results, strict=True)
        ]

    def whole(scalars, leaf):
        return xla.update(body, leaf, scalars, when=when)

    return transformable(blocks, whole)(list(scalars), leaf)


@dataclasses.dataclass(frozen=True)
class Parts:
    """A division of the first axis of a leaf into parts.

    Args:
      shape: shape of the leaf, or of a reshaped view of it.
      length: length of a part along the first axis.
      last: length of an additional last part if its length differs; otherwise 0.
    """

    shape: tuple[int, ...]
    length: int
    last: int = 0

    @property
    def count(self) -> int:
        """Number of parts that have the length ``length``."""
        return (self.shape[0] - self.last) // self.length


def _parts(leaf: Leaf) -> Parts:
    """Returns the parts of a leaf, or one part if several would change the layout."""
    shape, is_plain = leaf.shape, not leaf.has_words_or_blocks
    if is_plain:
        size, columns = math.prod(shape), shape[-1]
        shape = (size // columns, columns) if columns <= BLOCK else (size,)
    parts = _divided(shape, leaf.unit(0))
    if is_plain and parts.last:
        # The number of elements may have a divisor that the number of rows lacks.
        return _divided((math.prod(shape),), 1)
    lengths = shape[0], parts.length, parts.last
    axes = {layout_of((n, *shape[1:])).axis for n in lengths if n}
    return parts if is_plain or len(axes) == 1 else Parts(shape, shape[0])


def _divided(shape: tuple[int, ...], unit: int) -> Parts:
    """Returns parts of the first axis that consist of ``unit`` rows or a multiple."""
    rows, row = shape[0], math.prod(shape[1:])
    parts = max(1, round(rows * row / BLOCK))
    for count in range(parts, 2 * parts):
        if rows % (count * unit) == 0:
            return Parts(shape, rows // count)
    length = max(BLOCK // (unit * row), 1) * unit
    if rows < 2 * length:
        return Parts(shape, rows)
    # The last part gets the remainder, because few rows could change the layout.
    return Parts(shape, length, length + rows % length)


def over_parts(
    body: Body | BlockBody,
    leaf: Leaf,
    parts: Parts,
    arguments: Callable,
    skips: jax.Array | None,
) -> list[jax.Array]:
    """Update a leaf part by part along its first axis and return its results.

    Args:
      body: body of the update.
      leaf: leaf with the shape of ``parts``.
      parts: parts of the leaf.
      arguments: a function that returns the scalars and the index for the body, given
        the first row of a part and its number of rows.
      skips: boolean scalar, whether to skip the update; None if it is never skipped.
    """
    dtypes = [x.dtype for x in leaf.arrays]
    leaf = leaf.with_arrays(list(map(_to_slice, leaf.arrays)))
    written = {
        place: leaf.arrays[place]
        if place < len(dtypes)
        else _to_slice(jnp.zeros(leaf.stored_shape(result), result.dtype))
        for place, result in zip(_places(leaf), leaf.results, strict=True)
    }
    update = functools.partial(_update_part, body, leaf, dtypes, parts, arguments)

    def advance(number, written):
        number = _in_parallel_loop(number, parts.count)
        return update(number, parts.length, written)

    def finish(_, written):
        return update(parts.count, parts.last, written)

    turns = 1 if skips is None else 1 - skips.astype(jnp.int32)
    if parts.count > 1 or skips is not None:
        written = lax.fori_loop(0, turns * parts.count, advance, written)
    else:
        written = update(0, parts.length, written)
    if parts.last and skips is None:
        written = finish(0, written)
    elif parts.last:
        written = lax.fori_loop(0, turns, finish, written)
    # If XLA fused the writes with a later reshape or bitcast, it would use new memory.
    results = _barrier([written[place] for place in _places(leaf)])
    return [
        _from_slice(x, result.dtype)
        for x, result in zip(results, leaf.results, strict=True)
    ]


def _places(leaf: Leaf) -> list[int]:
    """Returns the index of the operand that each result overwrites, or a new index."""
    return [
        len(leaf.operands) + number if result.overwrites is None else result.overwrites
        for number, result in enumerate(leaf.results)
    ]


def _update_part(
    body: Body | BlockBody,
    leaf: Leaf,
    dtypes: Sequence,
    parts: Parts,
    arguments: Callable,
    number: jax.Array | int,
    length: int,
    written: dict[int, jax.Array],
) -> dict[int, jax.Array]:
    """Returns ``written`` after adding the results of one part.

    Args:
      body, leaf, parts, arguments: see :func:`over_parts`.
      dtypes: dtypes of the leaf's arrays before :func:`_to_slice`.
      number: index of the part.
      length: number of rows of the part.
      written: the results of the whole leaf, keyed by :func:`_places`.
    """
    row = parts.shape[1:]
    part = dataclasses.replace(leaf, shape=(length, *row))
    whole = dataclasses.replace(leaf, shape=(parts.length, *row))

    def compute() -> list[jax.Array]:
        arrays = [
            lax.dynamic_slice_in_dim(
                written.get(place, operand.array),
                number * whole.stored_shape(operand)[0],
                part.stored_shape(operand)[0],
            )
            for place, operand in enumerate(leaf.operands)
        ]
        own = part.with_arrays(list(map(_from_slice, arrays, dtypes)))
        scalars, index = arguments(number * parts.length, length)
        apart = functools.partial(_apart, leaf.arrays[0])
        new = xla.update(body, own, scalars, index=index, barrier=apart)
        return list(map(_to_slice, new))

    shapes = [(part.stored_shape(x), x.dtype) for x in leaf.results]
    new = _unfused(compute, shapes, leaf.arrays[0])
    return {
        place: lax.dynamic_update_slice_in_dim(
            written[place], value, number * whole.stored_shape(result)[0], 0
        )
        for place, value, result in zip(_places(leaf), new, leaf.results, strict=True)
    }


DROPS_BARRIERS = jax.__version_info__ < (0, 11)
"""Whether XLA:CPU removes barriers before it fuses operations, as in JAX 0.10.

This version also converts a whole array of narrow floats to float32 in every iteration
of a loop that slices the array or writes to it.
"""


def _to_slice(x: jax.Array) -> jax.Array:
    """Returns the array, or its bits as integers if XLA would convert slices of it."""
    is_narrow = x.dtype.itemsize < 4 and jnp.issubdtype(x.dtype, jnp.floating)
    if not (DROPS_BARRIERS and is_narrow):
        return x
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def _from_slice(x: jax.Array, dtype) -> jax.Array:
    """Inverts :func:`_to_slice`."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def _unfused(
    compute: Callable[[], list[jax.Array]],
    results: Sequence[tuple[tuple[int, ...], jnp.dtype]],
    array: jax.Array,
) -> list[jax.Array]:
    """Returns the results of ``compute``, and keeps XLA from fusing it with other code.

    JAX 0.10 drops barriers, so ``compute`` runs in a branch that is always taken. XLA
    keeps the branch, because it cannot prove that no element is below minus infinity.
    """
    first = array[(0,) * array.ndim].astype(jnp.float32)
    # If zeros were defined outside the branch, every iteration would copy them.
    zeros = lambda: [_to_slice(jnp.zeros(*each)) for each in results]
    return lax.cond(first < -jnp.inf, zeros, compute)


def _apart(array: jax.Array, values: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the values, computed once and before any operation that uses them."""
    if not DROPS_BARRIERS:
        return _barrier(values)
    values = list(values)
    bits = list(map(_to_slice, values))
    kept = _unfused(lambda: bits, [(x.shape, x.dtype) for x in values], array)
    return [_from_slice(x, y.dtype) for x, y in zip(kept, values, strict=True)]


def _barrier(values: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the values, and keeps operations from using one before all are computed.

    No part of a block is then overwritten while it is read, so XLA does not copy it.
    """
    return list(lax.optimization_barrier(tuple(values)))


def _in_parallel_loop(number: jax.Array, count: int) -> jax.Array:
    """Returns ``number`` by sorting it with ``count``, which keeps the loop parallel.

    XLA:CPU in JAX 0.12 compiles a loop into one function, which runs in one thread,
    unless the loop contains a sort. XLA cannot remove this sort, because it cannot
    prove that ``number`` is less than ``count``.
    """
    return lax.sort(jnp.stack([number, jnp.asarray(count, number.dtype)]))[0]
